"""The laws of mixing: sums to one, the mean preserved, the right matrices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowcomm.topology import (
    Graph,
    complete,
    exponential,
    from_matrix,
    mixing_matrix,
    one_peer_exponential,
    ring,
    spectral_gap,
)

FACTORIES = {f.__name__: f for f in (ring, complete, exponential, one_peer_exponential)}
SIZES = range(1, 10)

every_graph = pytest.mark.parametrize(
    "graph",
    [factory(n) for factory in FACTORIES.values() for n in SIZES],
    ids=lambda graph: f"{graph.name}({graph.size})",
)


def matrices(graph):
    return [mixing_matrix(graph, step) for step in range(len(graph.rounds))]


def circulant(n, weights):
    """W[i, i − hop] = weight, hop by hop: who is ``hop`` behind is heard."""
    W = np.zeros((n, n))
    for hop, weight in weights.items():
        for i in range(n):
            W[i, (i - hop) % n] += weight
    return W


@every_graph
def test_rows_and_columns_sum_to_one_and_weights_are_positive(graph):
    for W in matrices(graph):
        assert W.shape == (graph.size, graph.size)
        assert np.all(W >= 0)
        np.testing.assert_allclose(W.sum(axis=0), 1, rtol=0, atol=1e-15)
        np.testing.assert_allclose(W.sum(axis=1), 1, rtol=0, atol=1e-15)


@every_graph
def test_the_mean_is_preserved_and_a_consensus_stays(graph):
    x = np.random.default_rng(0).standard_normal(graph.size)
    for W in matrices(graph):
        assert np.mean(W @ x) == pytest.approx(np.mean(x), abs=1e-15)
        np.testing.assert_allclose(W @ np.ones(graph.size), 1, rtol=0, atol=1e-15)


@every_graph
def test_no_worker_sends_twice_to_the_same_one(graph):
    for pairs in graph.rounds:
        links = [(i, j) for _, p in pairs for i, j in enumerate(p)]
        assert len(links) == len(set(links))


@every_graph
def test_what_permutations_send_is_what_the_matrix_says(graph):
    n = graph.size
    x = jnp.asarray(np.random.default_rng(1).standard_normal(n), jnp.float32)

    def worker(x):
        out = []
        for pairs in graph.rounds:
            send = lambda p: jax.lax.ppermute(x, "workers", list(enumerate(p)))
            out.append(sum(jnp.float32(weight) * send(p) for weight, p in pairs))
        return out

    for W, heard in zip(
        matrices(graph), jax.vmap(worker, axis_name="workers")(x), strict=True
    ):
        np.testing.assert_allclose(heard, W @ np.asarray(x), rtol=0, atol=n * 2**-22)


@every_graph
def test_graphs_are_values(graph):
    assert hash(graph) == hash(Graph(*graph))
    assert graph == FACTORIES[graph.name](graph.size)


@pytest.mark.parametrize("n", SIZES)
def test_the_ring_hears_both_neighbours_once(n):
    closed = {
        1: np.ones((1, 1)),
        2: np.full((2, 2), 1 / 2),
    }.get(n, circulant(n, {-1: 1 / 3, 0: 1 / 3, 1: 1 / 3}))
    W = mixing_matrix(ring(n))
    np.testing.assert_allclose(W, closed, rtol=0, atol=1e-16)
    np.testing.assert_array_equal(W, W.T)


@pytest.mark.parametrize("n", SIZES)
def test_the_complete_graph_is_the_mean(n):
    np.testing.assert_allclose(mixing_matrix(complete(n)), 1 / n, rtol=0, atol=1e-16)


@pytest.mark.parametrize("n", SIZES)
def test_the_exponential_graph_hears_powers_of_two_behind(n):
    hops = [0, *(2**j for j in range(10) if 2**j < n)]
    closed = circulant(n, dict.fromkeys(hops, 1 / len(hops)))
    np.testing.assert_array_equal(mixing_matrix(exponential(n)), closed)


@pytest.mark.parametrize("n", SIZES)
def test_one_peer_rounds_halve_with_one_power_of_two_each(n):
    graph = one_peer_exponential(n)
    assert len(graph.rounds) == max(1, math.ceil(math.log2(n)))
    for j, W in enumerate(matrices(graph)):
        closed = circulant(n, {0: 1 / 2, 2**j: 1 / 2}) if n > 1 else np.ones((1, 1))
        np.testing.assert_array_equal(W, closed)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
def test_one_period_of_one_peer_is_exactly_the_mean_for_powers_of_two(n):
    # Products of halves are exact in binary, so this is equality.
    product = np.eye(n)
    for W in matrices(one_peer_exponential(n)):
        product = W @ product
    np.testing.assert_array_equal(product, np.full((n, n), 1 / n))
    assert spectral_gap(one_peer_exponential(n)) == 1


@pytest.mark.parametrize("n", [3, 5, 6, 7, 9])
def test_one_period_of_one_peer_is_not_the_mean_for_other_sizes(n):
    assert 0 < spectral_gap(one_peer_exponential(n)) < 1


def test_rounds_repeat_with_their_period():
    graph = one_peer_exponential(8)
    for step in range(3):
        np.testing.assert_array_equal(
            mixing_matrix(graph, step), mixing_matrix(graph, step + 3)
        )
    assert not np.array_equal(mixing_matrix(graph, 0), mixing_matrix(graph, 1))


@pytest.mark.parametrize("n", range(3, 10))
def test_the_gap_of_the_ring_is_its_second_eigenvalue(n):
    # Eigenvalues of the ring are (1 + 2 cos(2πm/n)) / 3. For n = 8 the gap is
    # 1 − (1 + √2)/3, and λ₂² = (3 + 2√2)/9 = 0.6476.
    eigenvalues = [(1 + 2 * math.cos(2 * math.pi * m / n)) / 3 for m in range(1, n)]
    expected = 1 - max(map(abs, eigenvalues))
    assert spectral_gap(ring(n)) == pytest.approx(expected, abs=1e-14)


def test_the_gap_of_the_ring_of_eight_has_its_closed_form():
    expected = 1 - (1 + 2 * math.cos(math.pi / 4)) / 3
    assert spectral_gap(ring(8)) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("n", [2, 4, 6, 8, 64])
def test_the_gap_of_the_exponential_graph_of_even_size_has_its_closed_form(n):
    # W = (I + Σ P^(2^j)) / (1 + m), m = ⌈log₂ n⌉ hops. The eigenvector of alternating
    # signs has +1 for I and every even hop and −1 for hop 1: (m − 1) / (m + 1), and no
    # other is larger.
    m = (n - 1).bit_length()
    expected = 2 / (1 + m)
    assert spectral_gap(exponential(n)) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("n", SIZES)
def test_the_gap_is_one_for_the_mean_and_zero_for_silence(n):
    assert spectral_gap(complete(n)) == 1
    silent = Graph("silent", n, (((1.0, tuple(range(n))),),))
    assert spectral_gap(silent) == pytest.approx(1 if n == 1 else 0, abs=1e-14)


@every_graph
def test_disagreement_shrinks_at_least_as_the_gap_promises(graph):
    x = np.random.default_rng(2).standard_normal((graph.size, 50))
    x -= x.mean(axis=0)
    mixed = x
    for W in matrices(graph):
        mixed = W @ mixed
    factor = (1 - spectral_gap(graph)) ** len(graph.rounds)
    norm = lambda y: np.linalg.norm(y, axis=0)
    assert np.all(norm(mixed) <= factor * norm(x) + 1e-13)


def test_the_gap_of_a_product_that_is_not_normal_is_its_norm():
    # Two pairings of three workers. W₀ averages 0 and 1, W₁ averages 1 and 2. On the
    # disagreement, W₁W₀ has eigenvalues 0 and 1/4, but norm 1/2: it halves once.
    keep, first, second = (0, 1, 2), (1, 0, 2), (0, 2, 1)
    graph = Graph(
        "pairs", 3, (((0.5, keep), (0.5, first)), ((0.5, keep), (0.5, second)))
    )
    W = mixing_matrix(graph, 1) @ mixing_matrix(graph, 0)
    eigenvalues = np.sort(np.abs(np.linalg.eigvals(W - 1 / 3)))
    np.testing.assert_allclose(eigenvalues, [0, 0, 1 / 4], atol=1e-8)
    assert spectral_gap(graph) == pytest.approx(1 - math.sqrt(1 / 2), abs=1e-14)


# From a matrix


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    n=st.integers(1, 7),
    seed=st.integers(0, 10**6),
    terms=st.integers(1, 6),
)
def test_a_doubly_stochastic_matrix_comes_back(n, seed, terms):
    # Weights that are multiples of 1/64 make every difference exact.
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(64, np.full(terms, 1 / terms)) / 64
    W = sum(w * np.eye(n)[rng.permutation(n)] for w in weights)
    graph = from_matrix(W)
    np.testing.assert_array_equal(mixing_matrix(graph), W)
    assert len(graph.rounds[0]) <= (n - 1) ** 2 + 1


@every_graph
def test_the_matrix_of_a_graph_makes_a_graph_of_no_more_messages(graph):
    for step, pairs in enumerate(graph.rounds):
        again = from_matrix(mixing_matrix(graph, step), name=graph.name)
        np.testing.assert_allclose(
            mixing_matrix(again), mixing_matrix(graph, step), rtol=0, atol=1e-12
        )
        moves = lambda pairs: sum(i != j for _, p in pairs for i, j in enumerate(p))
        assert moves(again.rounds[0]) <= moves(pairs)


def test_rounding_of_a_float32_matrix_is_tolerated_and_not_sent():
    W = np.asarray(mixing_matrix(ring(7)), np.float32)
    graph = from_matrix(W)
    assert len(graph.rounds[0]) == 3
    np.testing.assert_allclose(mixing_matrix(graph), W, rtol=0, atol=1e-6)
    assert math.fsum(w for w, _ in graph.rounds[0]) == pytest.approx(1, abs=1e-15)


def test_ends_of_an_open_chain_keep_their_own_value():
    # Metropolis weights of a path of four workers.
    W = np.array([[2, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 2]]) / 3
    graph = from_matrix(W, name="chain")
    np.testing.assert_allclose(mixing_matrix(graph), W, rtol=0, atol=1e-15)
    assert graph.name == "chain"
    for _, p in graph.rounds[0]:
        assert sorted(p) == [0, 1, 2, 3]
        assert abs(p[0] - 0) <= 1
        assert abs(p[3] - 3) <= 1


def test_a_directed_matrix_keeps_its_direction():
    W = np.array([[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])  # hear i − 1
    graph = from_matrix(W)
    assert dict((p, w) for w, p in graph.rounds[0]) == {(0, 1, 2): 0.5, (1, 2, 0): 0.5}


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        ([[0.5, 0.5], [0.4, 0.5]], r"column 0 sums to 0\.9.*mean would drift"),
        (
            [[0.5, 0.3], [0.5, 0.7]],
            r"row [01] sums to (0\.8|1\.2).*consensus would not stay",
        ),
        ([[1.0, 0.0], [1.0, 0.0]], r"column 0 sums to 2"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"entry \(0, 1\) is -0\.5"),
        ([[np.nan, 1.0], [1.0, 0.0]], r"entry \(0, 0\) is nan"),
        ([[0.5, 0.5]], r"square, not \(1, 2\)"),
        ([1.0], r"square, not \(1,\)"),
        (np.zeros((0, 0)), r"square, not \(0, 0\)"),
    ],
)
def test_a_bad_matrix_is_refused_with_the_reason(matrix, reason):
    with pytest.raises(ValueError, match=reason):
        from_matrix(np.array(matrix))


def test_a_bad_graph_made_by_hand_is_refused_with_the_reason():
    doubled = Graph("doubled", 2, (((1.0, (0, 0)),),))
    with pytest.raises(ValueError, match=r"doubled: .* no permutation"):
        mixing_matrix(doubled)
    heavy = Graph("heavy", 2, (((1.0, (0, 1)), (0.5, (1, 0))),))
    with pytest.raises(ValueError, match=r"heavy: column 0 sums to 1\.5"):
        spectral_gap(heavy)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4", None])
def test_a_number_of_workers_that_is_none_is_refused_by_name(name, size):
    with pytest.raises(ValueError, match="at least one worker") as error:
        FACTORIES[name](size)
    assert f"{name}({size!r})" in str(error.value)
