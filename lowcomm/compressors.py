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
    """

    encode: Callable[..., Any]
    decode: Callable[..., jax.Array]
    linear: bool = False
    statistic: Callable[[jax.Array], jax.Array] | None = None


def payload_bytes(compressor: Compressor, like: Any) -> int:
    """The bytes one worker sends for ``like``, without running anything.

    ``like`` is an array, a ``jax.ShapeDtypeStruct`` or a tree of them, of which the
    floating-point and complex leaves travel. A statistic counts. What a linear
    compressor sends is summed on the way, in float32 for half-precision leaves.

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
        return compressor.encode(x, keys, agreed), agreed

    leaves = [x for x in jax.tree.leaves(like) if is_inexact(x)]
    sent = jax.tree.leaves([jax.eval_shape(travels, x) for x in leaves])
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in sent)


def for_any_shape(name, encode_vector, decode_vector, *, complex_too=False, **fields):
    """The compressor of all shapes made from a pair for vectors with elements."""

    def encode(x, keys, agreed=None):
        _check_dtype(name, x, complex_too)
        return encode_vector(jnp.ravel(x), keys, agreed) if x.size else ()

    def decode(payload, like, keys, agreed=None):
        if math.prod(like.shape) == 0:
            return jnp.zeros(like.shape, like.dtype)
        flat = jax.ShapeDtypeStruct((math.prod(like.shape),), like.dtype)
        out = decode_vector(payload, flat, keys, agreed)
        return out.reshape(like.shape).astype(like.dtype)

    return Compressor(encode, decode, **fields)


def _check_dtype(name, x, complex_too):
    if not is_inexact(x) or (not complex_too and jnp.iscomplexobj(x)):
        raise ValueError(
            f"{name} takes {'real or complex' if complex_too else 'real'} "
            f"floating-point arrays, not {x.dtype}{list(x.shape)}: leave integers "
            "and keys out; send real and imaginary part on their own."
        )
