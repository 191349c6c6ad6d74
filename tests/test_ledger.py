"""Four readings of a program agree: jaxpr, HLO, meter under vmap and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from lowcomm.hlo import compiled_traffic
from lowcomm.ledger import Row, Traffic, traffic
from lowcomm.meter import meter
from lowcomm.spmd import AXIS, vary
from lowcomm.workers import spread

K, N = 8, 6
BYTES = 4 * N
RING = [(i, (i + 1) % K) for i in range(K)]


def mesh_of(workers):
    return Mesh(np.array(jax.devices()[:workers]), (AXIS,))


def psum(x):
    return vary(lax.psum(x, AXIS), AXIS)


def pmean(x):
    return vary(lax.pmean(x, AXIS), AXIS)


def pmax(x):
    return vary(lax.pmax(x, AXIS), AXIS)


def loudest(x):
    return lax.pmax(jnp.abs(x).max(), AXIS)


@jax.custom_vjp
def with_vjp(x):
    return pmean(x) * 3


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (g,))


@jax.custom_vjp
def guarded(x):
    return lax.cond(loudest(x) > 3, pmean, lambda x: x, x)


guarded.defvjp(lambda x: (guarded(x), None), lambda _, g: (g,))


@jax.custom_jvp
def with_jvp(x):
    return pmax(x) - x


with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0]))


def scanned(x):
    def body(c, i):
        mean = lax.cond(i % 3 == 0, pmean, lambda c: c + 1, c)
        return mean, lax.cond(i % 2 == 0, pmax, lambda c: c, c)

    last, all_ = lax.scan(body, x, jnp.arange(7))
    return last, all_.sum(0)


# Name -> (one worker's function, bytes when everything fires).
PROGRAMS = {
    "psum": (psum, BYTES),
    "pmean": (pmean, BYTES),
    "pmax": (pmax, BYTES),
    "silence": (lambda x: x * 2 + vary(lax.axis_index(AXIS), AXIS), 0),
    "constant": (lambda x: x * vary(lax.psum(1, AXIS), AXIS), 0),
    "all_gather": (lambda x: lax.all_gather(x, AXIS).sum(0), BYTES),
    "ppermute": (lambda x: lax.ppermute(x, AXIS, RING), BYTES),
    "lonely": (lambda x: lax.ppermute(x, AXIS, [(0, 1), (2, 2)]), BYTES),
    "self": (lambda x: lax.ppermute(x, AXIS, [(i, i) for i in range(K)]), 0),
    "all_to_all": (
        lambda x: lax.all_to_all(jnp.outer(jnp.arange(K), x), AXIS, 0, 0).sum(0),
        K * BYTES,
    ),
    "reduce_scatter": (
        lambda x: lax.psum_scatter(jnp.outer(jnp.arange(1.0, K + 1), x), AXIS) + x,
        K * BYTES,
    ),
    "int8": (lambda x: lax.all_gather(x.astype(jnp.int8), AXIS).sum(0) + x, N),
    "bfloat16": (lambda x: pmean(x.astype(jnp.bfloat16)) + x, 2 * N),
    "float8": (
        lambda x: (
            lax.all_gather(x.astype(jnp.float8_e4m3fn), AXIS)[0].astype(float) + x
        ),
        N,
    ),
    "bool": (lambda x: pmax(x > 3) + x, N),
    "tree": (lambda x: sum(jax.tree.leaves(pmean((x, x[:2].sum())))), BYTES + 4),
    "equal twice": (lambda x: psum(jnp.sin(x)) * psum(jnp.sin(x)), 2 * BYTES),
    "scan": (
        lambda x: lax.scan(lambda c, z: (pmean(c) + z, None), x, jnp.arange(5.0))[0],
        5 * BYTES,
    ),
    "scan in scan": (
        lambda x: lax.scan(
            lambda c, z: (lax.fori_loop(0, 3, lambda i, c: pmean(c) * i, c) + z, z),
            x,
            jnp.arange(5.0),
            reverse=True,
        )[0],
        15 * BYTES,
    ),
    "jit": (jax.jit(pmean), BYTES),
    "jit in jit": (jax.jit(lambda x: jax.jit(pmean)(x) + 1), BYTES),
    "custom_vjp": (with_vjp, BYTES),
    "custom_jvp": (with_jvp, BYTES),
    "grad": (lambda x: jax.grad(lambda y: (with_vjp(y) ** 2).sum())(x), BYTES),
    "remat": (jax.checkpoint(lambda x: jnp.sin(pmean(x))), BYTES),
    "vmap inside": (
        lambda x: jax.vmap(pmean)(x.reshape(2, 3)).reshape(-1),
        BYTES,
    ),
    "axis inside": (
        lambda x: jax.vmap(lambda y: pmean(lax.psum(y, "inner")), axis_name="inner")(
            x.reshape(2, 3)
        ).reshape(-1),
        BYTES // 2,
    ),
    "cond": (
        lambda x: lax.cond(loudest(x) > 3, lambda x: pmean(x) * 2, lambda x: x, x),
        BYTES + 4,
    ),
    "switch": (
        lambda x: lax.switch(
            lax.pmax(x[0].astype(int), AXIS) % 3,
            [
                lambda x: x,
                pmean,
                lambda x: lax.ppermute(pmax(x), AXIS, RING),
            ],
            x,
        ),
        2 * BYTES + 4,
    ),
    "cond in cond": (
        lambda x: lax.cond(
            loudest(x) > 1,
            lambda x: lax.cond(loudest(pmean(x)) > 2, psum, pmax, x) + 1,
            lambda x: x,
            x,
        ),
        2 * BYTES + 8,
    ),
    "cond in scan": (lambda x: sum(scanned(x)), 14 * BYTES),
    "cond in jit in scan": (
        lambda x: lax.fori_loop(
            0,
            4,
            jax.jit(lambda i, c: lax.cond(i == 2, with_vjp, lambda c: c * 2, c)),
            x,
        ),
        4 * BYTES,
    ),
    "cond in custom_vjp": (
        lambda x: guarded(x) + 1,
        BYTES + 4,
    ),
    "cond in remat": (
        jax.checkpoint(lambda x: lax.cond(loudest(x) > 3, psum, jnp.sin, x)),
        BYTES + 4,
    ),
}


def stacked(workers=K):
    return jnp.asarray(np.arange(workers * N).reshape(workers, N) % 5, jnp.float32)


def on_mesh(fn, workers=K, **options):
    """One worker's function on stacked arguments, as a shard_map."""
    local = lambda x: jax.tree.map(lambda y: vary(y, AXIS)[None], fn(x[0]))
    return jax.shard_map(
        local, mesh=mesh_of(workers), in_specs=P(AXIS), out_specs=P(AXIS), **options
    )


def virtual(fn):
    return jax.vmap(fn, axis_name=AXIS)


@functools.cache
def reading(name, workers=K):
    return traffic(PROGRAMS[name][0], stacked()[0], workers=workers)


def skip_what_jax_cannot_check(name, check):
    if name == "axis inside" and check:
        pytest.skip("a vmap axis inside a checked shard_map is an assertion in JAX")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_largest_step_sends_the_bytes_counted_by_hand(name):
    assert reading(name).bytes_max == PROGRAMS[name][1]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_jaxpr_and_compiled_program_send_the_same(name, check):
    skip_what_jax_cannot_check(name, check)
    whole = on_mesh(PROGRAMS[name][0], check_vma=check)
    compiled = jax.jit(whole).lower(stacked()).compile()
    found = compiled_traffic(compiled, mesh=mesh_of(K))
    assert found.census() == reading(name).merged().widened().census()


@pytest.mark.parametrize("backend", ["vmap", "checked mesh", "unchecked mesh"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_meter_agrees_with_the_ledger_and_leaves_the_outputs(name, backend):
    skip_what_jax_cannot_check(name, backend == "checked mesh")
    fn, sent = PROGRAMS[name][0], reading(name)
    run = {
        "vmap": virtual,
        "checked mesh": functools.partial(on_mesh, check_vma=True),
        "unchecked mesh": functools.partial(on_mesh, check_vma=False),
    }[backend]
    if name == "lonely" and backend == "vmap":
        pytest.skip("under vmap JAX takes only whole permutations")
    x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (K, N)), jnp.float32)
    plain = jax.jit(run(fn))(x)
    out, counts = jax.jit(run(meter(fn)))(x)
    np.testing.assert_array_equal(out, plain)
    assert out.dtype == plain.dtype
    assert counts.shape == (K, len(sent.rows))
    assert (counts == counts[0]).all()
    assert sent.bytes_always <= sent.bytes(counts[0]) <= sent.bytes_max
    if not any(row.guard for row in sent.rows):
        assert counts[0].tolist() == [row.count for row in sent.rows]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_meter_adds_no_collective(name):
    fn = PROGRAMS[name][0]
    assert traffic(meter(fn), stacked()[0], workers=K).census() == (
        reading(name).census()
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_worker_sends_nothing(name):
    if name in ("ppermute", "lonely", "self", "switch"):
        pytest.skip("its permutation names other workers")
    fn = PROGRAMS[name][0]
    if name in ("all_to_all", "reduce_scatter"):
        fn = lambda x: lax.psum_scatter(x[None], AXIS)
    sent = traffic(fn, stacked()[0], workers=1)
    assert sent.bytes_max == 0
    _, counts = virtual(meter(fn))(stacked(1))
    assert sent.bytes(counts[0]) == 0
    compiled = jax.jit(on_mesh(fn, 1, check_vma=False)).lower(stacked(1)).compile()
    assert compiled_traffic(compiled, mesh=mesh_of(1)).bytes_max == 0


def test_a_psum_inside_a_scan_counts_its_length():
    (row,) = reading("scan").rows
    assert row == Row("all_reduce", AXIS, "float32", BYTES, 5)


def test_each_branch_is_guarded_by_its_conditional_and_the_ids_are_unique():
    guards = [row.guard for row in reading("cond in cond").rows]
    assert guards == [
        (),
        ((1, 1),),
        ((1, 1),),
        ((1, 1), (2, 0)),
        ((1, 1), (2, 1)),
    ]
    guards = [row.guard for row in reading("cond in scan").rows]
    assert guards == [((1, 1),), ((2, 1),)]


def test_the_largest_branch_is_taken_not_the_sum_of_branches():
    pick = lambda x, i: lax.switch(
        i, [lambda x: x, pmean, lambda x: pmean(x[:2])[0] + x], x
    )
    sent = traffic(pick, stacked()[0], jnp.int32(0), workers=K)
    assert (sent.bytes_always, sent.bytes_max) == (0, BYTES)
    assert sum(sent.census().values()) == BYTES + 8


def test_the_meter_counts_what_happened_when_the_data_decides():
    fn = PROGRAMS["cond"][0]
    sent = reading("cond")
    for run in (virtual, on_mesh):
        for top, bytes_ in ((2.0, 4), (4.0, 4 + BYTES)):
            x = jnp.zeros((K, N)).at[3, 2].set(top)
            _, counts = jax.jit(run(meter(fn)))(x)
            assert sent.bytes(counts[0]) == bytes_


def test_the_meter_counts_the_firing_steps_of_a_scan():
    _, counts = jax.jit(virtual(meter(PROGRAMS["cond in scan"][0])))(stacked())
    assert counts[0].tolist() == [3, 4]  # steps 0, 3, 6 and 0, 2, 4, 6


def until_quiet(x):
    go = lambda s: (lax.pmax(s[0].max(), AXIS) > 1) & (s[1] < 50)
    turn = lambda s: (lax.cond(s[1] % 2 == 0, pmean, lambda x: x, s[0]) / 2, s[1] + 1)
    return lax.while_loop(go, turn, (x, 0))[0]


@pytest.mark.parametrize("run", [virtual, on_mesh])
def test_the_meter_counts_the_turns_and_questions_of_a_while(run):
    sent = traffic(until_quiet, stacked()[0], workers=K)
    assert [row.count for row in sent.rows] == [None, None]
    assert sent.bytes_always == 0
    with pytest.raises(ValueError, match="while loop"):
        _ = sent.bytes_max
    x = jnp.full((K, N), 9.0)  # 9, 4.5, 2.25, 1.125, 0.5625
    plain = jax.jit(run(until_quiet))(x)
    out, counts = jax.jit(run(meter(until_quiet)))(x)
    np.testing.assert_array_equal(out, plain)
    assert counts[0].tolist() == [5, 2]
    assert sent.bytes(counts[0]) == 5 * 4 + 2 * BYTES


def test_a_while_is_open_in_the_compiled_program_too():
    compiled = jax.jit(on_mesh(until_quiet)).lower(stacked()).compile()
    found = compiled_traffic(compiled, mesh=mesh_of(K))
    assert {row.count for row in found.rows} == {None}
    assert found.census() == traffic(until_quiet, stacked()[0], workers=K).census()


def test_virtual_workers_that_disagree_are_counted_for_what_each_asked():
    fn = lambda x: lax.cond(x[0] > 3, pmean, lambda x: x, x)
    _, counts = virtual(meter(fn))(jnp.zeros((K, N)).at[2, 0].set(4.0))
    assert counts[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("backend", ["vmap", "shard_map", "pmap"])
def test_the_meter_goes_inside_spread(backend):
    fn = lambda x, step: lax.cond(step % 2 == 0, pmean, lambda x: x, x)
    mesh = None if backend == "vmap" else mesh_of(K)
    run = jax.jit(spread(meter(fn), mesh=mesh, backend=backend, in_axes=(0, None)))
    counts = [run(stacked(), jnp.int32(step))[1][0] for step in range(4)]
    assert [count.tolist() for count in counts] == [[1], [0], [1], [0]]


@pytest.mark.parametrize("run", [virtual, on_mesh])
def test_constants_keep_their_types_through_the_meter(run):
    def fn(x):
        talk = lambda x: (pmean(x), 1, jnp.float32(2))
        x, chosen, weight = lax.cond(loudest(x) > 3, talk, lambda x: (x, 0, weight_), x)
        return {"x": x, "chosen": chosen, "weight": weight, "none": None, "three": 3}

    weight_ = np.float32(5)
    plain = jax.eval_shape(run(fn), stacked())
    out, _ = jax.eval_shape(run(meter(fn)), stacked())
    kinds = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), tree)
    assert kinds(out) == kinds(plain)


def test_the_meter_composes_with_donation():
    step = jax.jit(virtual(meter(PROGRAMS["cond in scan"][0])), donate_argnums=0)
    x, total = stacked(), 0
    for _ in range(3):
        x, counts = step(x)
        total += reading("cond in scan").bytes(counts[0])
    assert total == 3 * 7 * BYTES


def test_the_meter_of_a_method_without_conditionals_is_the_same_program():
    fn = PROGRAMS["scan"][0]
    text = lambda f: str(jax.make_jaxpr(virtual(f))(stacked())).count("scan[")
    assert text(meter(lambda x: fn(x))) == text(fn) == 1


def test_python_numbers_choose_the_branch_at_trace():
    step = lambda x, step: pmean(x) if step % 2 else x
    assert traffic(step, stacked()[0], 3, workers=K).bytes_always == BYTES
    assert traffic(step, stacked()[0], 4, workers=K).rows == ()
    _, counts = virtual(lambda x: meter(step)(x, 3))(stacked())
    assert counts[0].tolist() == [1]


def test_shapes_are_enough_for_any_number_of_workers():
    shape = jax.ShapeDtypeStruct((1 << 20, 1 << 10), jnp.bfloat16)
    assert traffic(pmean, shape, workers=100_000).bytes_always == 1 << 31


def test_what_nobody_uses_is_not_sent():
    assert traffic(lambda x: (pmean(x), x)[1], stacked()[0], workers=K).rows == ()


def test_a_repeated_collective_is_marked_and_its_twin_in_a_branch_is_not():
    rows = reading("equal twice").rows
    assert [row.repeats for row in rows] == [False, True]
    other = lambda x: psum(x) + lax.cond(x[0] > 0, psum, jnp.sin, x) + psum(x + 1)
    sent = traffic(other, stacked()[0], workers=K)
    assert not any(row.repeats for row in sent.rows)
    ring_of_two = lambda x: sum(lax.ppermute(x, AXIS, [(0, 1), (1, 0)]) for _ in "lr")
    assert traffic(ring_of_two, stacked()[0], workers=2).merged().bytes_max == BYTES


def test_xla_takes_out_of_a_loop_what_is_the_same_in_every_turn():
    fn = lambda x: lax.fori_loop(0, 7, lambda i, c: pmean(x) * 2 + c, x)
    assert traffic(fn, stacked()[0], workers=K).bytes_always == 7 * BYTES
    compiled = jax.jit(on_mesh(fn)).lower(stacked()).compile()
    assert compiled_traffic(compiled, mesh=mesh_of(K)).bytes_always == BYTES


def test_two_axes_are_told_apart_and_one_of_size_one_is_not_crossed():
    def fn(x):
        x = lax.pmean(x, ("site", "chip")) + lax.pmean(x, "chip")
        return x + lax.ppermute(x, "site", [(0, 1)])

    axes = ("site", "chip")
    sent = traffic(fn, stacked()[0], workers=(2, 4), axis=axes)
    assert [row.axis for row in sent.rows] == [axes, "chip", "site"]
    sent = traffic(fn, stacked()[0], workers=(2, 1), axis=axes)
    assert [(row.axis, row.count) for row in sent.rows] == [
        ("site", 1),
        ("chip", 0),
        ("site", 1),
    ]


def per_shard(x):
    def shard(y):
        fire = lax.pmax(y.max(), (AXIS, "fsdp")) > 3
        return lax.cond(fire, lambda y: vary(lax.pmean(y, AXIS), AXIS), lambda y: y, y)

    spec = P(None, "fsdp")
    return jax.shard_map(shard, in_specs=spec, out_specs=spec, axis_names={"fsdp"})(x)


def test_inside_a_nested_shard_map_bytes_are_those_of_the_shard():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), (AXIS, "fsdp"))
    x = jax.ShapeDtypeStruct((3, 8), jnp.float32)
    sent = traffic(per_shard, x, workers=mesh)
    assert [(row.axis, row.bytes) for row in sent.rows] == [
        ((AXIS, "fsdp"), 4),
        (AXIS, 4 * 3 * 2),
    ]
    abstract = AbstractMesh((2, 4), (AXIS, "fsdp"))
    assert traffic(per_shard, x, workers=abstract) == sent

    def whole(fn):
        local = lambda x: jax.tree.map(lambda y: vary(y, AXIS)[None], fn(x[0]))
        return jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=P(AXIS),
                out_specs=P(AXIS),
                axis_names={AXIS},
            )
        )

    x = jnp.arange(48.0).reshape(2, 3, 8)
    compiled = whole(per_shard).lower(x).compile()
    assert compiled_traffic(compiled, mesh=mesh).census() == sent.census()
    out, counts = whole(meter(per_shard))(x)
    np.testing.assert_array_equal(out, whole(per_shard)(x))
    assert counts.tolist() == [[1, 1], [1, 1]]


def test_a_talking_program_inside_an_unknown_primitive_is_an_error_by_name():
    solve = lambda x: lax.custom_linear_solve(
        psum, x, lambda mv, b: mv(b), symmetric=True
    )
    with pytest.raises(ValueError, match=r"custom_linear_solve.*all_reduce"):
        traffic(solve, stacked()[0], workers=K)
    silent = lambda x: lax.custom_linear_solve(
        jnp.sin, x, lambda mv, b: b, symmetric=True
    )
    assert traffic(silent, stacked()[0], workers=K).rows == ()


def test_wrong_sizes_and_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="does not size axis"):
        traffic(pmean, stacked()[0], workers=(2, 4))
    with pytest.raises(ValueError, match="does not size axis"):
        traffic(pmean, stacked()[0], workers=0)
    with pytest.raises(ValueError, match="one count per row"):
        reading("scan").bytes([[5]])


def test_bytes_of_many_counts_do_not_overflow():
    sent = Traffic((Row("all_reduce", AXIS, "float32", 1 << 40),))
    assert sent.bytes(np.array([2**31 - 1], np.int32)) == (2**31 - 1) << 40


def test_the_table_has_one_line_per_row_and_names_every_axis():
    sent = Traffic(
        (
            Row("all_reduce", ("site", "chip"), "float32", 8, None, ((1, 0), (2, 1))),
            Row("permute", "chip", "int8", 16),
        )
    )
    first, second = sent.table().splitlines()[1:]
    assert first.split() == [
        "all_reduce",
        "site+chip",
        "float32",
        "8",
        "?",
        "1:0",
        "2:1",
    ]
    assert " ".join(second.split()) == "permute chip int8 16 1 -"
