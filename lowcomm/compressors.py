"""What travels instead of an array: pairs of functions that encode and decode.

A compressor ``C`` is local, stateless and works on one array. With
``C(x) = decode(encode(x))`` it declares one of two laws, over the draw of its keys:

.. math::
    E\\|C(x) - x\\|^2 \\le (1 - \\delta) \\|x\\|^2 \\quad\\text{(contraction)}, \\qquad
    E\\,C(x) = x,\\; E\\|C(x) - x\\|^2 \\le \\omega \\|x\\|^2 \\quad\\text{(unbiased)}.

Error feedback needs the first kind; averaging without a memory needs the second.

===============================  ================  =================  ================
factory, n elements              law               constant           payload bytes
===============================  ================  =================  ================
``top_k(f)``                     contraction       δ ≥ k/n            k (itemsize + 4)
``random_k(f)``                  contraction       δ ≥ 1/⌈n/k⌉        k itemsize
``random_k(f, unbiased=True)``   unbiased          ω ≤ ⌈n/k⌉ − 1      k itemsize
``sign()``                       contraction       δ = ‖x‖₁²/(n‖x‖²)  ⌈n/8⌉ + 4
``quantize(b, block=s)``         unbiased          ω ≤ (s − 1)/(4L²)  n b/8 + 4 ⌈n/s⌉
``quantize(stochastic=False)``   contraction       δ ≥ 1/s            n b/8 + 4 ⌈n/s⌉
===============================  ================  =================  ================

For all of them: zero is sent as zero; an array without elements sends nothing; payload
shapes depend on the array's shape alone; half precision is computed in float32 and
decoded to the type of ``like``; a NaN or infinity that enters is seen by whoever
decodes. Integers, booleans and keys are refused: exchanges leave such leaves alone.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .keys import Keys
from .leaves import is_inexact, precise
from .transport import type_of_sums


class Contraction(NamedTuple):
    """The law ``E‖C(x) − x‖² ≤ (1 − δ)‖x‖²``, of what error feedback may carry."""

    delta: Callable[[int], float]  # of the number of elements, above 0


class Unbiased(NamedTuple):
    """The law ``E C(x) = x, E‖C(x) − x‖² ≤ ω‖x‖²``, of what a plain mean may carry."""

    omega: Callable[[int], float]  # of the number of elements


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


def payload_bytes(compressor: Compressor, like: Any, *, workers: int = 1) -> int:
    """The bytes one worker sends for ``like``, without running anything.

    ``like`` is an array, a ``jax.ShapeDtypeStruct`` or a tree of them, of which the
    floating-point and complex leaves travel. A statistic counts. What a linear
    compressor sends is summed on the way, in float32 for half-precision leaves, and
    integer codes (``bound``) in a type wide enough for the sum over ``workers``.

    Example:
        >>> from lowcomm import sign, top_k
        >>> weights = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32), "step": 3}
        >>> payload_bytes(top_k(0.01), weights)  # 328 values, 328 indices
        2624
        >>> payload_bytes(sign(), weights)  # 32768 bits and a scale
        4100
    """

    def travels(x):
        if compressor.linear:
            x = precise(x)
        keys = Keys(jax.random.key(0), jax.random.key(0))
        agreed = None if compressor.statistic is None else compressor.statistic(x)
        payload = compressor.encode(x, keys, agreed)
        if compressor.bound is not None:
            kind = type_of_sums(compressor.bound, workers)
            payload = jax.tree.map(lambda part: part.astype(kind), payload)
        return payload, agreed

    leaves = [x for x in jax.tree.leaves(like) if is_inexact(x)]
    sent = jax.tree.leaves([jax.eval_shape(travels, x) for x in leaves])
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in sent)


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
        _check_dtype(name, x, complex_too)
        if x.size >= 2**31:
            raise ValueError(
                f"{name}: {x.size} elements in one array are more than 32-bit indices "
                f"reach ({2**31 - 1}): split the leaf along its leading axis."
            )
        return encode_vector(jnp.ravel(x), keys, agreed) if x.size else ()

    def decode(payload, like, keys, agreed=None):
        if math.prod(like.shape) == 0:
            return jnp.zeros(like.shape, like.dtype)
        flat = jax.ShapeDtypeStruct((math.prod(like.shape),), like.dtype)
        out = decode_vector(payload, flat, keys, agreed)
        return out.reshape(like.shape).astype(like.dtype)

    if add_vector is None:
        return Compressor(encode, decode, **fields)

    def add(total, payload, keys, agreed=None):
        if total.size == 0:
            return total
        return add_vector(total.ravel(), payload, keys, agreed).reshape(total.shape)

    return Compressor(encode, decode, add=add, **fields)


def _check_dtype(name, x, complex_too):
    if not is_inexact(x) or (not complex_too and jnp.iscomplexobj(x)):
        raise ValueError(
            f"{name} takes {'real or complex' if complex_too else 'real'} "
            f"floating-point arrays, not {x.dtype}{list(x.shape)}: leave integers "
            "and keys out; send real and imaginary part on their own."
        )
