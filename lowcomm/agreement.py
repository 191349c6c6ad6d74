"""Whether several processes are alike, and what went wrong on which of them.

Processes that run other programs, or one program with other numbers, wait for each
other forever. What can be told before the first step is told here, on all of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

CODE = Path(__file__).parent
PROCESSES = "LOWCOMM_PROCESSES"
PACKAGES = ("jax", "jaxlib", "optax", "numpy", "lowcomm")
MOST_NAMED = 4  # differences in one error


class Disagreement(RuntimeError):
    """Something is wrong on one process, or not alike on two; all processes raise."""


def check_alike(about: Mapping[str, Any]) -> None:
    """Raise on all processes unless ``about`` says the same on all of them.

    Compared are ``about``, which is JSON, file by file the code of ``lowcomm``, and the
    versions of what numbers depend on. Call it before the first step. With one process
    it does nothing. Sends ``about`` to all processes.

    Raises:
        Disagreement: which processes differ from process 0 and in what.

    Example:
        >>> check_alike({"learning_rate": 0.1, "code": code_of(Path(__file__).parent)})
    """
    if not alone():
        about = {"code of lowcomm": code_of(CODE), "versions": _versions(), **about}
    alike(about)


def alike(about: Mapping[str, Any], among: Sequence[int] | None = None) -> None:
    """``check_alike`` of ``about`` alone, whatever the code and the versions.

    ``among`` are the processes that meet, by number; all of them unless it is given.
    """
    refuse_alone()
    if alone(among):
        return
    text = json.dumps(_flat(about), sort_keys=True)
    if len(set(gathered(digest(text), among))) == 1:
        return
    entries = map(json.loads, gathered(text, among))
    told = dict(zip(_numbers(among), entries, strict=True))
    first, *others = told
    said = lambda entries, key: json.dumps(entries[key]) if key in entries else "absent"
    differ = [
        f"process {n}: {key} is {said(told[n], key)} and {said(told[first], key)} on "
        f"process {first}"
        for n in others
        for key in sorted(told[n].keys() | told[first].keys())
        if said(told[n], key) != said(told[first], key)
    ]
    more = len(differ) - MOST_NAMED
    raise Disagreement(
        f"the processes are not alike: {'; '.join(differ[:MOST_NAMED])}"
        + (f"; and {more} more" if more > 0 else "")
        + ". Start all of them with the same code, packages and settings."
    )


def digest(content: str | bytes) -> str:
    """A checksum of a text or a file."""
    content = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(content).hexdigest()[:16]


@contextlib.contextmanager
def together(among: Sequence[int] | None = None) -> Iterator[None]:
    """Within, an error of one process is an error of all, who meet at the end of it.

    For what may fail on one process alone, such as reading a file. Nothing inside may
    wait for other processes. With one process it does nothing. ``among`` is who meets,
    all of them unless it is given.

    Raises:
        Disagreement: on all processes, what went wrong on which.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        if alone(among):
            raise
        problem = error
    if not alone(among):
        said = "" if problem is None else str(problem) or repr(problem)
        told = dict(zip(_numbers(among), gathered(said, among), strict=True))
        wrong = {text: n for n, text in reversed(told.items()) if text}
        if wrong:
            listed = [f"process {n}: {text}" for text, n in reversed(wrong.items())]
            common = said if len(set(told.values())) == 1 else ""
            raise Disagreement(common or "; ".join(listed)) from problem


def gathered(text: str, among: Sequence[int] | None = None) -> list[str]:
    """What every process says, in their order; all ``among`` which it is must call."""
    if alone(among):
        return [text]
    own, copy = _meeting(tuple(_numbers(among)))

    def gather(x: np.ndarray) -> np.ndarray:
        return np.asarray(copy(jax.make_array_from_process_local_data(own, x[None])))

    said = np.frombuffer(text.encode(), np.uint8)
    lengths = gather(np.array(said.size, np.int32))
    if not lengths.any():
        return [""] * len(lengths)
    padded = gather(np.pad(said, (0, lengths.max() - said.size)))
    return [row[:n].tobytes().decode() for row, n in zip(padded, lengths, strict=True)]


@functools.cache
def _meeting(among: tuple[int, ...]) -> tuple[NamedSharding, Callable]:
    """Where each process has one row, and the program that gives all rows to all."""
    devices = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([devices[n] for n in among]), ("processes",))
    copy = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    return NamedSharding(mesh, P("processes")), copy


def refuse_alone() -> None:
    """Raise where others were started and this process has not joined them."""
    processes = os.environ.get(PROCESSES, "1")
    if processes != "1" and not jax.distributed.is_initialized():
        raise RuntimeError(
            f"{PROCESSES}={processes} and this process has joined nobody: call "
            "lowcomm.join() first, before anything else that uses JAX."
        )


def alone(among: Sequence[int] | None = None) -> bool:
    """Whether there is nobody to meet; does not start JAX where nobody has joined."""
    if not jax.distributed.is_initialized():
        return True
    return len(_numbers(among)) == 1


def processes_of(mesh: Any) -> tuple[int, ...] | None:
    """Whose devices a mesh has; this process's own where it has none."""
    if not isinstance(mesh, Mesh):
        return None if alone() else (jax.process_index(),)
    return tuple(sorted({d.process_index for d in mesh.devices.flat}))


def _numbers(among: Sequence[int] | None) -> Sequence[int]:
    return range(jax.process_count()) if among is None else among


def code_of(folder: Path) -> dict[str, str]:
    """A checksum of every Python file in a folder, by its path there."""
    files = sorted(folder.rglob("*.py"))
    return {
        file.relative_to(folder).as_posix(): digest(file.read_bytes()) for file in files
    }


def _versions() -> dict[str, str]:
    found = {"python": "{}.{}".format(*sys.version_info)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _flat(about: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The entries of nested dicts, named by all their keys."""
    entries: dict[str, Any] = {}
    for key, value in about.items():
        if isinstance(value, Mapping):
            entries |= _flat(value, f"{before}{key}: ")
        else:
            entries[f"{before}{key}"] = value
    return entries
