"""Methods that send gradients in few bits, both ways."""

from __future__ import annotations

import optax

from ..quantizers import quantize
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation
from ..two_stage import two_stage
from ..votes import majority_vote


def quantized_sgd(
    inner: Transformation,
    *,
    bits: int = 8,
    block: int = 256,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""The mean gradient by a quantized all-reduce, then ``inner``.

    .. math:: x \leftarrow x + \text{inner}\big(Q(\tfrac1K \sum_i Q(g_i))\big)

    ``Q`` rounds at random to the multiples of a ``2^{bits−1} − 1``-th of the largest
    magnitude in each ``block`` entries of a row of a leaf, so the mean is unbiased and
    nothing need be remembered; see ``two_stage``. Sends ``bits`` bits an entry and a
    float32 a block, once up and once down.

    Note:
        ZeRO++ quantizes to four bits, and in a reduce-scatter that has one stage within
        a machine and one between them; that it rounds to the nearest is an inference.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread, traffic
        >>> tx = quantized_sgd(optax.sgd(1.0))
        >>> step = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> spread(step)(jnp.array([[127.0, -2.0], [127.0, -4.0]]))
        Array([[-127.,    3.],
               [-127.,    3.]], dtype=float32)
        >>> traffic(step, jnp.ones(8192), workers=8).bytes_always  # of 32768
        9360

    References:
        Wang et al., `ZeRO++ <https://arxiv.org/abs/2306.10209>`_, 2023 (qgZ).
    """
    exchange = two_stage(quantize(bits, block=block), seed=seed, axis=axis)
    return optax.chain(exchange, inner)


def sign_vote_sgd(
    inner: Transformation, *, levels: int = 2, axis: Axis = AXIS
) -> Talking:
    r"""signSGD with majority vote, then ``inner``.

    .. math:: x \leftarrow x + \text{inner}\Big(\text{sign}\big(
        \textstyle\sum_i \text{sign}(g_i)\big)\Big)

    Every entry moves by the learning rate of ``inner`` at every step, whatever the
    gradients' size, zero included: rates are those of Adam, not of SGD, and what shall
    not move wants ``optax.masked`` or ``partition`` around. Chained behind
    ``optax.ema(0.9, debias=False)``, so that workers vote with momenta, it is Signum.
    Sends one bit an entry up and one down; with ``levels=3`` two, and then zeros and
    ties do not move. See ``majority_vote`` for the conventions, and for what comes of
    workers whose data differ.

    Example:
        The second worker alone cannot turn the first entry.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = sign_vote_sgd(optax.sgd(0.5))
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> spread(worker)(jnp.array([[1.0, -2.0], [-1e6, -1.0], [3.0, -0.5]]))[0]
        Array([-0.5,  0.5], dtype=float32)

    References:
        Bernstein et al., `signSGD with Majority Vote is Communication Efficient And
        Fault Tolerant <https://arxiv.org/abs/1810.05291>`_, 2019, Algorithm 1.
    """
    return optax.chain(majority_vote(levels=levels, axis=axis), inner)
