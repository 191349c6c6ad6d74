"""The one table of methods: how to build each, its tuned rate, and its contract.

A new method is one factory in ``lowcomm.algorithms`` and one entry in the file of its
family in ``experiments/entries``; the law suite and the comparison then apply to it. A
law that does not hold for a method is named in its ``exempt`` with the reason.
"""

from __future__ import annotations

from .contracts import Method
from .entries import (
    adaptive,
    averaging,
    factored,
    gradients,
    neighbours,
    overlapping,
    population,
    rounds,
    selected,
    signed,
    sketched,
)

CATALOGUE: dict[str, Method] = {
    **gradients.METHODS,
    **selected.METHODS,
    **signed.METHODS,
    **factored.METHODS,
    **sketched.METHODS,
    **averaging.METHODS,
    **rounds.METHODS,
    **adaptive.METHODS,
    **neighbours.METHODS,
    **overlapping.METHODS,
    **population.METHODS,
}
