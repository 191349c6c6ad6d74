"""A compressor that rotates first, so that few levels fit any array: THC."""

from __future__ import annotations

import math
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np

from .compressors import Compressor, Contraction, Unbiased, for_any_shape
from .grids import in_units, norms
from .keys import uniform_floats
from .rotations import LARGEST, block_of, blocks, rotate, rotate_back


def thc(
    bits: int = 4, *, granularity: int | None = None, overflow: float = 1 / 32
) -> Compressor:
    r"""Rotate, round at random to few levels, and sum the levels as integers.

    .. math::
        y = H D x / \sqrt B, \qquad
        z_i = \tfrac g2 \bigl(1 + \sqrt B\, y_i / t s\bigr) \text{ clipped to } [0, g],
        \qquad q_i \in T,\; E\,q_i = z_i

    for blocks of ``B`` elements (``rotations``; signs ``D`` from ``keys.shared``), with
    ``s`` the largest norm of the block on any worker (the statistic). The rotated
    entries are nearly Gaussian with variance at most ``s²/B`` whatever ``x`` was, so
    that a share ``overflow`` of them lies beyond ``t``, its two-sided quantile, and is
    clipped. ``T`` are ``2^bits`` of the integers from 0 to ``g = granularity``: all of
    them where there are no more (the default), else those that round a Gaussian with
    the least error. Workers share the grid, so the mean of their codes decodes to the
    mean of what they decode.

    Unbiased up to clipping. With ``R = min(1, t/√B)`` and ``w`` the widest gap in
    ``T``, both bounds for every ``x`` and every rotation:

    .. math:: E\|C(x) - x\|^2 \le \bigl((1 - R)^2 + B (w R / g)^2\bigr) \|x\|^2,

    a contraction, declared where that is below one; ``overflow=0`` takes ``R = 1``,
    clips nothing and is unbiased with ``ω = B w²/g²``. A Gaussian loses about
    ``(2 t/g)²/6`` and a little by clipping, 2 % at the defaults.

    Sent: an integer for each element of the blocks, ``n`` rounded up to a power of two,
    or beyond 4096 to a multiple of it, in the narrowest type that holds the workers'
    sum of values of up to ``⌈g/2⌉`` around the middle (int8 for 15 workers at the
    defaults; ``bits`` counts where a switch adds packets up); and a float32 norm per
    block. Linear. NaN or infinity spoils its block, visibly.

    Raises:
        ValueError: bits outside 1 … 8, a granularity below ``2^bits − 1``, overflow
            outside [0, 1); at trace, complex arrays.

    Note:
        The released table has ``g = 16`` with 8 values; its values count from zero,
        which takes a bit more in a sum.

    Example:
        One large entry would leave levels for no other; rotated, it is like all.

        >>> import jax
        >>> from lowcomm.keys import Keys
        >>> keys = Keys(jax.random.key(0), jax.random.key(1))
        >>> x, c = jnp.ones(4096).at[7].set(400.0), thc()
        >>> codes = c.encode(x, keys, c.statistic(x))
        >>> y = c.decode(codes, x, keys, c.statistic(x))
        >>> print(codes.dtype, bool(jnp.sum((y - x) ** 2) < 0.03 * jnp.sum(x**2)))
        int8 True

    References:
        Li, Basat, Vargaftik, Lao, Xu, Mitzenmacher and Yu, `THC: Accelerating
        Distributed Deep Learning Using Tensor Homomorphic Compression
        <https://arxiv.org/abs/2302.08545>`_, 2024, Algorithms 1–3.
    """
    whole = lambda x: isinstance(x, int) and not isinstance(x, bool)
    if not (whole(bits) and 1 <= bits <= 8):
        raise ValueError(f"thc: bits={bits!r}; give a whole number from 1 to 8.")
    g = 2**bits - 1 if granularity is None else granularity
    if not (whole(g) and g >= 2**bits - 1):
        raise ValueError(
            f"thc: granularity={granularity!r}; {2**bits} values want a grid of "
            f"{2**bits - 1} steps or more."
        )
    if not 0 <= overflow < 1:
        raise ValueError(f"thc: overflow {overflow} is outside [0, 1).")
    t = NormalDist().inv_cdf(1 - overflow / 2) if overflow else math.sqrt(LARGEST)
    table = levels(bits, g, t)
    widest, middle = int(np.diff(table).max()), g // 2
    # The values around each step of the grid.
    above = np.searchsorted(table, np.arange(g), side="right")
    below, above = (table[i].astype(np.float32) for i in (above - 1, above))

    def reach(length):
        """How large an entry of a block of norm 1 may be."""
        return min(1.0, t / math.sqrt(length)) if overflow else 1.0

    def statistic(x):
        if not x.size:
            return ()
        scales = norms(blocks(x.ravel().astype(jnp.float32)))
        return jnp.where(jnp.isfinite(scales), scales, jnp.inf)

    def encode(x, keys, agreed=None):
        y = rotate(blocks(x.astype(jnp.float32)), keys.shared)
        z = (in_units(y, jnp.asarray(agreed)) / reach(y.shape[1]) + 1) * (g / 2)
        z = jnp.where(z > 0, jnp.minimum(z, g), 0)  # a NaN is told by its norm
        step = jnp.minimum(z.astype(jnp.int32), g - 1)
        a, b = jnp.asarray(below)[step], jnp.asarray(above)[step]
        coin = uniform_floats(keys.private, z.size).reshape(z.shape)
        q = jnp.where(coin * (b - a) < z - a, b, a) - middle
        return q.ravel().astype(jnp.int8 if g - middle <= 127 else jnp.int16)

    def decode(payload, like, keys, agreed=None):
        length = block_of(like.size)
        q = payload.astype(jnp.float32).reshape(-1, length) + (middle - g / 2)
        y = q * (2 * reach(length) / g) * jnp.asarray(agreed)[:, None]
        return rotate_back(y, keys.shared).ravel()[: like.size]

    def lost(n):
        """A bound on the relative squared error, for every array of n elements."""
        length = block_of(n)
        R = reach(length)
        return (1 - R) ** 2 + length * (widest * R / g) ** 2

    worst = max(lost(2**i) for i in range(13))
    contraction = Contraction(lambda n: 1 - lost(n)) if worst < 1 else None
    return for_any_shape(
        "thc",
        encode,
        decode,
        linear=True,
        statistic=statistic,
        bound=g - middle,
        law=contraction if overflow else Unbiased(lost),
    )


def levels(bits: int, g: int, t: float) -> np.ndarray:
    """The ``2^bits`` integers of 0 … g that round a Gaussian on [−t, t] best.

    Their ends are 0 and g. By dynamic programming over the last value but one.
    """
    if g == 2**bits - 1:
        return np.arange(g + 1)
    normal = NormalDist()
    x = t * (2 * np.arange(g + 1) / g - 1)
    mass, density = (np.array([f(v) for v in x]) for f in (normal.cdf, normal.pdf))
    # The integrals of φ, x φ and x² φ from x[i] to x[j]: those of (x − a)(b − x) φ.
    over = lambda f: f[None, :] - f[:, None]
    a, b = x[:, None], x[None, :]
    second = over(mass) - over(x * density)
    cost = (a + b) * -over(density) - a * b * over(mass) - second
    cost = np.where(np.arange(g + 1)[:, None] < np.arange(g + 1), cost, np.inf)
    best = np.where(np.arange(g + 1) == 0, 0.0, np.inf)
    came = []
    for _ in range(2**bits - 1):
        total = best[:, None] + cost
        came.append(total.argmin(0))
        best = total.min(0)
    chosen = [g]
    for back in reversed(came):
        chosen.append(int(back[chosen[-1]]))
    return np.array(chosen[::-1])
