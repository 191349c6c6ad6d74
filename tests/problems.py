"""The catalogue's methods in the setting of the laws of ``lowcomm.testing``."""

from __future__ import annotations

import functools
from typing import Any

import optax

from experiments.catalogue import CATALOGUE
from lowcomm.testing import problems
from lowcomm.testing.problems import (
    BACKENDS as BACKENDS,
    Carry as Carry,
    begin as begin,
    mesh_of as mesh_of,
    place_of as place_of,
    sizes_of as sizes_of,
    squares as squares,
    start as start,
    stepper as stepper,
    targets as targets,
)
from lowcomm.testing.subject import Subject, heavy_ball

K, PERIOD, STEPS = 4, 4, 8  # workers, steps a round, two rounds

run = functools.partial(problems.run, steps=STEPS)


def method(
    name: str, *, inner: Any = None, workers: int = K, steps: int = STEPS, **more: Any
) -> optax.GradientTransformationExtraArgs:
    """A method of the catalogue in the setting of the laws."""
    setting = {"period": PERIOD, "fraction": 0.25, "threshold": 0.125, "window": 2}
    return CATALOGUE[name].make(
        workers=workers,
        steps=steps,
        learning_rate=0.5,
        inner=heavy_ball(0.5) if inner is None else inner,
        **(setting | more),
    )


@functools.cache
def subject(name: str, **more: Any) -> Subject:
    """A method with what its line of the catalogue declares."""
    declared = CATALOGUE[name]
    build = lambda inner, workers, steps: method(
        name, inner=inner, workers=workers, steps=steps, **more
    )
    return Subject(
        build,
        workers=K,
        steps=STEPS,
        exact=declared.exact,
        smooth=declared.smooth,
        bitwise=declared.bitwise,
        kinds=declared.kinds,
        axis=declared.axis,
        syncs={"every step": 1, "period": PERIOD}.get(declared.syncs, declared.syncs),
    )


def program(name: str, backend: str = "vmap") -> Any:
    """The jitted step of a method in the setting of the laws, compiled once."""
    return subject(name).program(backend).call


def record(name: str, backend: str = "vmap", binary: bool = True) -> list[Carry]:
    """The trajectory of a method in the setting of the laws."""
    return subject(name).path(backend, binary)
