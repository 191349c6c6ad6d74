"""The folders of checkpoints on disk: whose they are, which are whole, how they go.

    DIRECTORY/STEP/arrays      one array a leaf, by its path; written by orbax
    DIRECTORY/STEP/about.json  leaves, settings, notes, a checksum of every file

``about.json`` is written last and removed first: a folder without it is what a writer
that died left behind, is never read, and is removed by the next save.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

ABOUT, ARRAYS = "about.json", "arrays"


def claim(directory: Path) -> int:
    """A descriptor of the folder; as long as it is open nobody else may write there.

    Makes the folder where it is missing. Raises ``ValueError`` where another process,
    or another object of this one, saves there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    claimed = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claimed)
        raise ValueError(
            f"another process is saving to {directory}: give each run a folder of its "
            "own."
        ) from None
    return claimed


def begin(folder: Path) -> None:
    """Make the folder of a step, after removing what dead writers left beside it."""
    for left in filter(_is_left_over, folder.parent.glob("*")):
        remove(left)
    if folder.exists():
        raise ValueError(
            f"{folder} is there and is no checkpoint: move it out of the way."
        )
    folder.mkdir()


def complete_steps(directory: Path) -> list[int]:
    """The steps of which there is a complete checkpoint, ascending."""
    complete = (file.parent for file in directory.glob(f"*/{ABOUT}"))
    return sorted(int(folder.name) for folder in complete if _is_step(folder))


def remove(folder: Path) -> None:
    """Remove a checkpoint, in an order that never leaves half of one."""
    (folder / ABOUT).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _is_step(folder: Path) -> bool:
    name = folder.name
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _is_left_over(folder: Path) -> bool:
    """Whether a save that did not come to its end, or a removal, left this behind."""
    parts = (ARRAYS, ABOUT + ".")
    return (
        _is_step(folder)
        and folder.is_dir()
        and all(x.name.startswith(parts) for x in folder.iterdir())
    )
