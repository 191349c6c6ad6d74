"""HLO modules written by hand."""

import types

import jax
import numpy as np
from jax.sharding import AbstractMesh

from lowcomm.hlo import compiled_traffic

AXES = ("workers", "fsdp")
GRID = AbstractMesh((2, 4), AXES)


def module(*lines, before="", devices=8):
    """A module whose entry has a parameter %x of 5 float32 and these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule step, is_scheduled=true, num_partitions={devices}\n\n{before}\n"
        "%add (a: f32[], b: f32[]) -> f32[] {\n"
        "  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %sum = f32[] add(%a, %b)\n}\n\n"
        "ENTRY %main (x: f32[5]) -> f32[5] {\n"
        f"  %x = f32[5]{{0}} parameter(0)\n{body}\n}}\n"
    )


def only_row(*lines, **options):
    (row,) = compiled_traffic(module(*lines, **options), mesh=GRID).rows
    return row


class Chip:
    """A device as the compiler's topologies describe them."""

    def __init__(self, slice_index, chip):
        self.slice_index = slice_index
        self.id = 100_000 * (slice_index + 1) + chip


def two_slices(chips=4):
    devices = np.array([[Chip(s, c) for c in range(chips)] for s in range(2)])

    return types.SimpleNamespace(
        shape=dict(zip(AXES, (2, chips), strict=True)),
        axis_names=AXES,
        size=2 * chips,
        devices=devices,
    )


def devices(order=None):
    order = range(8) if order is None else order
    return np.array([jax.devices()[i] for i in order]).reshape(2, 4)
