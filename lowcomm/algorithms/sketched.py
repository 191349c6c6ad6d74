"""Methods that send sums of hashed or rotated entries, as much for any workers."""

from __future__ import annotations

import optax

from ..feedback import error_feedback
from ..lossless import lossless_homomorphic, sparsified
from ..randomized import thc
from ..selections import top_k
from ..sketching import sketched, sketched_top_k
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation


def lossless_sgd(
    inner: Transformation,
    *,
    fraction: float = 0.01,
    slack: float | None = None,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""Top-k with error feedback, summed as sketches and peeled, then ``inner``.

    .. math::
        p_i = e_i + g_i, \quad u_i = \text{top}_k(p_i), \quad e_i \leftarrow p_i - u_i,
        \quad x \leftarrow x + \text{inner}\bigl(\tfrac1K \text{peel}(\textstyle\sum_i
        \text{sketch}(u_i))\bigr)

    The steps of ``top_k_sgd``, to a rounding of the largest entry. Sends what
    ``lossless_homomorphic`` sends: an all-reduce of some 1.3 float32 for each entry
    that any worker selects, and two bits for an entry of the model, instead of a gather
    of each worker's values and places. Little for few workers or where they select
    alike; the tree itself where it would be no more.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = lossless_sgd(optax.sgd(1.0), fraction=0.001)
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> g = jnp.ones((2, 1000)).at[0, 3].set(6.0).at[1, 5].set(8.0)
        >>> print(jax.jit(spread(worker))(g)[1, :7])
        [-0. -0. -0. -3. -0. -4. -0.]

    References:
        Li et al., `Accelerating Distributed Deep Learning using Lossless Homomorphic
        Compression <https://arxiv.org/abs/2402.07529>`_, 2024; Stich, Cordonnier and
        Jaggi, `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.
    """
    exchange = lossless_homomorphic(fraction, slack=slack, seed=seed, axis=axis)
    return optax.chain(sparsified(top_k(fraction), axis=axis), exchange, inner)


def fetch_sgd(
    inner: Transformation,
    *,
    fraction: float = 0.01,
    rows: int = 5,
    columns: int | float = 0.02,
    momentum: float = 0.9,
    forget: str = "zero",
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""Momentum and error in sketches, the largest applied, then ``inner`` (FetchSGD).

    .. math::
        V \leftarrow \rho V + \tfrac1K \textstyle\sum_i \text{sketch}(g_i), \quad
        E \leftarrow E + V, \quad \Delta = \text{top}_k(E), \quad
        E \leftarrow E \ominus \Delta, \quad x \leftarrow x + \text{inner}(\Delta)

    with ``sketched``'s arguments. The momentum is in there, so ``inner`` is plain SGD.
    Sends ``rows · columns`` float32 a step, for the whole model; ``columns`` may be a
    share of its entries.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = fetch_sgd(optax.sgd(1.0), fraction=0.001)
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> g = jnp.zeros((2, 1000)).at[:, 3].set(6.0)
        >>> print(spread(worker)(g)[1, :5])
        [-0. -0. -0. -6. -0.]

    References:
        Rothchild et al., `FetchSGD: Communication-Efficient Federated Learning with
        Sketching <https://arxiv.org/abs/2007.07682>`_, 2020, Algorithm 1.
    """
    exchange = sketched(
        fraction,
        rows=rows,
        columns=columns,
        momentum=momentum,
        forget=forget,
        seed=seed,
        axis=axis,
    )
    return optax.chain(exchange, inner)


def sketched_sgd(
    inner: Transformation,
    *,
    fraction: float = 0.01,
    rows: int = 5,
    columns: int | float = 0.02,
    candidates: int = 4,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""The largest of the mean, found by a sketch, then ``inner`` (Sketched-SGD).

    .. math::
        p_i = e_i + g_i, \quad H = \text{top}_{Pk}(\textstyle\sum_i \text{sketch}(p_i)),
        \quad \Delta = \text{top}_k(\tfrac1K \textstyle\sum_i p_i|_H), \quad
        e_i \leftarrow p_i - p_i|_{\text{chosen}}, \quad
        x \leftarrow x + \text{inner}(\Delta)

    with ``sketched_top_k``'s arguments. Sends ``rows · columns`` float32 and then
    ``candidates · k`` of them a step, for the whole model.

    Example:
        What cancels in the mean is not sent, however large each worker's share is.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = sketched_sgd(optax.sgd(1.0), fraction=0.001)
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> g = jnp.zeros((2, 1000)).at[:, 2].set(jnp.array([9.0, -9.0]))
        >>> print(spread(worker)(g.at[:, 3].set(6.0))[1, :5])
        [-0. -0. -0. -6. -0.]

    References:
        Ivkin et al., `Communication-efficient Distributed SGD with Sketching
        <https://arxiv.org/abs/1903.04488>`_, 2019, Algorithms 1 and 2.
    """
    exchange = sketched_top_k(
        fraction,
        rows=rows,
        columns=columns,
        candidates=candidates,
        seed=seed,
        axis=axis,
    )
    return optax.chain(exchange, inner)


def thc_sgd(
    inner: Transformation,
    *,
    bits: int = 4,
    granularity: int | None = None,
    overflow: float = 1 / 32,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""Rotated, few-level gradients summed as integers, then ``inner`` (THC).

    .. math::
        p_i = e_i + g_i, \quad x \leftarrow x + \text{inner}(\tfrac1K \textstyle\sum_i
        C(p_i)), \quad e_i \leftarrow p_i - C(p_i)

    ``C`` is ``thc``, with the same arguments. Sends an integer an entry, int8 for up to
    15 workers, after an all-reduce of a norm per 4096 entries.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread, traffic
        >>> tx = thc_sgd(optax.sgd(1.0))
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> g = jnp.ones((2, 1024))
        >>> bool(jnp.abs(jax.jit(spread(worker))(g) + 1).mean() < 0.2)
        True
        >>> traffic(worker, g[0], workers=2).bytes_always
        1028

    References:
        Li et al., `THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic
        Compression <https://arxiv.org/abs/2302.08545>`_, 2024, Algorithm 3.
    """
    compressor = thc(bits, granularity=granularity, overflow=overflow)
    return optax.chain(error_feedback(compressor, seed=seed, axis=axis), inner)
