"""What is not a whole checkpoint of this very run is refused, and nothing is lost."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm import checkpoint
from lowcomm.checkpoint import Checkpoints
from tests.problems import begin, method, program, record, targets

CARRY = {"w": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(4)}


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1 and 2."""
    with Checkpoints(tmp_path / "run", keep=3) as saved:
        for step in (1, 2):
            saved.save(step, CARRY | {"n": jnp.int32(4 + step)})
        saved.wait()
        yield saved


def first_of(name, **setting):
    return begin(method(name, **setting), workers=setting.get("workers", 4))


# Other runs


def test_a_carry_of_another_method_is_told_by_its_states(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, tuple(first_of("diloco")))
        with pytest.raises(ValueError, match="another method") as error:
            saved.restore(tuple(first_of("top_k_sgd")))
    has, lacks = str(error.value).split(";")
    assert "[1].anchor, [1].inner, [1].outer" in has
    assert "which this carry lacks" in has
    assert "this carry has [1][0], [1][1]" in lacks  # the residual, and the inner


def test_many_leaves_that_differ_are_counted_and_not_listed(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, {f"layer {i}": jnp.zeros(2) for i in range(40)})
        with pytest.raises(
            ValueError, match="and 34 more, which this carry lacks"
        ) as e:
            saved.restore({})
    assert len(str(e.value)) < 500


def test_a_carry_of_another_model_is_told_by_shapes_and_dtypes(saved):
    like = {"w": jnp.zeros((2, 5)), "n": jnp.float32(0)}
    with pytest.raises(ValueError, match="another model") as error:
        saved.restore(like)
    assert "['w'] is float32[2, 3] there and float32[2, 5] here" in str(error.value)
    assert "['n'] is int32[] there and float32[] here" in str(error.value)


def test_another_number_of_workers_is_one_sentence(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, first_of("diloco"))
        with pytest.raises(ValueError, match="is of 4 workers and this carry of 3:"):
            saved.restore(first_of("diloco", workers=3))


def test_keys_of_another_generator_are_refused(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, jax.random.key(0))
        with pytest.raises(
            ValueError, match=r"\(the carry\) is key<fry>\[\] there and"
        ):
            saved.restore(jax.random.key(0, impl="rbg"))


def test_other_settings_are_refused_with_both_values(tmp_path):
    settings = {"period": 4, "model": {"width": 64}, "rate": 0.1, "nan": float("nan")}
    with Checkpoints(tmp_path, settings=settings) as saved:
        saved.save(1, CARRY)
    Checkpoints(tmp_path, settings=settings).close()
    other = {**settings, "period": 8, "workers": (8, 1)}
    del other["rate"]
    with pytest.raises(ValueError, match="saved with other settings") as error:
        Checkpoints(tmp_path, settings=other)
    assert "period was 4 and is 8; rate was 0.1 and is absent" in str(error.value)
    assert "workers was absent and is [8, 1]" in str(error.value)
    assert "model" not in str(error.value)


def test_what_is_not_there_is_an_error_that_says_what_is(saved, tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint of step 5 in .*holds 1, 2\."):
        saved.restore(CARRY, 5)
    with (
        Checkpoints(tmp_path / "none") as none,
        pytest.raises(ValueError, match=r"no checkpoint in .*none"),
    ):
        none.restore(CARRY)


def test_a_checkpoint_is_never_replaced(saved):
    for step in (1, 2):
        with pytest.raises(ValueError, match=r"holds 1, 2: .* never replaced"):
            saved.save(step, CARRY)
    assert saved.restore(CARRY)[1]["n"] == 6


# Values that cannot be saved


@pytest.mark.parametrize(
    "leaf",
    [
        *("adam", len, object(), 2**70, np.array(["a"]), np.array([None])),
        *(np.ones(2, ">f4"), jnp.ones(2, "uint4"), np.array(["2020-01-01"], "M8[s]")),
    ],
    ids=lambda leaf: f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}",
)
def test_a_leaf_that_is_not_a_number_is_named_by_its_path(leaf, saved):
    state = (optax.EmptyState(), optax.TraceState({"w": leaf}))
    with pytest.raises(ValueError, match=r"leaf \[1\]\.trace\['w'\] is .*out of the"):
        saved.save(3, state)
    with pytest.raises(ValueError, match=r"leaf \[1\]\.trace\['w'\]"):
        saved.restore(state)


def test_settings_and_notes_are_json(saved, tmp_path):
    with pytest.raises(ValueError, match=r"settings\['when'\] is <function"):
        Checkpoints(tmp_path, settings={"period": 4, "when": lambda t: t})
    with pytest.raises(ValueError, match=r"notes\['loss'\] is Array\(2\., .*float\(\)"):
        saved.save(3, CARRY, notes={"loss": jnp.float32(2)})
    with pytest.raises(ValueError, match="notes must be a dict, not 'good'"):
        saved.save(3, CARRY, notes="good")


def test_misuse_is_named(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    with Checkpoints(tmp_path) as saved, pytest.raises(ValueError, match="step=-1"):
        saved.save(-1, CARRY)
    with pytest.raises(ValueError, match="was closed"):
        saved.save(1, CARRY)


def test_without_orbax_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    spec = importlib.util.spec_from_file_location("lowcomm.again", checkpoint.__file__)
    with pytest.raises(ImportError, match=r"pip install 'lowcomm\[checkpoints\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Failures while writing


def full_disk(folder):
    raise OSError(28, "No space left on device")


def test_a_failed_save_is_raised_by_the_next_one_which_can_be_repeated(
    saved, monkeypatch
):
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "file_list", full_disk)
        saved.save(3, CARRY)
        with pytest.raises(RuntimeError, match=r"run/3 could not be written.*No space"):
            saved.save(4, CARRY)
    assert saved.steps() == [1, 2]
    saved.save(3, CARRY)
    assert saved.resume(CARRY)[0] == 3


def test_a_failed_save_is_raised_when_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "file_list", full_disk)
    with (
        pytest.raises(RuntimeError, match="1 could not be written"),
        Checkpoints(tmp_path) as saved,
    ):
        saved.save(1, CARRY)


def test_an_error_of_the_loop_is_not_hidden_by_one_of_a_save(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "file_list", full_disk)

    def train():
        with Checkpoints(tmp_path) as saved:
            saved.save(1, CARRY)
            raise FloatingPointError("the loss is nan")

    with pytest.raises(FloatingPointError, match="the loss is nan") as error:
        train()
    assert "1 could not be written" in error.value.__notes__[0]


def test_a_failure_is_told_once_and_not_by_orbax_too(tmp_path, monkeypatch, caplog):
    log = logging.getLogger("absl").error  # what orbax does before it raises
    tell = compile(
        "log('no space')", "/site-packages/orbax/checkpoint/_src/x.py", "exec"
    )

    def write(*_):
        exec(tell, {"log": log})
        raise OSError(28, "No space left on device")

    with Checkpoints(tmp_path) as saved:
        monkeypatch.setattr(saved, "_write", write)
        saved.save(1, CARRY)
        with pytest.raises(RuntimeError, match=r"1 could not be written.*No space"):
            saved.wait()
    assert caplog.records == []
    exec(tell, {"log": log})
    assert len(caplog.records) == 1  # what the user does with orbax is told as before


# Half-written and damaged checkpoints


def test_what_a_writer_left_behind_is_never_picked_up(saved):
    folder = saved.directory
    tmp = folder / "5" / "arrays.orbax-checkpoint-tmp" / "ocdbt.process_0"
    tmp.mkdir(parents=True)
    (tmp / "manifest.ocdbt").write_bytes(b"half")
    (folder / "4").mkdir()  # before orbax began
    saved.save(6, CARRY)
    saved.wait()
    for file in (folder / "6").glob("about.json"):  # before it was sealed
        file.rename(file.with_name("about.json.part"))
    (folder / "7").mkdir()
    (folder / "7" / "figure.png").write_bytes(b"the user's own")
    saved.close()
    with Checkpoints(folder) as again:
        step, carry = again.restore(CARRY)
        assert (step, carry["n"]) == (2, 6)
        again.save(3, carry)
    assert sorted(x.name for x in folder.iterdir()) == ["2", "3", "7"]


@pytest.mark.parametrize("how", ["truncated", "missing", "changed", "longer"])
def test_a_damaged_file_is_an_error_and_not_other_numbers(how, saved):
    folder = saved.directory / "2"
    files = [f for f in folder.glob("arrays/**/*") if f.is_file()]
    assert {f.name for f in files} > {"manifest.ocdbt", "_METADATA"}
    for file in files:
        whole = file.read_bytes()
        half = len(whole) // 2
        if how == "missing":
            file.unlink()
        elif how == "truncated":
            file.write_bytes(whole[:half])
        elif how == "longer":
            file.write_bytes(whole + b"\0")
        else:
            file.write_bytes(
                whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
            )
        with pytest.raises(
            ValueError, match=re.escape(f"{folder} is damaged: arrays/")
        ):
            saved.restore(CARRY)
        file.write_bytes(whole)
    assert saved.restore(CARRY)[1]["n"] == 6


def test_a_damaged_description_is_an_error_and_names_the_folder(saved):
    file = saved.directory / "2" / "about.json"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"run/2 is damaged: about\.json is not JSON"):
        saved.restore(CARRY)
    assert saved.restore(CARRY, 1)[1]["n"] == 5


WRITER = """
import os, signal
from lowcomm import checkpoint
from tests.problems import begin, method, program, targets

seal = checkpoint.file_list
def killed(folder):
    if folder.name == "6":
        os.kill(os.getpid(), signal.SIGKILL)
    return seal(folder)
checkpoint.file_list = killed

carry, step = begin(method("diloco")), program("diloco")
with checkpoint.Checkpoints({folder!r}) as saved:
    for t in range(8):
        carry = step(carry, targets(), t)
        saved.save(t + 1, carry, notes={{"seen": t}})
"""


def in_another_process(code):
    """What a program wrote to stderr, and how it ended."""
    here = Path(lc.__file__).parents[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(here)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        cwd=here,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.stderr, done.returncode


def test_a_run_killed_while_it_writes_goes_on_in_another_process_bit_for_bit(tmp_path):
    told, code = in_another_process(WRITER.format(folder=str(tmp_path)))
    assert (told, code) == ("", -signal.SIGKILL)
    assert (tmp_path / "6" / "arrays").is_dir()
    with Checkpoints(tmp_path) as saved:
        first, carry = saved.resume(first_of("diloco"))
        assert (first, saved.about().notes) == (5, {"seen": 4})
    for t, wanted in enumerate(record("diloco")[first:], first):
        carry = program("diloco")(carry, targets(), jnp.int32(t))
        jax.tree.map(np.testing.assert_array_equal, carry, wanted)


def test_a_program_that_saves_ends_without_a_word(tmp_path):
    code = f"""
import numpy as np
from lowcomm.checkpoint import Checkpoints
with Checkpoints({str(tmp_path)!r}) as saved:
    for t in range(3):
        saved.save(t, np.ones(1000))
    saved.restore(np.zeros(1000))
"""
    assert in_another_process(code) == ("", 0)
    with Checkpoints(tmp_path) as saved:
        assert saved.steps() == [1, 2]
