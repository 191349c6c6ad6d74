"""What travels instead of an array: pairs of functions that encode and decode.

A compressor ``C`` is local, stateless and works on one array. With
``C(x) = decode(encode(x))`` it declares one of two laws, over the draw of its keys:

.. math::
    E\\|C(x) - x\\|^2 \\le (1 - \\delta) \\|x\\|^2 \\quad\\text{(contraction)}, \\qquad
    E\\,C(x) = x,\\; E\\|C(x) - x\\|^2 \\le \\omega \\|x\\|^2 \\quad\\text{(unbiased)}.

Error feedback needs the first kind; averaging without a memory needs the second.

==============================  ===========  ======================  ================
factory                         law          constant                payload bytes
==============================  ===========  ======================  ================
``top_k(f)``                    contraction  δ ≥ k/n                 k (b + 1 to 2)
``dct_top_k(k, chunk=c)``       contraction  δ ≥ k/c²                k (b + 1.5) n/c²
``random_k(f)``                 contraction  δ ≥ 1/⌈n/k⌉             k b, sums
``random_k(f, unbiased=True)``  unbiased     ω ≤ ⌈n/k⌉ − 1           k b, sums
``sign()``                      contraction  δ = ‖x‖₁²/(n‖x‖²)       n/8 + 4
``one_bit()``                   contraction  δ ≥ that of ``sign``    n/8 + 8 columns
``codebook(levels, block=s)``   contraction  by the levels, or none  n/4 or n/2 + 4n/s
``quantize(stochastic=False)``  contraction  δ ≥ 1/(1 + s/4L²)       n bits/8 + 4n/s
``quantize(bits, block=s)``     unbiased     ω ≤ s/4L², √s/2L        n bits/8 + 4n/s
``qsgd(L, block=s)``            unbiased     ω ≤ s/4L², √s/L         n bits/8 + 4n/s
``ternary()``                   unbiased     ω ≤ √n/2                n + 4, sums
``natural()``                   unbiased     ω ≤ 1/8                 9n/8
``count_sketch(R, C)``          unbiased     ω = (n − 1)/RC          4RC, sums
``thc(bits)``                   by overflow  by bits and overflow    n + 4n/B, sums
==============================  ===========  ======================  ================

``n`` elements of ``b`` bytes, of which ``k`` travel, ``L`` levels on each side of zero,
``s`` or ``B`` elements to a block (all unless given). The factories have what exactly
holds, for every array, in their ``law``, and say where it is attained. What sums is
linear: it takes an all-reduce where the others are gathered.

For all of them: zero is sent as zero; an array without elements sends nothing; payload
shapes depend on the array's shape alone; half precision is computed in float32 and
decoded to the type of ``like``, where what is finite and beyond its range becomes its
largest number; a NaN or infinity that enters is seen by whoever decodes, and so is a
norm or sum of magnitudes that leaves float32's range, as infinity. Integers,
booleans and keys are refused: exchanges leave such leaves alone.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .keys import Keys
from .leaves import fitting, is_inexact, precise, takes_part
from .transport import type_of_sums


class Contraction(NamedTuple):
    """The law ``E‖C(x) − x‖² ≤ (1 − δ)‖x‖²``, of what error feedback may carry.

    ``delta`` is a function of the number of elements ``n``, such as
    ``Contraction(lambda n: 1 / n)``.
    """

    delta: Callable[[int], float]  # of the number of elements, above 0


class Unbiased(NamedTuple):
    """The law ``E C(x) = x, E‖C(x) − x‖² ≤ ω‖x‖²``, of what a plain mean may carry.

    ``omega`` is a function of the number of elements, such as
    ``Unbiased(lambda n: n / 4)``. ``always`` says that arrays in which nothing stands
    out lose about that much: of ω from 1 on a memory would then grow for ever, and
    those of lowcomm refuse it. Without it ω is the worst case, and nothing is refused.
    """

    omega: Callable[[int], float]  # of the number of elements
    always: bool = False


class Compressor(NamedTuple):
    """How one array travels: ``encode`` what is sent, ``decode`` what was heard.

    - ``encode(x, keys, agreed=None) -> payload``: a pytree holding exactly the arrays
      that travel, with static shapes.
    - ``decode(payload, like, keys, agreed=None) -> array`` shaped and typed like
      ``like``, an array or a ``jax.ShapeDtypeStruct``. It uses ``keys.shared``, never
      ``keys.private``: what a seed determines is drawn again, not sent.
    - ``linear``: with equal ``keys.shared``, decoding the mean of payloads is the mean
      of the decoded, so payloads may be all-reduced.
    - ``statistic(x)``: one number, or one per block, whose maximum over the workers
      reaches both functions as ``agreed``; its bytes count.
    - ``law``: what it promises, a ``Contraction`` or ``Unbiased``; None promises
      nothing, and may be right all the same inside error feedback.
    - ``bound``: of a linear compressor whose payload are integer codes, their largest
      magnitude. Their sum travels in the narrowest type that holds it, and ``decode``
      is handed their mean in float32.
    - ``add(total, payload, keys, agreed=None)``: ``total`` plus what is decoded, where
      there is a shorter way, such as adding to a few entries. Shaped like the array.
    """

    encode: Callable[..., Any]
    decode: Callable[..., jax.Array]
    linear: bool = False
    statistic: Callable[[jax.Array], jax.Array] | None = None
    law: Contraction | Unbiased | None = None
    bound: int | None = None
    add: Callable[..., jax.Array] | None = None

    def init(self, params: Any) -> Any:
        """Raise: optax looks for a transformation, which this is not."""
        raise ValueError(
            "a Compressor encodes one array and is no transformation: wrap it, as in "
            "error_feedback(top_k(0.01)) or compressed_mean(quantize())."
        )


class PerLeaf(NamedTuple):
    """A compressor for every leaf of its own.

    ``choose(path, leaf)`` gives the ``Compressor`` of the leaf at a path such as
    ``"decoder/kernel"``; it may look at shape and type. ``compressed_mean``,
    ``error_feedback``, ``difference_feedback`` and ``masked_feedback``, and the methods
    made of them, take it in place of a ``Compressor``.
    """

    choose: Callable[[str, Any], Compressor]

    def of(self, path: tuple, leaf: Any) -> Compressor:
        """The compressor of a leaf at a path as ``jax.tree_util`` gives it."""
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        chosen = self.choose(where, leaf)
        if not isinstance(chosen, Compressor):
            raise ValueError(
                f"PerLeaf: what is chosen for leaf {where!r} must be a Compressor, "
                f"such as top_k(0.01), not {type(chosen).__name__}."
            )
        return chosen


def payload_bytes(
    compressor: Compressor | PerLeaf, like: Any, *, workers: int = 1
) -> int:
    """The bytes one worker sends for ``like``, without running anything.

    ``like`` is an array, a ``jax.ShapeDtypeStruct`` or a tree of them, of which the
    floating-point and complex leaves travel. A statistic counts. What a linear
    compressor sends is summed on the way, in float32 for half-precision leaves, and
    integer codes (``bound``) in a type wide enough for the sum over ``workers``.

    Example:
        >>> from lowcomm import sign, top_k
        >>> weights = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32), "step": 3}
        >>> payload_bytes(top_k(0.01), weights)  # 328 values and places, 8 counts
        1820
        >>> payload_bytes(sign(), weights)  # 32768 bits and a scale
        4100
    """

    if not isinstance(compressor, Compressor | PerLeaf):
        raise ValueError(
            "payload_bytes takes a Compressor, such as top_k(0.01), or PerLeaf, not "
            f"{type(compressor).__name__}: for an exchange or a method ask "
            "traffic(lambda g: tx.update(g, tx.init(g), g, step=0)[0], g, workers=8)."
        )

    def travels(path, x):
        one = compressor.of(path, x) if isinstance(compressor, PerLeaf) else compressor

        def said(x):
            if one.linear:
                x = precise(x)
            keys = Keys(jax.random.key(0), jax.random.key(0))
            agreed = None if one.statistic is None else one.statistic(x)
            payload = one.encode(x, keys, agreed)
            if one.bound is not None:
                kind = type_of_sums(one.bound, workers)
                payload = jax.tree.map(lambda part: part.astype(kind), payload)
            return payload, agreed

        return jax.eval_shape(said, x)

    leaves = jax.tree_util.tree_leaves_with_path(like)
    sent = jax.tree.leaves([travels(path, x) for path, x in leaves if takes_part(x)])
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in sent)


def check_law(law: Any) -> None:
    """Raise unless a declared law is one of the two, with a function of the size."""
    fits = law is None or isinstance(law, Contraction | Unbiased)
    if not fits or (law is not None and not callable(law[0])):
        raise ValueError(
            f"law={law!r}: declare Contraction(lambda n: δ) or Unbiased(lambda n: ω), "
            "functions of the number of elements, or None."
        )


def for_any_shape(
    name,
    encode_vector,
    decode_vector,
    *,
    add_vector=None,
    complex_too=False,
    **fields,
):
    """The compressor of all shapes made from a pair for vectors with elements."""

    def encode(x, keys, agreed=None):
        check_array(name, x, complex_too)
        return encode_vector(jnp.ravel(x), keys, agreed) if x.size else ()

    def decode(payload, like, keys, agreed=None):
        if math.prod(like.shape) == 0:
            return jnp.zeros(like.shape, like.dtype)
        flat = jax.ShapeDtypeStruct((math.prod(like.shape),), like.dtype)
        out = decode_vector(payload, flat, keys, agreed)
        return fitting(out.reshape(like.shape), like.dtype)

    if add_vector is None:
        return Compressor(encode, decode, **fields)

    def add(total, payload, keys, agreed=None):
        if total.size == 0:
            return total
        return add_vector(total.ravel(), payload, keys, agreed).reshape(total.shape)

    return Compressor(encode, decode, add=add, **fields)


def check_array(name, x, complex_too=False):
    """Raise unless a compressor of floating-point arrays can take ``x``."""
    if not is_inexact(x) or (not complex_too and jnp.iscomplexobj(x)):
        raise ValueError(
            f"{name} takes {'real or complex' if complex_too else 'real'} "
            f"floating-point arrays, not {x.dtype}{list(x.shape)}: leave integers "
            "and keys out; send real and imaginary part on their own."
        )
    if x.size >= 2**31:
        raise ValueError(
            f"{name}: {x.size} elements in one array are more than 32-bit indices "
            f"reach ({2**31 - 1}): split the leaf along its leading axis."
        )
