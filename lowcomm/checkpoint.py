"""Checkpoints of the whole carry, at any step, from which a run goes on bit for bit.

The carry is the tree that goes from step to step, such as ``(params, state)``, stacked
``[K, …]`` or not: parameters, inner and outer optimizer state, anchor, residuals,
pending exchanges, keys. Nothing else is needed, since the step is an argument and
there are no hidden counters, and nothing less suffices.

How they lie on disk, and what of a writer that died is left, ``lowcomm.folders`` says.
"""

from __future__ import annotations

import atexit
import json
import logging
import operator
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .agreement import together
from .folders import ABOUT, ARRAYS, begin, claim, complete_steps, remove
from .leaves import PyTree
from .manifest import (
    About,
    Leaf,
    as_json,
    check_files,
    check_same,
    check_same_settings,
    damaged,
    file_list,
    leaves_of,
    manifest,
    some,
)
from .resize import Carry, resized
from .stored import as_saved, bits, placed, stored

try:
    import orbax.checkpoint as ocp
except ImportError as missing:
    raise ImportError(
        "checkpoints are written with orbax: pip install 'lowcomm[checkpoints]'."
    ) from missing


class Checkpoints:
    r"""The checkpoints of one run, in a folder of their own.

    .. math::
        \text{restore}(\text{save}(x)) = x \quad \text{bit for bit}

    ``keep`` of them are kept, the newest. ``settings`` are what the run depends on, as
    JSON; they are saved along, and a folder that holds a run with other settings is
    refused. ``None`` compares nothing, for a reader; those that are ``free`` may have
    changed. Nothing is sent between workers, but several processes wait for each other.

    Use it as a context, or ``close`` it: that waits until what was saved is complete,
    which the end of the program does not. An error of a save is raised by the next
    ``save``, ``wait``, ``restore`` or at the end.

    Raises:
        ValueError: ``keep`` below 1; settings that are not JSON, or other than those
            of the newest checkpoint there.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> folder = tempfile.TemporaryDirectory()
        >>> def train(steps):
        ...     with Checkpoints(folder.name, settings={"rate": 0.5}) as saved:
        ...         start, x = saved.resume(jnp.zeros(2))
        ...         for t in range(start, steps):
        ...             x = x + 0.5 * (t - x)
        ...             saved.save(t + 1, x, notes={"seen": t})
        ...     return start, x
        >>> print(train(3), train(5), train(5), sep="\n")
        (0, Array([1.25, 1.25], dtype=float32))
        (3, Array([3.0625, 3.0625], dtype=float32))
        (5, Array([3.0625, 3.0625], dtype=float32))
        >>> Checkpoints(folder.name).about()
        About(step=5, settings={'rate': 0.5}, notes={'seen': 4})
        >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 2,
        settings: Mapping[str, Any] | None = None,
        free: Collection[str] = (),
    ):
        """Open the folder; it is made by the first save."""
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least one checkpoint.")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._settings = None if settings is None else as_json("settings", settings)
        self._free = set(free)
        self._writing: tuple[int, Future] | None = None
        self._closed = False
        self._claimed: int | None = None
        if self.steps():
            self._read(None)
        # Compression saves 7 % of random weights and costs as much as the rest.
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
        self._orbax = ocp.AsyncCheckpointer(handler)
        self._background = ThreadPoolExecutor(1, "checkpoint")
        atexit.register(self.close)  # too late for a save to finish, but not to say so

    def steps(self) -> list[int]:
        """The steps of which there is a complete checkpoint, ascending."""
        return complete_steps(self.directory)

    def save(
        self, step: int, carry: PyTree, *, notes: Mapping[str, Any] | None = None
    ) -> None:
        """Copy the carry now and write it in the background; the next step may donate.

        ``step`` is the first one not taken yet, ``t + 1`` after step ``t``. Leaves are
        arrays of JAX (keys too, and sharded ones) or NumPy, or Python's numbers.
        ``notes`` are JSON for ``about``. Waits for the save before this one. The copy
        is on the host; of arrays that several processes share, each copies its parts.

        Raises:
            ValueError: a leaf that is something else, by its path; notes that are not
                JSON; a step that is not after all those saved; another process that
                saves there.
            RuntimeError: the save before this one failed; this one did not begin.
        """
        if self._closed:
            raise ValueError(
                f"{self.directory} was closed: save inside the with block, or open it "
                "again."
            )
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step={step}: count the steps from 0.")
        leaves = manifest(carry)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(carry)):
            raise ValueError("the carry holds shapes, not arrays: save the arrays.")
        about: dict[str, Any] = {
            "step": step,
            "settings": self._settings or {},
            "notes": as_json("notes", notes or {}),
            "leaves": leaves,
        }
        self.wait()
        there = self.steps()
        if there and step <= there[-1]:
            raise ValueError(
                f"step {step} cannot be saved in {self.directory}, which holds "
                f"{some(there)}: a checkpoint is never replaced, and the newest are "
                "kept. Go on from restore(), or give another run a folder of its own."
            )
        folder = self._folder(step)
        if jax.process_index() == 0:
            if self._claimed is None:
                self._claimed = claim(self.directory)
            begin(folder)
        flat = zip(leaves.items(), jax.tree.leaves(carry), strict=True)
        arrays = {path: stored(x) for (path, leaf), x in flat if not leaf.empty}
        if jax.process_count() > 1:  # orbax asks devices, and the processes meet
            self._write(folder, arrays)
            arrays = {}
        writing = self._background.submit(self._complete, folder, arrays, about)
        self._writing = step, writing

    def restore(self, like: PyTree, step: int | None = None) -> tuple[int, PyTree]:
        """The step to go on with, and the carry, from ``step`` or the newest.

        ``like`` is a carry as the run begins with it, or its ``ShapeDtypeStruct``s:
        each leaf comes back as the kind of value that ``like`` holds there, placed as
        it is there, on a mesh or not, whatever mesh it was saved from. The arrays are
        new and may be donated.

        Raises:
            ValueError: no checkpoint there or none of this step; one of another
                method, model or number of workers; other settings; damaged files.
        """
        self.wait()
        folder, about = self._read(step)
        saved = leaves_of(about)
        check_same(f"checkpoint {folder}", saved, manifest(like))
        return about["step"], self._load(folder, about["files"], saved, like)

    def restore_resized(
        self, like: Carry, step: int | None = None, *, stay: Sequence[int] | None = None
    ) -> tuple[int, Carry]:
        """``restore`` of a run of K workers into ``like``, the first carry of K′.

        By ``lowcomm.resize``, which says what becomes of what; ``stay`` is its own.
        ``like`` is ``(params, state)`` as K′ workers begin, of the method built for
        them. Settings that say how many there are must be ``free``. Every process reads
        the whole and holds it once; with K = K′ it comes back bit for bit.

        Raises:
            ValueError: what ``restore`` and ``resize`` raise.
        """
        self.wait()
        folder, about = self._read(step)
        saved = leaves_of(about)
        whole = as_saved(f"checkpoint {folder}", saved, like)
        carry = self._load(folder, about["files"], saved, whole)
        return about["step"], resized(carry, like, stay=stay)

    def resume(self, like: PyTree) -> tuple[int, PyTree]:
        """``restore(like)``, or ``(0, like)`` where nothing was saved yet."""
        self.wait()
        return self.restore(like) if self.steps() else (0, like)

    def about(self, step: int | None = None) -> About:
        """The step, settings and notes of a checkpoint, the newest by default."""
        self.wait()
        about = self._read(step)[1]
        return About(about["step"], about["settings"], about["notes"])

    def wait(self) -> None:
        """Until what was saved is complete; raises if that failed."""
        if self._writing is None:
            return
        step, writing = self._writing
        failure, self._writing = writing.exception(), None
        with together():  # the first process completes for all of them
            if failure is not None:
                raise RuntimeError(
                    f"checkpoint {self._folder(step)} could not be written: {failure}"
                ) from failure

    def close(self) -> None:
        """Wait, and let go of the threads."""
        self._closed = True
        atexit.unregister(self.close)
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._orbax.close()
            if self._claimed is not None:
                os.close(self._claimed)
                self._claimed = None

    def __enter__(self) -> Checkpoints:
        """Itself."""
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        """Close; an error of the loop is not hidden by one of a save."""
        if error is not None and jax.process_count() > 1:
            self._closed = True  # without the other processes, which may wait for it
            atexit.unregister(self.close)
            return
        try:
            self.close()
        except RuntimeError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def _load(
        self, folder: Path, files: dict, saved: dict[str, Leaf], like: PyTree
    ) -> PyTree:
        """The arrays of a checkpoint, each where and as what ``like`` holds it."""
        check_files(folder, files)
        places, structure = jax.tree.flatten(like)
        places = dict(zip(manifest(like), places, strict=True))
        how = {p: _reading(x) for p, x in places.items() if not saved[p].empty}
        args = ocp.args.PyTreeRestore(item=dict.fromkeys(how, 0), restore_args=how)
        arrays = self._orbax.restore(folder / ARRAYS, args=args) if how else {}
        back = [placed(arrays.get(p), saved[p], x) for p, x in places.items()]
        return jax.tree.unflatten(structure, back)

    def _folder(self, step: int) -> Path:
        return self.directory / str(step)

    def _write(self, folder: Path, arrays: dict[str, Any]) -> None:
        if arrays:
            self._orbax.save(folder / ARRAYS, args=ocp.args.PyTreeSave(arrays))

    def _complete(self, folder: Path, arrays: dict[str, Any], about: dict) -> None:
        """In the background: write, seal what was written, remove what is too old."""
        with _muted():
            self._write(folder, arrays)
            self._orbax.wait_until_finished()
        if jax.process_index() != 0:
            return
        about["files"] = file_list(folder)
        written = folder / (ABOUT + ".part")
        with written.open("w") as out:
            json.dump(about, out)
            out.flush()
            os.fsync(out.fileno())
        written.replace(folder / ABOUT)
        for step in self.steps()[: -self._keep]:
            remove(self._folder(step))

    def _read(self, step: int | None) -> tuple[Path, dict]:
        """The folder of a checkpoint and what is written about it."""
        there = self.steps()
        if not there:
            raise ValueError(f"there is no checkpoint in {self.directory}.")
        step = there[-1] if step is None else step
        if step not in there:
            raise ValueError(
                f"there is no checkpoint of step {step} in {self.directory}, which "
                f"holds {some(there)}."
            )
        folder = self._folder(step)
        try:
            about = json.loads((folder / ABOUT).read_text())
        except ValueError as problem:
            raise damaged(folder, f"{ABOUT} is not JSON ({problem})") from problem
        if self._settings is not None:
            then, name = about["settings"], f"the run in {self.directory}"
            check_same_settings(name, then, self._settings, free=self._free)
        return folder, about


def _reading(place: Any) -> ocp.RestoreArgs:
    """How to read a leaf: whole, but where other processes hold parts of it."""
    sharding = getattr(bits(place), "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


@contextmanager
def _muted():
    """Without orbax's log, which tells every failure several times: it is raised."""
    log, others = (
        logging.getLogger("absl"),
        lambda record: "orbax" not in record.pathname,
    )
    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)
