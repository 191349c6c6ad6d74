"""Numbers of two or four bits: an entry travels as its place in a short list."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm.compressors import Compressor, for_any_shape

POWERS = tuple(sign * 2.0**-e for sign in (-1, 1) for e in range(8))  # of the largest
GAUSSIAN = (-1.5104, -0.4528, 0.4528, 1.5104)  # best four for N(0, 1): Lloyd and Max


def codebook(levels: Sequence[float], *, relative_to: str) -> Compressor:
    r"""Send for each entry the nearest of the levels, times one scale for the array.

    ``relative_to`` is the scale: "largest" magnitude, or "rms", the root of the mean
    square. With ``POWERS`` of the largest an entry of at least 2⁻⁷ of it keeps two
    thirds of its value or more; with ``GAUSSIAN`` of the root mean square normal noise
    loses 12 % of its energy. Sent: 2 or 4 bits an entry, filled up to a whole byte, and
    a float32.

    Raises:
        ValueError: other than 4 or 16 levels, or another scale.

    Example:
        >>> x = jnp.array([1.0, -0.3, 0.1])
        >>> four = codebook(POWERS, relative_to="largest")
        >>> codes, scale = payload = four.encode(x, None)
        >>> print(codes.shape, codes.dtype, four.decode(payload, x, None))
        (2,) uint8 [ 1.    -0.25   0.125]
    """
    bits = {4: 2, 16: 4}.get(len(levels))
    if bits is None:
        raise ValueError(f"{len(levels)} levels; give 4 (two bits) or 16 (four).")
    scales = {
        "largest": lambda x: jnp.max(jnp.abs(x)),
        "rms": lambda x: jnp.sqrt(jnp.mean(x**2)),
    }
    if relative_to not in scales:
        raise ValueError(f"relative_to={relative_to!r}; there are {', '.join(scales)}.")
    table = np.sort(np.asarray(levels, np.float32))
    between = (table[1:] + table[:-1]) / 2
    places = np.arange(0, 8, bits, dtype=np.uint8)  # of the codes in a byte

    def encode(x: jax.Array, keys, agreed=None):
        x = x.astype(jnp.float32)
        scale = scales[relative_to](x)
        codes = jnp.searchsorted(between, x / jnp.where(scale == 0, 1, scale))
        codes = jnp.pad(codes.astype(jnp.uint8), (0, -len(x) % len(places)))
        shifted = codes.reshape(-1, len(places)) << places
        return shifted.sum(1, dtype=jnp.uint8), scale

    def decode(payload, like, keys, agreed=None):
        packed, scale = payload
        codes = (packed[:, None] >> places) & np.uint8(2**bits - 1)
        return scale * jnp.asarray(table)[codes.ravel()[: like.size]]

    return for_any_shape("codebook", encode, decode)
