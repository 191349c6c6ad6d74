"""Methods whose rounds end with some entries of what each worker has moved."""

from __future__ import annotations

import optax

from .. import uniform
from ..anchor import rounds
from ..codebooks import codebook
from ..compressors import Compressor
from ..feedback import error_feedback
from ..selections import top_k
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation
from ..triggers import Trigger, clock

# Two bits for values that are the largest of many, in units of their own root mean
# square: between the best levels (Lloyd, Max) for the largest 1/64 of normal numbers,
# (0.94, 1.15), and of Laplacian ones, (0.90, 1.27). They miss 0.9 and 1.3 % of the
# energy, where levels for all of a normal distribution would miss 20 %.
TAILS = (-1.3, -0.9, 0.9, 1.3)


def sparse_loco(
    inner: Transformation,
    *,
    period: int | Trigger = 30,
    k: int = 64,
    block: int = 4096,
    decay: float = 0.95,
    outer_lr: optax.ScalarOrSchedule = 1.0,
    values: Compressor | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""SparseLoCo: rounds that end with the largest displacements, in two bits each.

    .. math::
        e_i \leftarrow \beta e_i + (a - x_i), \quad
        q_i = Q(\text{top}_k(e_i)), \quad e_i \leftarrow e_i - q_i, \quad
        a \leftarrow a - \alpha \tfrac1K \textstyle\sum_i q_i, \quad x_i \leftarrow a

    ``a`` is ``state.anchor``. Of each ``block`` of consecutive entries the ``k``
    largest travel; a smaller leaf sends its share of that, at least one entry. ``Q`` is
    ``values``, a compressor of the chosen ones: by default two bits an entry, in units
    of the root mean square of a block's. ``β`` is ``decay``: what was not sent fades,
    and takes the place of an outer momentum. ``α`` is ``outer_lr``. Sends the chosen
    values and their places once every ``period`` steps (or when a trigger fires).

    For any Q, :math:`\sum_t \text{sent}_t + e_T + (1-β)\sum_{0<t<T} e_t = \sum_t Δ_t`
    on each worker. With ``k = block`` and ``top_k(1)`` for ``values`` everything is
    sent, and it is parameter averaging.

    Raises:
        ValueError: k outside 1 … block, decay outside [0, 1].

    Note:
        The paper quantizes to two bits; which levels it takes is not said here, and
        these were fitted to the tails of distributions. Where a block has fewer than k
        entries that are not zero, as of an embedding, zeros are chosen, and sent as 0.9
        of the root mean square: such a block hovers about what it should be and need
        not come to rest. ``values=top_k(1.0)`` sends values whole.

    Example:
        Each says the larger coordinate of what it moved; the other one waits.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = sparse_loco(optax.sgd(1.0), period=1, k=1, block=2, decay=1.0,
        ...                  values=top_k(1.0))
        >>> def worker(g):
        ...     x, path = 0 * g, []
        ...     state = tx.init(x)
        ...     for t in range(2):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.array([[-3.0, -2.0], [-1.0, -4.0]]))[0])
        [[1.5 2. ]
         [1.5 6. ]]

    References:
        Sarfi, Thérien, Lidin and Belilovsky, `Communication Efficient LLM Pre-training
        with SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025, Algorithm 1.
    """
    uniform.whole(k=k, block=block)
    if not 1 <= k <= block:
        raise ValueError(f"k = {k} of blocks of {block}: send 1 to all of each.")
    if values is None:
        values = codebook(TAILS, relative_to="rms", block=k)
    chosen = top_k(k / block, block=block, values=values)
    exchange = error_feedback(chosen, decay=decay, axis=axis)
    outer = optax.sgd(outer_lr)
    return rounds(inner, outer, exchange=exchange, when=clock(period), axis=axis)


def qsparse_local_sgd(
    inner: Transformation,
    *,
    period: int | Trigger = 8,
    fraction: float = 0.01,
    values: Compressor | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""Qsparse-local-SGD: local steps, then the largest of what was moved, quantized.

    .. math::
        q_i = Q(\text{top}_k(e_i + a - x_i)), \qquad e_i \leftarrow e_i + a - x_i - q_i,
        \qquad a \leftarrow a - \tfrac1K \textstyle\sum_i q_i, \qquad x_i \leftarrow a

    ``a`` is ``state.anchor``, ``k`` is ``fraction`` of each leaf's entries and ``Q`` is
    ``values``, a compressor of the chosen ones, such as ``quantize(4)`` or ``sign()``;
    none unless given. Sends the chosen values and their places once every ``period``
    steps (or when a trigger fires). At a period of 1 and without ``Q`` it is top-k SGD
    with the residual in units of parameters.

    Raises:
        ValueError: a fraction outside (0, 1].

    Note:
        The workers send together; the paper also lets each keep a time of its own.

    Example:
        Four bits for each of the entries that are sent, and a scale.

        >>> import jax.numpy as jnp
        >>> from lowcomm import quantize, spread, traffic
        >>> x = jnp.ones(4096)
        >>> def sent(tx):
        ...     step = lambda g: tx.update(g, tx.init(g), g, step=7)[0]
        ...     return traffic(step, x, workers=8).bytes_always
        >>> plain = qsparse_local_sgd(optax.sgd(1.0), period=8)
        >>> coded = qsparse_local_sgd(optax.sgd(1.0), period=8, values=quantize(4))
        >>> sent(plain) - sent(coded), 41 * 4 - (21 + 4)
        (139, 139)

    References:
        Basu, Data, Karakus and Diggavi, `Qsparse-local-SGD
        <https://arxiv.org/abs/1906.02367>`_, 2019, Algorithm 1.
    """
    exchange = error_feedback(top_k(fraction, values=values), axis=axis)
    return rounds(
        inner, optax.sgd(1.0), exchange=exchange, when=clock(period), axis=axis
    )
