"""What a program sends, read from its jaxpr: one row per collective.

    bytes of a run  =  Σ_rows  (how often the row ran) · (bytes of one call)

Bytes are those of the operand one worker hands to the collective; what a ring or a
tree makes of them on the wire is the business of ``network``. A row is the same
whether it was read from a jaxpr (``traffic``), counted while running (``meter``) or
found in compiled HLO (``compiled_traffic``), so the three can be held against each
other. One worker sends nothing: a collective over a group of one has count 0.

Some things XLA does that a jaxpr does not show, and how to undo them first:

- equal collectives of equal operands become one: ``Traffic.merged``;
- the CPU backend widens small floats on the wire (bfloat16 to float32, 8 bits to
  float16): ``Traffic.widened``;
- a collective whose result nobody uses is removed. So are such rows here;
- a collective that is the same in every turn of a loop runs once before it, and one of
  a constant is computed at compile time. Here they count as written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from .rows import Axis as Axis, Row as Row, opened, rows_of
from .spmd import AXIS, abstract_mesh, names, on_mesh, vary


class Traffic(NamedTuple):
    """The rows of one program, in program order.

    Example:
        >>> step = lambda x, fire: jax.lax.cond(
        ...     fire, lambda x: jax.lax.pmean(x, AXIS), lambda x: x, x)
        >>> sent = traffic(step, np.ones(5, np.float32), np.bool_(True), workers=8)
        >>> sent.bytes_always, sent.bytes_max, sent.bytes([3])
        (0, 20, 60)
    """

    rows: tuple[Row, ...]

    @property
    def bytes_always(self) -> int:
        """Bytes of the rows that run whatever the data; a ``while`` may run none."""
        return sum(row.bytes * (row.count or 0) for row in self.rows if not row.guard)

    @property
    def bytes_max(self) -> int:
        """Bytes if every conditional takes its largest branch, recursively.

        Raises:
            ValueError: a row runs under a ``while``, which has no largest.
        """
        return self.largest(lambda row: row.bytes)

    def largest(self, price: Callable[[Row], Any]) -> Any:
        """Σ count · price, taking of each conditional the dearest branch."""
        for row in self.rows:
            if row.count is None:
                raise ValueError(
                    f"{row.collective} over {row.axis!r} runs under a while loop, and "
                    "how often is known only at run time: count it with meter(fn) "
                    "and give the counts."
                )
        return _largest(self.rows, lambda row: price(row) * (row.count or 0), 0)

    def bytes(self, counts: Any) -> int:
        """Bytes sent by rows that ran ``counts`` times, a Python integer.

        Raises:
            ValueError: not one count per row.
        """
        times = calls(self, counts)
        return sum(n * row.bytes for n, row in zip(times, self.rows, strict=True))

    def census(self) -> dict[tuple[str, Axis, str], int]:
        """Bytes per (collective, axis, dtype); what two readers must agree on.

        Every branch counts, and the body of a ``while`` once.
        """
        total: dict[tuple[str, Axis, str], int] = {}
        for row in self.rows:
            sent = row.bytes * (1 if row.count is None else row.count)
            kind = (row.collective, row.axis, row.dtype)
            if sent:
                total[kind] = total.get(kind, 0) + sent
        return total

    def merged(self) -> Traffic:
        """Without the rows that repeat another, as XLA compiles it."""
        return Traffic(tuple(row for row in self.rows if not row.repeats))

    def together(self) -> Traffic:
        """Of a worker that is a group of devices, what all of them send.

        A reduction that the compiler divides among them is counted whole as it is;
        what each sends by itself, as in ``per_shard``, as often as they are.
        """
        return Traffic(
            tuple(replace(row, bytes=row.bytes * row.shards) for row in self.rows)
        )

    def widened(self) -> Traffic:
        """With floats as XLA's CPU backend sends them, 8 bits as 16 and bf16 as 32."""

        def widen(row: Row) -> Row:
            if row.dtype == "bfloat16":
                return replace(row, dtype="float32", bytes=2 * row.bytes)
            if row.dtype.startswith("float8"):
                return replace(row, dtype="float16", bytes=2 * row.bytes)
            if row.dtype in ("int4", "int2", "uint4", "uint2"):
                return replace(row, dtype=row.dtype.rstrip("42") + "8")
            return row

        return Traffic(tuple(widen(row) for row in self.rows))

    def table(self) -> str:
        """The rows as text, one line each.

        ``bytes`` are those of one call, ``count`` is how many calls there are (``?``
        where only running tells), and ``guard`` names the branches it stands in:
        ``1:0`` is branch 0 of the first conditional.

        Example:
            >>> mean = lambda x: jax.lax.pmean(x, AXIS)
            >>> print(traffic(mean, np.ones(5, np.float32), workers=8).table())
            collective  axis     dtype    bytes  count  guard
            all_reduce  workers  float32     20      1  -
        """
        head = ("collective", "axis", "dtype", "bytes", "count", "guard")
        lines = [
            (
                row.collective,
                row.axis if isinstance(row.axis, str) else "+".join(row.axis) or "-",
                row.dtype,
                str(row.bytes),
                "?" if row.count is None else str(row.count),
                " ".join(f"{c}:{b}" for c, b in row.guard) or "-",
            )
            for row in self.rows
        ]
        if not lines:
            return "(nothing is sent)"
        width = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(w) if name in ("bytes", "count") else cell.ljust(w)
                for name, cell, w in zip(head, line, width, strict=True)
            ).rstrip()
            for line in (head, *lines)
        )


def traffic(
    fn: Callable,
    *args: Any,
    workers: int | Sequence[int] | Mesh | AbstractMesh,
    axis: Axis = AXIS,
) -> Traffic:
    """What one call of one worker's function sends, read from its jaxpr.

    The function is only traced, so ``args`` may be shapes and no devices are needed.
    It is traced as one worker, in an environment where ``axis`` has ``workers``
    members: a vmap would turn conditionals on stacked values into selects, and
    Python numbers, which choose a branch at trace, stay Python numbers.

    Args:
        fn: the function of one worker.
        *args: its arguments, one worker's, arrays or ``ShapeDtypeStruct``s.
        workers: how many there are along ``axis`` (a tuple of sizes for a tuple of
            names), or a mesh; then ``fn`` may enter ``shard_map`` over the mesh's
            other axes, and what it sends inside is per shard (``together``).
        axis: the axis name or names that ``fn`` talks along.

    Raises:
        ValueError: sizes that do not match ``axis``; a primitive that communicates
            and that the ledger does not know.

    Example:
        >>> def step(x):
        ...     return jax.lax.scan(
        ...         lambda x, _: (jax.lax.pmean(x, AXIS), None), x, length=10)[0]
        >>> traffic(step, np.ones(5, np.float32), workers=8).bytes_always
        200
        >>> traffic(step, np.ones(5, np.float32), workers=1).bytes_always
        0
    """
    if isinstance(workers, Mesh | AbstractMesh):
        sizes = dict(workers.shape)
        mesh = abstract_mesh(sizes)

        def meshed(flat):
            return on_mesh(lambda *xs: flat(*vary(xs, axis)), mesh, axis, in_specs=P())

        jaxpr, *_ = trace(fn, args, wrap=meshed)
        return Traffic(tuple(rows_of(jaxpr, sizes, names(axis))))
    given = (workers,) if isinstance(workers, int | np.integer) else tuple(workers)
    if len(given) != len(names(axis)) or any(size < 1 for size in given):
        raise ValueError(
            f"workers={workers} does not size axis={axis!r}: give one positive number "
            "per axis name."
        )
    sizes = dict(zip(names(axis), map(int, given), strict=True))
    jaxpr, *_ = trace(fn, args, axis_env=list(sizes.items()))
    return Traffic(tuple(rows_of(jaxpr, sizes)))


def calls(sent: Traffic, counts: Any) -> list[int]:
    """The counts of one worker as Python integers, one per row."""
    times = np.asarray(counts)
    if times.shape != (len(sent.rows),):
        raise ValueError(
            f"counts has shape {times.shape} and there are {len(sent.rows)} rows: give "
            "one count per row, of one worker (counts[0] of a stacked result)."
        )
    return [int(n) for n in times]


def trace(
    fn: Callable,
    args: tuple,
    *,
    axis_env: Any = None,
    wrap: Callable[[Callable], Callable] = lambda flat: flat,
) -> tuple[Any, Sequence[Any], list[Any], Any]:
    """``fn`` as a jaxpr without dead code: jaxpr, constants, inputs, output shapes.

    Leaves of ``args`` that are not arrays are part of the program, like the static
    arguments of ``jax.jit``.
    """
    leaves, treedef = jax.tree.flatten(args)
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]

    def flat(*arrays):
        here = dict(zip(traced, arrays, strict=True))
        full = [here.get(i, leaf) for i, leaf in enumerate(leaves)]
        return fn(*jax.tree.unflatten(treedef, full))

    inputs = [leaves[i] for i in traced]
    program, out = jax.make_jaxpr(wrap(flat), axis_env=axis_env, return_shape=True)(
        *inputs
    )
    jaxpr, consts = opened(program)
    # XLA removes collectives whose result is unused; so do all the readers.
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    return live, consts, inputs, out


def _largest(rows: Sequence[Row], price: Callable[[Row], Any], depth: int) -> Any:
    total: Any = 0
    branches: dict[int, dict[int, list[Row]]] = {}
    for row in rows:
        if len(row.guard) == depth:
            total += price(row)
        else:
            conditional, branch = row.guard[depth]
            branches.setdefault(conditional, {}).setdefault(branch, []).append(row)
    for choices in branches.values():
        total += max(_largest(rows, price, depth + 1) for rows in choices.values())
    return total
