"""Orthonormal bases: of many matrices at once, whatever their columns are."""

import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm.matrices import orthonormal

EPS = float(jnp.finfo(jnp.float32).eps)


def gaussian(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def columns(kind, rank):
    x = gaussian(80, rank).astype(np.float64)
    if kind == "dependent":
        x[:, 2] = x[:, 0] - 3 * x[:, 1]
    if kind == "graded":
        x *= np.logspace(6, -12, rank)
    if kind == "close":
        x = x[:, :1] + 1e-3 * x
    return {"zero": 0 * x, "huge": 1e30 * x, "tiny": 1e-30 * x}.get(kind, x)


@pytest.mark.parametrize("rank", [4, 40])  # one column after the other, or all
@pytest.mark.parametrize(
    "kind", ["plain", "dependent", "graded", "close", "zero", "huge", "tiny"]
)
def test_bases_are_orthonormal_and_span_the_columns(kind, rank):
    x = columns(kind, rank)
    (q,) = orthonormal([jnp.asarray(x, jnp.float32)])
    q = np.asarray(q, float)
    there = np.diag(q.T @ q) > 0.5
    lacking = {"dependent": [2], "zero": range(rank)}.get(kind, [])
    assert np.flatnonzero(~there).tolist() == list(lacking)
    np.testing.assert_allclose(q.T @ q, np.diag(there), atol=32 * EPS)
    # The columns are what they were rounded to, and the close ones differ by 1e-3.
    size = np.linalg.norm(x, axis=0)
    missed = (x - q @ (q.T @ x)) / np.where(size > 0, size, 1)
    assert np.abs(missed).max() < 128 * EPS


def test_of_many_shapes_each_has_its_own_basis():
    xs = [gaussian(*shape) for shape in ((9, 2), (7, 2), (9, 2), (40, 33))]
    for x, q in zip(xs, orthonormal(list(map(jnp.asarray, xs))), strict=True):
        np.testing.assert_allclose(q.T @ q, np.eye(q.shape[1]), atol=64 * EPS)
        np.testing.assert_allclose(q @ (q.T @ x), x, atol=256 * EPS)
