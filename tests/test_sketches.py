"""The count sketch as a compressor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm import count_sketch, payload_bytes, testing
from lowcomm.keys import Keys
from lowcomm.sketches import median


@pytest.mark.parametrize("compressor", [count_sketch(3, 4), count_sketch(2, 0.1)])
def test_it_obeys_the_laws_of_compressors(compressor):
    report = testing.check(compressor, claims=["unbiased"], show=lambda line: None)
    assert not report.failed
    assert {v.law for v in report.verdicts if v.status == "lacks it"} == {"contracts"}


def test_its_error_is_the_declared_omega_for_every_array():
    # E‖C(x) − x‖² = (n − 1)/(R C) ‖x‖², whatever x is.
    n, c = 40, count_sketch(3, 5)
    omega = (n - 1) / 15
    assert c.law.omega(n) == omega

    @jax.jit
    @jax.vmap
    def errors(key):
        lost = lambda x: c.decode(c.encode(x, keys), x, keys) - x
        keys = Keys(key, None)
        return jnp.stack([jnp.sum(lost(x) ** 2) / jnp.sum(x**2) for x in xs])

    rng = np.random.default_rng(0)
    xs = [jnp.eye(n)[3], jnp.ones(n), jnp.asarray(rng.normal(size=n), jnp.float32)]
    drawn = np.asarray(errors(jax.random.split(jax.random.key(0), 4000)), np.float64)
    standard = drawn.std(0) / np.sqrt(len(drawn))
    assert (np.abs(drawn.mean(0) - omega) < 5 * standard).all()
    assert (standard < 0.03 * omega).all()


def test_an_array_of_no_more_elements_than_buckets_travels_as_it_is():
    x, keys = jnp.arange(12.0), Keys(jax.random.key(0), None)
    for c, sent in ((count_sketch(3, 4), 12), (count_sketch(2, 0.5), 12)):
        assert (c.decode(c.encode(x, keys), x, keys) == x).all()
        assert payload_bytes(c, x) == 4 * sent
        assert c.law.omega(12) == 0
    assert payload_bytes(count_sketch(2, 0.1), jnp.zeros((100, 4))) == 4 * 2 * 40
    assert payload_bytes(count_sketch(2, 0.001), jnp.zeros(100)) == 4 * 2 * 1


def test_the_median_of_rows_is_numpys():
    rng = np.random.default_rng(0)
    for count in range(1, 8):
        rows = rng.normal(size=(count, 50)).astype(np.float32)
        assert (np.asarray(median(list(rows))) == np.median(rows, axis=0)).all()
    rows[2, 5] = np.nan
    assert np.flatnonzero(np.isnan(median(list(rows)))).tolist() == [5]


@pytest.mark.parametrize(
    ("rows", "columns", "says"),
    [(0, 5, "rows=0"), (2, 0, "columns=0"), (2, 1.5, "columns=1.5"), (True, 5, "rows")],
)
def test_a_table_without_rows_or_columns_is_refused(rows, columns, says):
    with pytest.raises(ValueError, match=says):
        count_sketch(rows, columns)
