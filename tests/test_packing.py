"""Codes of few bits: they come back, they fill their bytes, in the order declared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowcomm.packing import WIDTHS, pack, packed_bytes, unpack, width_of


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 64, 65])
def test_codes_come_back_and_take_as_many_bytes_as_announced(bits, n):
    # The ends of the range are there whatever n is.
    codes = np.random.default_rng(n).integers(0, 2**bits, n)
    codes[0], codes[-1] = 0, 2**bits - 1
    packed = jax.jit(pack, static_argnums=1)(jnp.asarray(codes), bits)
    assert packed.nbytes == packed_bytes(n, bits) == -(-n * bits // 8)
    back = jax.jit(unpack, static_argnums=(1, 2))(packed, bits, n)
    assert back.dtype == (jnp.uint16 if bits > 8 else jnp.uint8)
    assert back.tolist() == codes.tolist()


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    st.sampled_from(WIDTHS), st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=9)
)
def test_the_bytes_are_the_bits_of_the_codes_from_the_lowest_on(bits, codes):
    # The oracle: one long binary number, the first code at its low end.
    codes = [code % 2**bits for code in codes]
    number = sum(code << bits * i for i, code in enumerate(codes))
    expected = number.to_bytes(packed_bytes(len(codes), bits), "little")
    assert np.asarray(pack(jnp.asarray(codes), bits)).tobytes() == expected


@pytest.mark.parametrize("bits", WIDTHS)
def test_rows_are_packed_alike_under_vmap(bits):
    rows = np.random.default_rng(0).integers(0, 2**bits, (3, 13))
    together = jax.vmap(lambda codes: pack(codes, bits))(jnp.asarray(rows))
    for codes, packed in zip(rows, together, strict=True):
        np.testing.assert_array_equal(pack(jnp.asarray(codes), bits), packed)


def test_no_codes_are_no_bytes():
    for bits in WIDTHS:
        packed = pack(jnp.zeros(0, jnp.int32), bits)
        assert packed.size == unpack(packed, bits, 0).size == 0


def test_the_width_is_the_least_that_holds_all_values():
    assert [width_of(v) for v in (1, 2, 3, 4, 5, 16, 17)] == [1, 1, 2, 2, 4, 4, 8]
    assert [width_of(v) for v in (256, 257, 4096, 4097, 65536)] == [8, 12, 12, 16, 16]
    with pytest.raises(ValueError, match="65537 values do not fit"):
        width_of(65537)


@pytest.mark.parametrize("bits", [0, 3, 24])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits={bits}: codes have 1, 2, 4, 8, 12, 16"):
        pack(jnp.zeros(3, jnp.uint8), bits)
    with pytest.raises(ValueError, match=f"bits={bits}"):
        unpack(jnp.zeros(3, jnp.uint8), bits, 3)
