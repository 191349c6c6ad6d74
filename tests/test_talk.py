"""What travels together: statistics, drawn places, and a compressor for each leaf."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    Compressor,
    Contraction,
    PerLeaf,
    Unbiased,
    compressed_mean,
    count_sketch,
    dgc,
    diana,
    ef21,
    error_feedback,
    masked_feedback,
    natural,
    payload_bytes,
    qsgd,
    quantize,
    random_k,
    sign,
    sparsified,
    spread,
    top_k,
    two_stage_feedback,
)
from lowcomm.ledger import traffic
from tests.test_feedback import K, N, T, constant, integers, largest, listen, on_both

# Integers on a grid that spans the largest entry of any worker.
GRID = Compressor(
    encode=lambda x, keys, agreed: jnp.round(x / agreed * 64).astype(jnp.int8),
    decode=lambda payload, like, keys, agreed: payload / jnp.float32(64) * agreed,
    statistic=lambda x: jnp.max(jnp.abs(x)),
)


@on_both
def test_a_statistic_is_agreed_on_before_encoding_and_its_bytes_count(backend):
    x = np.array([[1, -2, 3], [64, 5, 0], [-7, 7, 1], [2, 2, 2]], np.float32)
    tx = compressed_mean(GRID)
    heard, _ = listen(tx, x[:, None], backend)
    np.testing.assert_array_equal(heard[:, 0], [x.mean(0)] * K)
    worker = lambda x: tx.update(x, (), step=0)[0]
    assert traffic(worker, x[0], workers=K).bytes_always == 3 + 4
    assert payload_bytes(GRID, x[0]) == 3 + 4


def test_workers_round_independently_and_afresh_at_each_step():
    # Everyone is halfway between two integers.
    x = constant(np.tile(np.float32([127, *[0.5] * 4095]), (K, 1)), 2)
    heard, _ = listen(compressed_mean(quantize()), x, "mesh")
    heard = np.asarray(heard)[0, :, 1:]
    assert (heard[0] != heard[1]).any()
    # The mean of K coins of variance 1/4, seen 4095 times: within 4 standard errors.
    deviation = np.mean((heard - 0.5) ** 2) * 4 * K
    assert abs(deviation - 1) < 4 * np.sqrt(2 / (2 * 4095))


def test_workers_draw_the_same_places_and_others_at_each_step_and_leaf():
    stream = [np.ones((K, T, 16), np.float32)] * 2
    places = lambda seed: np.concatenate(
        listen(compressed_mean(random_k(0.25), seed=seed), stream, "mesh")[0], axis=1
    )[0]
    drawn = places(0)
    assert set(drawn.ravel()) == {0, 1}  # a place is everyone's or no one's
    assert (drawn.sum(1) == 4).all()
    assert all((a != b).any() for a, b in itertools.combinations(drawn, 2))
    assert (places(1) != drawn).any()


@on_both
def test_each_leaf_may_have_a_compressor_of_its_own(backend):
    kinds = {"a": top_k(0.25), "b/c": random_k(1.0), "b/d": sign()}
    stream = {"a": integers(K, T, N), "b": {k: integers(K, T, N) for k in "cd"}}
    asked = {}

    def choose(path, x):
        asked[path] = x.shape
        return kinds[path]

    tx = error_feedback(PerLeaf(choose))
    heard, state = listen(tx, stream, backend)
    assert asked == dict.fromkeys(kinds, (N,))
    flat = lambda tree: {"a": tree["a"], "b/c": tree["b"]["c"], "b/d": tree["b"]["d"]}
    # Neither draws anything: each is what it is alone.
    for path, x in flat(stream).items():
        alone, memory = listen(error_feedback(kinds[path]), x, backend)
        np.testing.assert_array_equal(flat(heard)[path], alone)
        np.testing.assert_array_equal(flat(state.error)[path], memory.error)
    assert (heard["a"][0, 0] == largest(stream["a"][:, 0], 2).mean(0)).all()


def test_leaves_with_different_compressors_share_their_collectives():
    leaf = np.ones(64, np.float32)
    tree = {f"{kind}{i}": leaf for kind in "rgs" for i in range(4)}
    kinds = {"r": random_k(0.5), "g": quantize(8), "s": GRID}
    tx = compressed_mean(PerLeaf(lambda path, x: kinds[path[0]]))
    sent = traffic(lambda x: tx.update(x, (), step=0)[0], tree, workers=K)
    assert sent.bytes_always == 4 * sum(payload_bytes(c, leaf) for c in kinds.values())
    # Values that are reduced; codes and scales that are gathered; statistics.
    assert len(sent.rows) == 4


def test_what_is_chosen_for_a_leaf_must_be_a_compressor():
    tx = compressed_mean(PerLeaf(lambda path, x: 0.5))
    with pytest.raises(ValueError, match=r"leaf 'w' must be a Compressor.* not float"):
        spread(lambda x: tx.update(x, (), step=0)[0])({"w": jnp.ones((K, 2))})


def test_two_levels_of_one_seed_do_not_draw_alike():
    # Of alike draws the second level would find what the first one kept, and double it:
    # 2 where the mean is 1. Here the variance of one draw is 3, of 4000 draws of 8
    # entries on 4 workers' groups 3 / (4000 · 8), and 6 standard errors are 0.06.
    c = random_k(0.5, unbiased=True)
    levels = [compressed_mean(c, axis=axis) for axis in ("chip", "site")]
    tx = optax.chain(*levels)

    def worker(g):
        one = lambda t: tx.update(g, tx.init(g), step=t)[0]
        return jax.lax.map(one, jnp.arange(4000)).mean()

    for_chips = jax.vmap(worker, axis_name="chip")
    heard = jax.jit(jax.vmap(for_chips, axis_name="site"))(jnp.ones((2, 2, 8)))
    np.testing.assert_allclose(heard, 1, atol=0.06)


def test_who_decodes_does_not_have_the_private_key():
    def decode(payload, like, keys, agreed=None):
        return payload + jax.random.uniform(keys.private, like.shape)

    dither = Compressor(lambda x, keys, agreed=None: x, decode)
    tx = compressed_mean(dither)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        spread(lambda g: tx.update(g, tx.init(g), step=0)[0])(jnp.ones((2, 3)))


@pytest.mark.parametrize("exchange", [compressed_mean, error_feedback])
def test_what_is_finite_in_half_precision_stays_so(exchange):
    tx = exchange(natural())  # 65000 may be rounded up, to 65536
    g = jnp.full((2, 64), 65000.0, jnp.float16)
    heard = spread(lambda g: tx.update(g, tx.init(g), step=0)[0])(g)
    assert heard.dtype == jnp.float16
    assert heard.max() == jnp.finfo(jnp.float16).max


@pytest.mark.parametrize(
    "memory",
    [
        error_feedback,
        lambda c: masked_feedback(c, optax.trace(0.9)),
        sparsified,
        two_stage_feedback,
    ],
)
@pytest.mark.parametrize(
    "compressor", [random_k(0.1, unbiased=True), count_sketch(1, 0.1)]
)
def test_no_memory_takes_a_compressor_of_which_it_would_grow(memory, compressor):
    tx, g = memory(compressor), {"w": jnp.ones((2, 64))}
    with pytest.raises(ValueError, match="would grow for ever"):
        spread(lambda g: tx.update(g, tx.init(g), step=0)[0])(g)


def test_a_traced_rate_or_momentum_is_let_through():
    # As inject_hyperparams hands them on; of numbers the range is checked.
    def worker(g, number):
        made = (
            ef21(optax.sgd(1.0), top_k(0.5), momentum=number),
            diana(optax.sgd(1.0), quantize(8), rate=number),
            dgc(optax.sgd(1.0), fraction=0.5, momentum=number, clip=number),
            optax.chain(error_feedback(top_k(0.5), decay=number), optax.sgd(1.0)),
        )
        return [tx.update(g, tx.init(g), g, step=0)[0] for tx in made]

    moves = jax.jit(spread(worker, in_axes=(0, None)))(jnp.ones((2, 4)), 0.5)
    assert all(np.isfinite(move).all() for move in moves)


@pytest.mark.parametrize("law", [0.9, Contraction(0.9), Unbiased(1), Contraction])
def test_a_law_is_a_function_of_the_number_of_elements(law):
    with pytest.raises(ValueError, match="functions of the number of elements"):
        error_feedback(sign()._replace(law=law))


def test_a_memory_takes_few_levels_only_where_they_are_enough():
    # ω = √64 / s − 1 is 7 for one level and 0 for eight.
    g = jnp.ones((2, 64))
    run = lambda tx: spread(lambda g: tx.update(g, tx.init(g), step=0)[0])(g)
    with pytest.raises(ValueError, match="more levels, or diana"):
        run(error_feedback(qsgd(1, block=64)))
    assert np.isfinite(run(error_feedback(qsgd(8, block=64)))).all()


def test_bytes_are_asked_of_compressors():
    with pytest.raises(ValueError, match="takes a Compressor"):
        payload_bytes(error_feedback(sign()), jnp.ones(3))
