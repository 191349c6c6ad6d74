"""What a checkpoint is made of, as JSON, and how two of them differ.

A carry is the tree that goes from step to step. Its manifest names every leaf by its
path with shape and dtype, so that a checkpoint of another method, another model or
another number of workers is told from this one before any array is read. Files are
listed with size and checksum, so that damaged ones are an error, not other numbers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .leaves import PyTree

NUMBERS = (bool, int, float, complex)
# Files have no type for others, such as uint4, objects, text or another byte order.
DTYPES = {
    *("bool", "complex64", "complex128", "bfloat16", "float16", "float32", "float64"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("int4", "float8_e4m3fn", "float8_e5m2"),
}
MOST_NAMED = 6  # leaves in one error


class About(NamedTuple):
    """What a checkpoint says of itself."""

    step: int  # the first one not taken yet
    settings: dict
    notes: dict


class Leaf(NamedTuple):
    """What is written about a leaf."""

    path: list[str]  # entry by entry
    shape: list[int]
    dtype: str
    key: str | None = None  # the generator, for random keys

    @property
    def empty(self) -> bool:
        """Whether it has no entries, and so needs no storing."""
        return 0 in self.shape

    def __str__(self) -> str:
        """As in ``float32[8, 3]``."""
        return f"{self.dtype}{self.shape}"


Manifest = dict[str, Leaf]


def manifest(carry: PyTree) -> Manifest:
    """Every leaf by its path, in the order of the leaves.

    Raises:
        ValueError: a leaf that is neither an array nor a number, or of a dtype that
            files cannot hold.

    Example:
        >>> leaves = manifest({"w": jnp.zeros((8, 3)), "step": 4})
        >>> print({path: str(leaf) for path, leaf in leaves.items()})
        {"['step']": 'int[]', "['w']": 'float32[8, 3]'}
    """
    leaves = {}
    for keys, x in jax.tree_util.tree_leaves_with_path(carry):
        path = [jax.tree_util.keystr((key,)) for key in keys]
        leaves["".join(path)] = _leaf(path, x)
    return leaves


def _leaf(path: list[str], x: Any) -> Leaf:
    if type(x) in NUMBERS and np.asarray(x).dtype != object:
        return Leaf(path, [], type(x).__name__)
    if is_key(x):
        key = str(jax.random.key_impl(x)) if isinstance(x, jax.Array) else None
        return Leaf(path, list(x.shape), str(x.dtype), key)
    array = isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.generic)
    if (array or type(x) is np.ndarray) and str(x.dtype) in DTYPES:
        return Leaf(path, list(x.shape), str(x.dtype))
    kind = getattr(x, "dtype", type(x).__name__)
    raise ValueError(
        f"leaf {_named(path)} is {x!r:.60} ({kind}), and a checkpoint holds numbers "
        "and arrays of numbers: keep strings, functions and objects out of the carry."
    )


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def check_same(name: str, saved: Manifest, here: Manifest) -> None:
    """Raise, saying how, unless a saved carry has the leaves of the one here.

    Example:
        >>> one, two = {"m": jnp.zeros((8, 3))}, {"v": jnp.zeros((8, 3))}
        >>> try:
        ...     check_same("runs/x/50", manifest(one), manifest(two))
        ... except ValueError as error:
        ...     print(str(error).split(";")[0])
        runs/x/50 is of another method or model: it has ['m'], which this carry lacks
    """
    if saved.keys() != here.keys():
        lost, new = _only_in(saved, here), _only_in(here, saved)
        raise ValueError(
            f"{name} is of another method or model: "
            + "; ".join(
                [f"it has {some(lost)}, which this carry lacks"] * bool(lost)
                + [f"this carry has {some(new)}, which it lacks"] * bool(new)
            )
            + ". Restore into a carry as the same method, optimizer and model begin it."
            + _by_shard(lost + new)
        )
    differ = [p for p in saved if str(saved[p]) != str(here[p])]
    if not differ:
        return
    arrays = [p for p in saved if saved[p].shape]
    sizes = {(saved[p].shape[0], here[p].shape[0]) for p in arrays if here[p].shape}
    same_but_first = all(
        saved[p].shape[1:] == here[p].shape[1:] and saved[p].dtype == here[p].dtype
        for p in saved
    )
    if same_but_first and len(sizes) == 1 and differ == arrays:
        ((before, now),) = sizes
        raise ValueError(
            f"{name} is of {before} workers and this carry of {now}: restore into a "
            f"carry of {before} workers, or by restore_resized."
        )
    listed = [
        f"{_named(saved[p].path)} is {saved[p]} there and {here[p]} here"
        for p in differ
    ]
    raise ValueError(
        f"{name} is of another model or setting: {some(listed, '; ')}. Restore into a "
        "carry of the same shapes and dtypes." + _by_shard(listed)
    )


def _by_shard(differing: Sequence[str]) -> str:
    """What to do where it is the shards of workers that differ."""
    if not any(".shards" in where for where in differing):
        return ""
    return (
        " (What compressed exchanges keep is kept by shard: restore it on a mesh whose "
        "workers have as many devices.)"
    )


def leaves_of(about: Mapping) -> Manifest:
    """The manifest in what is written about a checkpoint."""
    return {path: Leaf(*leaf) for path, leaf in about["leaves"].items()}


def check_same_settings(
    name: str, saved: Mapping, here: Mapping, *, free: Collection[str] = ()
) -> None:
    """Raise, with both values, unless a run's settings are those that were saved.

    Those that are ``free`` may differ.
    """
    absent = object()
    said = lambda x: "absent" if x is absent else json.dumps(x)
    listed = [
        f"{key} was {said(saved.get(key, absent))} and is {said(here.get(key, absent))}"
        for key in sorted((saved.keys() | here.keys()) - set(free))
        if said(saved.get(key, absent)) != said(here.get(key, absent))
    ]
    if listed:
        raise ValueError(
            f"{name} was saved with other settings: {some(listed, '; ')}. Give another "
            "run a folder of its own, or open this one with the settings it has."
        )


def as_json(name: str, values: Mapping[str, Any]) -> dict:
    """``values`` as they come back from JSON; raises, naming the key, where they don't.

    Example:
        >>> as_json("notes", {"loss": 0.5, "shape": (8, 3)})
        {'loss': 0.5, 'shape': [8, 3]}
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} must be a dict, not {values!r:.60}.")
    for key, value in values.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError) as problem:
            raise ValueError(
                f"{name}[{key!r}] is {value!r:.60}, which is not JSON ({problem}): "
                "convert it first, for instance with float() or str()."
            ) from problem
    return json.loads(json.dumps(dict(values)))


def file_list(folder: Path) -> dict[str, list[int]]:
    """Size and checksum of every file in a folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    name = lambda file: file.relative_to(folder).as_posix()
    return {name(file): [file.stat().st_size, _checksum(file)] for file in files}


def check_files(folder: Path, files: Mapping[str, list[int]]) -> None:
    """Raise unless every file is what was written; orbax sees only some damage."""
    for name, (size, checksum) in files.items():
        file = folder / name
        if not file.is_file():
            raise damaged(folder, f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(folder, f"{name} has {file.stat().st_size} bytes of {size}")
        if _checksum(file) != checksum:
            raise damaged(folder, f"{name} does not hold what was written")


def damaged(folder: Path, how: str) -> ValueError:
    """The error of a checkpoint that cannot be trusted."""
    return ValueError(
        f"checkpoint {folder} is damaged: {how}. Remove the folder to go on from the "
        "one before."
    )


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as data:
        while part := data.read(1 << 20):
            total = zlib.crc32(part, total)
    return total


def some(listed: Iterable[Any], between: str = ", ") -> str:
    """The first few, and how many more."""
    listed = [str(x) for x in listed]
    more = len(listed) - MOST_NAMED
    shown = between.join(listed[:MOST_NAMED]) or "nothing"
    return shown + (f"{between}and {more} more" if more > 0 else "")


def _only_in(one: Manifest, other: Manifest) -> list[str]:
    """The branches of ``one`` that ``other`` has nothing of, each named once."""
    begun = {tuple(x.path[:n]) for x in other.values() for n in range(len(x.path) + 1)}
    branches = set()
    for name in one.keys() - other.keys():
        path = one[name].path
        lengths = range(1, len(path))
        fork = next((n for n in lengths if tuple(path[:n]) not in begun), len(path))
        branches.add(_named(path[:fork]))
    return sorted(branches)


def _named(path: list[str]) -> str:
    return "".join(path) or "(the carry)"
