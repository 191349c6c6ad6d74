"""Programs that compute the same are the same, whatever they are called and say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm.sameness import check_start, equations

X = jnp.ones(3)


def lines(fn, *args):
    return list(equations(jax.make_jaxpr(fn)(*args)))


def test_names_messages_and_what_is_called_back_are_a_process_s_own():
    def program(me, order):
        names = jax.checkpoint_policies.save_only_these_names(*order)

        @jax.custom_vjp
        def twice(x):
            return 2 * x

        twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

        def fn(x):
            jax.debug.print(f"process {me}: {{}}", x[0])
            jax.debug.callback(lambda x: print(me, x), x)
            inside = jax.checkpoint(lambda x: jnp.sin(twice(x)), policy=names)
            return jax.jit(inside)(x).sum()

        fn.__name__ = f"fn{me}"
        return jax.grad(fn)

    a, b = program(0, ["attn", "mlp"]), program(1, ["mlp", "attn"])
    assert lines(a, X) == lines(b, X)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: jnp.sum(3.0 * jnp.sin(x)),  # a number
        lambda x: jnp.sum(2.0 * jnp.cos(x)),  # a primitive
        lambda x: jnp.sum(jnp.float32(3.0) * jnp.sin(x)),  # a constant
        lambda x: jnp.sum(2.0 * jax.jit(jnp.sin)(x[:2])),  # a shape
        lambda x: jax.lax.scan(lambda s, y: (s + 2 * y, None), 0.0, jnp.sin(x))[0],
    ],
)
def test_whatever_numbers_depend_on_tells_programs_apart(other):
    assert lines(lambda x: jnp.sum(2.0 * jnp.sin(x)), X) != lines(other, X)


def test_a_scalar_that_is_closed_over_is_part_of_the_program_also_inside():
    def program(rate):
        rate = jnp.float32(rate)
        return lambda x: jax.lax.scan(lambda s, y: (s + rate * y, None), 0.0, x)[0]

    assert lines(program(0.5), X) == lines(program(0.5), X)
    assert lines(program(0.5), X) != lines(program(0.25), X)


def test_axes_of_collectives_are_part_of_the_program():
    def program(axis):
        return lambda x: jax.lax.psum(x, axis)

    made = [
        list(equations(jax.make_jaxpr(program(a), axis_env=[("a", 2), ("b", 2)])(X)))
        for a in ("a", "b")
    ]
    assert made[0] != made[1]


def test_one_process_starts_as_it_likes():
    check_start({"x": np.ones(3), "key": jax.random.key(0)}, {"steps": 3}, None)
