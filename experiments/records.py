"""What a run leaves in its folder, written so that stopping it loses nothing.

``log.jsonl`` grows by one flushed line a record; ``results.json`` and figures appear
whole or not at all, since they are written beside their place and then moved there.
A folder holds one run: a second one is refused before it has cost anything.
"""

import dataclasses
import fcntl
import json
import math
import os
import platform
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

LOG, RESULTS, CHECKPOINTS = "log.jsonl", "results.json", "checkpoints"
PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "lowcomm")


OTHER = "another run"
REMEDY = "choose another output folder, or delete this one if it is no longer wanted"


class RunFolder(NamedTuple):
    """An output folder that belongs to this run."""

    path: Path
    log: TextIO
    before: list[dict[str, Any]]  # records from before the run was resumed


@contextmanager
def open_run(
    folder: Path | str,
    settings: Mapping[str, Any],
    *,
    resume: bool = False,
    free: Collection[str] = (),
) -> Iterator[RunFolder]:
    """Claim ``folder`` for one run, making it where it is missing.

    The log begins with the settings and the versions. With ``resume`` a run that was
    broken off there is gone on with, and where there is none a new one begins; steps
    that ran after the last checkpoint are logged once more. Settings that are ``free``
    may be others than the run had so far, and are those it has from then on. A run
    that recorded nothing else leaves nothing, so that it may be tried again.

    Raises:
        FileExistsError: the folder holds another run, whole or broken off, or the
            checkpoints of one; with ``resume``, a whole one, or one that another
            process is writing.
        ValueError: the run to be resumed has other settings; names them.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose a folder for the output")
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    if (path / RESULTS).exists():
        what = "a finished run, and there is nothing to go on with" if resume else OTHER
        raise FileExistsError(f"{path} already holds {what}; {REMEDY}")
    if not resume or not (path / LOG).exists():
        if (path / CHECKPOINTS).exists():
            raise FileExistsError(f"{path} holds checkpoints of {OTHER}; {REMEDY}")
        try:
            # Creates the file or fails: of two runs at once only one gets the folder.
            (path / LOG).touch(exist_ok=False)
        except FileExistsError:
            raise FileExistsError(f"{path} already holds {OTHER}; {REMEDY}") from None
    with open(path / LOG, "r+", encoding="utf-8") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"another process is writing {path / LOG}") from None
        before = read_log(log)
        run = RunFolder(path, log, before)
        if before:
            then = [r["settings"] for r in before if "settings" in r][-1]
            then |= {key: plain(settings).get(key) for key in free}
            _check_settings(path, then, plain(settings))
            changed = {"settings": settings} if free else {}
            append(run, {"event": "resume", **changed, "versions": versions()})
        else:
            append(
                run, {"event": "start", "settings": settings, "versions": versions()}
            )
        mark = log.tell()
        try:
            yield run
        finally:
            if not before and log.tell() == mark:
                (path / LOG).unlink()
                if made and not any(path.iterdir()):
                    path.rmdir()


def read_log(log: TextIO) -> list[dict[str, Any]]:
    """The records of a log; a last line that was cut off is removed from the file."""
    records, end = [], 0
    text = log.read()
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            records.append(json.loads(line))
        except ValueError as problem:
            where = f"{log.name}, line {len(records) + 1}"
            raise ValueError(f"{where} is no record: {problem}") from None
        end += len(line.encode())
    log.seek(end)
    log.truncate()
    return records


def _check_settings(path: Path, then: Mapping, now: Mapping) -> None:
    """Raise, naming them, where settings differ."""
    differ = [
        f"{key} was {then.get(key)!r} and is {now.get(key)!r}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]
    resize = ", or with --resize" if then.get("workers") != now.get("workers") else ""
    if differ:
        raise ValueError(
            f"the run in {path} had other settings: {', '.join(differ)}; resume it "
            f"with its own{resize}, or choose another output folder"
        )


def append(run: RunFolder, record: Mapping[str, Any]) -> None:
    """Add one line to the log; it is on its way to the disk when this returns."""
    run.log.write(json.dumps(plain(record), allow_nan=False) + "\n")
    run.log.flush()


def finish(run: RunFolder, results: Mapping[str, Any]) -> Path:
    """Write ``results.json`` with the versions of everything that made it."""
    path = run.path / RESULTS
    whole = plain({**results, "versions": versions()})
    with atomic(path) as beside:
        beside.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a path to write to, moved to ``path`` on success and removed on failure.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "answer.txt"
        >>> with atomic(place) as beside:
        ...     _ = beside.write_text("42")
        ...     print(place.exists())
        False
        >>> place.read_text()
        '42'
    """
    # In the same folder, since a move between file systems is a copy; with the same
    # suffix, since writers such as matplotlib choose the format by it.
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix
    )
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        beside.chmod(0o644)  # mkstemp keeps its files from other readers
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """The version of Python and of every package that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def plain(value: Any) -> Any:
    """``value`` in JSON's own types; JSON has no NaN and no infinity: they are null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
