"""Counting while the program runs: how often each row of the ledger was reached.

``meter`` re-traces a function and runs it equation by equation. A count that no data
can change is a constant, so an equation is rebuilt only where a talking conditional
or ``while`` lies inside it; everything else is bound exactly as it was. Counts ride
through loops and branches as one more ``int32`` vector, add no collective, and leave
the outputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .ledger import trace
from .rows import Row, opened, rows_of, rows_of_equation, scan_parts

Counts = Any  # int32[rows], numpy while known at trace
Sizes = dict[str, int]


def meter(fn: Callable) -> Callable:
    """Also count how often each collective runs.

    ``meter(fn)(*args)`` is ``(fn(*args), counts)``. ``counts`` is ``int32[rows]``, in
    the order of ``traffic(fn, *args, workers=K).rows``, and ``Traffic.bytes`` turns it
    into bytes. ``fn`` is one worker's function, so ``meter`` goes inside: under
    ``spread``, ``vmap`` or ``shard_map``, where the axis is bound. Counts of one call
    must fit 32 bits; add those of many calls up in Python. A predicate that differs
    between virtual workers counts for each what it asked for.

    Derivatives taken inside ``fn`` are fine; the derivative of a metered function is
    not defined, since custom rules are opened where they hold a talking conditional.

    Raises:
        ValueError: a communicating program inside an unknown primitive, or a talking
            conditional inside one that cannot be rebuilt, by name.

    Example:
        >>> from lowcomm.ledger import traffic
        >>> def step(x):  # talk if anyone is above one
        ...     fire = lax.pmax(x, "workers") > 1
        ...     return lax.cond(fire, lambda x: lax.pmean(x, "workers"), lambda x: x, x)
        >>> run = jax.vmap(meter(step), axis_name="workers", out_axes=(0, None))
        >>> sent = traffic(step, np.float32(0), workers=2)
        >>> [sent.bytes(run(jnp.array(xs))[1]) for xs in ([0.0, 1.0], [0.0, 2.0])]
        [4, 8]
    """

    def metered(*args):
        jaxpr, consts, inputs, out = trace(fn, args)
        outs, counts = _run(jaxpr, consts, inputs, {})
        outs = jax.tree.unflatten(jax.tree.structure(out), outs)
        # Made, not captured: an empty constant crashes XLA in jax 0.11.2.
        counts = jnp.asarray(counts) if len(counts) else jnp.zeros(0, jnp.int32)
        return outs, counts

    return metered


def _run(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], sizes: Sizes):
    """Evaluate a jaxpr; its outputs, and the counts of its rows."""
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= zip(jaxpr.invars, inputs, strict=True)
    read = lambda atom: atom.val if hasattr(atom, "val") else known[atom]
    counts: list[Counts] = [np.zeros(0, np.int32)]
    for eqn in jaxpr.eqns:
        rows = rows_of_equation(eqn, sizes)
        values = [read(atom) for atom in eqn.invars]
        if all(_certain(row) for row in rows):
            outs = _bind(eqn, values)
            counts.append(np.array([row.count for row in rows], np.int32))
        else:
            name = eqn.primitive.name
            if name not in _REBUILT:
                raise ValueError(
                    f"meter cannot count inside primitive {name!r}, which holds a "
                    "conditional or while loop that communicates: move that outside."
                )
            values = list(map(_typed, eqn.invars, values))
            outs, inside = _REBUILT[name](eqn, values, sizes)
            counts.append(inside)
        known |= zip(eqn.outvars, outs, strict=True)
    return [_typed(atom, read(atom)) for atom in jaxpr.outvars], _join(counts)


def _certain(row: Row) -> bool:
    """Whether the data has no say in how often the row runs."""
    return row.count == 0 or (row.count is not None and not row.guard)


def _join(counts: Sequence[Counts]) -> Counts:
    """Concatenate, staying in numpy as long as all parts are."""
    if all(isinstance(part, np.ndarray) for part in counts):
        return np.concatenate(counts)
    return jnp.concatenate([jnp.asarray(part) for part in counts if len(part)])


def _typed(atom: Any, value: Any) -> Any:
    """A literal or constant as the array it stands for, weak types included."""
    if isinstance(value, jax.Array):
        return value
    weak = jnp.asarray(np.asarray(value).item()) if atom.aval.weak_type else None
    if weak is not None and weak.dtype == atom.aval.dtype:
        return weak
    return jnp.asarray(value, atom.aval.dtype)


def _bind(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Apply an equation's primitive, as ``jax.core.eval_jaxpr`` does."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*values, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def _inside(program: Any, sizes: Sizes) -> Callable:
    """A program as a function of its inputs that returns outputs and counts."""
    jaxpr, consts = opened(program)
    return lambda *inputs: _run(jaxpr, consts, inputs, sizes)


def _rows(program: Any, sizes: Sizes) -> int:
    return len(rows_of(opened(program)[0], sizes))


def _call(eqn, values, sizes):
    # In place: rules for derivatives and rematerialisation do not change the values.
    (program,) = (eqn.params[k] for k in ("jaxpr", "call_jaxpr") if k in eqn.params)
    return _inside(program, sizes)(*values)


def _jit(eqn, values, sizes):
    # Kept as a call, so that what XLA compiles together stays together.
    run = _inside(eqn.params["jaxpr"], sizes)
    run.__name__ = str(eqn.params.get("name", "jit"))
    return jax.jit(run)(*values)


def _shard_map(eqn, values, sizes):
    params = eqn.params
    mesh = params["mesh"]
    return jax.shard_map(
        _inside(params["jaxpr"], sizes | dict(mesh.shape)),
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), P()),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )(*values)


def _cond(eqn, values, sizes):
    index, *operands = values
    branches = eqn.params["branches"]
    lengths = [_rows(branch, sizes) for branch in branches]

    def branch(i):
        before = np.zeros(sum(lengths[:i]), np.int32)
        after = np.zeros(sum(lengths[i + 1 :]), np.int32)

        def run(*operands):
            outs, inside = _inside(branches[i], sizes)(*operands)
            return outs, jnp.asarray(_join([before, inside, after]))

        return run

    return lax.switch(index, [branch(i) for i in range(len(branches))], *operands)


def _scan(eqn, values, sizes):
    params = eqn.params
    fixed, carries = scan_parts(eqn)
    run = _inside(params["jaxpr"], sizes)

    def body(state, xs):
        carry, total = state
        outs, inside = run(*values[:fixed], *carry, *xs)
        return (outs[:carries], total + inside), outs[carries:]

    start = list(values[fixed : fixed + carries])
    (carry, total), ys = lax.scan(
        body,
        (start, jnp.zeros(_rows(params["jaxpr"], sizes), jnp.int32)),
        values[fixed + carries :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys], total


def _while(eqn, values, sizes):
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    test = _inside(params["cond_jaxpr"], sizes)
    run = _inside(params["body_jaxpr"], sizes)
    split = _rows(params["cond_jaxpr"], sizes)
    for_test, for_body = values[:first], values[first : first + second]
    start = list(values[first + second :])

    # The test may talk and cannot return its counts, so it moves into the body: once
    # before the loop and once after each turn, as often as in the original.
    def ask(carry, total):
        (go,), inside = test(*for_test, *carry)
        return (
            go,
            carry,
            total + _join([inside, np.zeros(len(total) - split, np.int32)]),
        )

    def body(state):
        _, carry, total = state
        carry, inside = run(*for_body, *carry)
        return ask(carry, total + _join([np.zeros(split, np.int32), inside]))

    rows = split + _rows(params["body_jaxpr"], sizes)
    state = ask(start, jnp.zeros(rows, jnp.int32))
    _, carry, total = lax.while_loop(lambda state: state[0], body, state)
    return carry, total


_REBUILT: dict[str, Callable] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "jit": _jit,
    "pjit": _jit,
    "shard_map": _shard_map,
    **dict.fromkeys(("closed_call", "core_call", "call"), _call),
    **dict.fromkeys(("remat", "remat2", "checkpoint"), _call),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _call),
}
