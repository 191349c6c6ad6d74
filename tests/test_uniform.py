"""The step in its three forms, and conditionals that talk."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm.spmd import AXIS, NotUniform, worker_mesh
from lowcomm.uniform import cond, decide, earlier, known, now, switch
from lowcomm.workers import spread


def floats(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def primitives(jaxpr):
    """The names of all primitives of a jaxpr, sub-programs included."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for part in jax.tree.leaves(
            eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield from primitives(getattr(part, "jaxpr", part))


def with_host(fn, t):
    """``fn`` of a traced step that the host knows, and what it asked."""
    asked = []

    def traced(step):
        with known(step, t, asked):
            return fn(step)

    return jax.jit(traced)(jnp.int32(t)), asked


def test_a_number_stays_a_number_and_an_array_stays_an_array():
    assert now(3, AXIS) == 3
    assert type(now(np.int32(3), AXIS)) is int
    assert now(jnp.int32(3), AXIS).dtype == jnp.int32
    assert with_host(lambda t: now(t, AXIS), 3)[0].dtype == jnp.int32


def test_a_missing_step_is_refused_with_both_remedies():
    with pytest.raises(ValueError, match=r"needs step=.*self_clocked"):
        now(None, AXIS)


@pytest.mark.parametrize("step", [1.5, True, jnp.float32(2), jnp.arange(3)])
def test_a_step_that_is_not_one_integer_is_refused_with_its_type(step):
    with pytest.raises(
        ValueError, match=r"one signed integer for all workers, not \w+"
    ):
        now(step, AXIS)


def test_an_unsigned_step_is_refused_by_its_type():
    # A step minus a delay would wrap around to a step in the far future.
    with pytest.raises(ValueError, match=r"one signed integer .* not uint32"):
        now(jnp.uint32(2), AXIS)


def test_a_step_that_differs_between_workers_is_refused():
    run = spread(lambda t: now(t, AXIS) * 2, mesh=worker_mesh(4))
    with pytest.raises(NotUniform, match=r"step differs .* in_axes=None"):
        run(np.arange(4, dtype=np.int32))


@pytest.mark.parametrize("t", [0, 1, 5, 6, 7])
def test_all_forms_of_a_step_decide_alike(t):
    ask = lambda t: (t < 1) | ((t + 1) % 3 == 0)
    answers = [decide(ask, t), decide(ask, np.int32(t)), decide(ask, jnp.int32(t))]
    answers.append(jax.jit(lambda t: decide(ask, t))(jnp.int32(t)))
    kinds = []

    def decided(step):
        kinds.append(decide(ask, step))
        return kinds[-1]

    host, asked = with_host(decided, t)
    assert [bool(a) for a in (*answers, host)] == [ask(t)] * 5
    assert type(answers[0]) is type(answers[1]) is type(kinds[0]) is bool
    assert isinstance(answers[2], jax.Array)
    [question] = asked
    assert question.answer == ask(t)
    assert [question.ask(s) for s in range(9)] == [ask(s) for s in range(9)]


def test_a_question_about_the_past_is_noted_as_one_about_the_present():
    def asking(t):
        with earlier(t, 2) as before, earlier(before, 1) as then:
            assert decide(lambda t: t == 5, before) is True
            assert decide(lambda t: t == 3, then) is False
        assert decide(lambda t: t == 7, t) is True
        return before, then

    (two, three), asked = with_host(asking, 7)
    assert [q.ask(7) for q in asked] == [True, False, True]
    assert [q.ask(6) for q in asked] == [False, True, False]
    assert (int(two), int(three)) == (5, 4)
    with earlier(7, 2) as number, earlier(jnp.int32(7), 2) as array:
        assert (number, int(array)) == (5, 5)


def test_a_known_step_is_an_array_to_everyone_else():
    def through(t):
        rate = optax.cosine_decay_schedule(1.0, 10)(t)
        return rate, jnp.where(t == 5, 1, t), jax.jit(jnp.sin)(t), t.astype(float)

    plain = jax.jit(through)(jnp.int32(5))
    clocked, asked = with_host(through, 5)
    jax.tree.map(np.testing.assert_array_equal, clocked, plain)
    assert asked == []


def test_a_known_step_decides_no_python_branch_behind_the_notebook():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        with_host(lambda t: 1 if t == 5 else 2, 5)


def test_what_is_known_is_known_of_that_step_and_there_only():
    def asking(t):
        inside = jax.jit(lambda t: decide(lambda t: t == 5, t))(t)
        return inside, decide(lambda t: t == 5, t + 0)

    assert with_host(asking, 5) == ((True, True), [])

    def after(t):
        with known(t, 5, []), earlier(t, 0) as then:
            assert decide(lambda t: t == 5, then) is True
        return decide(lambda t: t == 5, t)

    assert jax.make_jaxpr(after)(jnp.int32(0)).out_avals[0].dtype == bool
    assert not jax.jit(after)(jnp.int32(0))


def test_a_python_predicate_leaves_no_conditional_and_one_branch():
    def worker(x, fire):
        talk = lambda x: lax.pmean(x, AXIS)
        return cond(fire, talk, lambda x: x * 2, x, axis=AXIS)

    def traced(fire):
        call = spread(lambda x: worker(x, fire), mesh=worker_mesh(4))
        return set(primitives(jax.make_jaxpr(call)(floats(4)).jaxpr))

    assert "mul" in traced(False)
    assert not {"cond", "select_n", "psum", "psum_invariant"} & traced(False)
    assert not {"cond", "select_n", "mul"} & traced(np.bool_(True))
    assert {"psum", "psum_invariant"} & traced(True)
    assert not {"cond", "mul"} & traced(jnp.bool_(True))  # known here as well


def test_a_python_index_takes_its_branch_at_trace():
    branches = [lambda x, k=k: lax.pmean(x, AXIS) * k for k in range(3)]
    at = lambda index: spread(
        lambda x, i: switch(i, branches, x, axis=AXIS), in_axes=(0, None)
    )(floats(4), index)
    for k in range(3):
        np.testing.assert_array_equal(at(k), np.full(4, 1.5 * k))
        np.testing.assert_array_equal(at(jnp.int32(k)), np.full(4, 1.5 * k))
    static = jax.make_jaxpr(
        spread(lambda x: switch(np.int64(2), branches, x, axis=AXIS))
    )(floats(4))
    assert "cond" not in set(primitives(static.jaxpr))


def test_a_refusal_names_axis_and_remedy():
    talk = lambda x: lax.pmean(x, "sites")
    worker = lambda x: cond(x > 1, talk, lambda x: x, x, axis="sites")
    with pytest.raises(NotUniform) as error:
        spread(worker, axis="sites")(floats(4))
    for part in ("a predicate differs", "axis 'sites'", "in_axes=None", "lax.pmax"):
        assert part in str(error.value)
    index = lambda x: x.astype(jnp.int32)
    worker = lambda x: switch(index(x), [talk, lambda x: x], x, axis="sites")
    with pytest.raises(NotUniform, match="axis 'sites'"):
        spread(worker, axis="sites")(floats(4))


def test_a_conditional_survives_under_vmap_if_its_predicate_is_uniform():
    talk = lambda x: lax.pmean(x, AXIS)
    worker = lambda x: cond(lax.pmax(x, AXIS) > 9, talk, lambda x: x, x, axis=AXIS)
    names = set(primitives(jax.make_jaxpr(spread(worker))(floats(4)).jaxpr))
    assert "cond" in names
    assert "select_n" not in names


def test_what_lax_cond_decided_is_believed_to_be_uniform():
    # JAX forgets over which axes the predicate of lax.cond varies, so check_uniform
    # cannot see it here (but in a value of jnp.where it can). That is why lowcomm ends
    # each predicate in a collective, and why users should.
    talk = lambda x: lax.pmean(x, AXIS)
    one, two = lambda: jnp.float32(1), lambda: jnp.float32(2)

    def worker(decided):
        return lambda x: cond(decided(x) > 1, talk, lambda x: x, x, axis=AXIS)

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    seen = spread(worker(lambda x: jnp.where(x > 1, 1.0, 2.0)), mesh=worker_mesh(4))
    with pytest.raises(NotUniform):
        jax.eval_shape(seen, shape)
    forgotten = spread(worker(lambda x: lax.cond(x > 1, one, two)), mesh=worker_mesh(4))
    assert jax.eval_shape(forgotten, shape) == shape


def test_branches_may_differ_in_what_varies_over_the_axes():
    mesh = jax.sharding.AbstractMesh((2, 2), ("site", "chip"))

    def worker(x, t):
        # One branch leaves a constant, the other a mean over one of the two axes.
        talk = lambda x: lax.pmean(x, "site")
        return cond(t > 1, talk, lambda x: jnp.zeros(3), x, axis="site")

    call = spread(worker, mesh=mesh, axis=("site", "chip"), in_axes=(0, None))
    out = jax.eval_shape(call, jax.ShapeDtypeStruct((4, 3), jnp.float32), jnp.int32(0))
    assert out.shape == (4, 3)
