"""One module per paper: its claim, our setting, the runs, and what came of it.

A module has ``TITLE``, ``REFERENCE``, ``CLAIM`` (the paper's, with its numbers),
``SETTING`` (ours), ``METHODS`` (names of the catalogue it is about), ``BASELINES``
(cells that the claim is measured against), ``cells(scale)`` (name -> what computes
it), ``verdict(found)`` and ``draw(found, figure)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple

Cells = dict[str, Callable[[], dict[str, Any]]]
Found = Mapping[str, dict[str, Any]]

KEYS = (
    "parallel_restarted_sgd",
    "local_sgd_stich",
    "local_sgd_tradeoffs",
    "selsync",
    "edit",
    "swap",
    "palsgd",
    "savic",
    "adaptive_batch_size",
    "local_sgd_scaling_laws",
    "overlap_local_sgd",
    "oldsgd",
    "od_sgd",
    "dreamddp",
    "layered_sgd",
    "prlc",
    "leader_sgd",
    "pso_ps",
    "diloco",
    "streaming_diloco",
    "muloco",
    "one_worker",
    "des_loc",
    "quadratic_period",
    "noloco",
    "error_feedback",
    "ef21",
    "dgc",
    "sparse_loco",
    "lags_sgd",
    "one_bit_adam",
    "lossless_homomorphic",
    "powersgd",
    "edgc",
)


class Verdict(NamedTuple):
    """What came of a claim."""

    status: Literal["reproduced", "partly", "not reproduced"]
    measured: str  # with intervals


class Scale(NamedTuple):
    """How much to run."""

    quick: bool

    @property
    def seeds(self) -> tuple[int, ...]:
        """Which seeds."""
        return (0, 1) if self.quick else (0, 1, 2, 3, 4)

    def steps(self, full: int) -> int:
        """A quarter of them in a quick run."""
        return full // 4 if self.quick else full

    def rates(self, *full: float) -> tuple[float, ...]:
        """Every other one in a quick run, beginning with the second."""
        return (full[1::2] or full) if self.quick else full


def paper(key: str) -> Any:
    """The module of that paper."""
    return import_module(f"{__name__}.{key}")
