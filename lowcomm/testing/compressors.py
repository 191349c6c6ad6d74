"""Laws of compressors: what they send, what is decoded, what they declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compressors import Compressor, Contraction, Unbiased, check_law, payload_bytes
from ..keys import Keys
from ..leaves import precise
from ..spmd import stack
from ..workers import spread
from .equality import Broken, NotApplicable, apart, difference, finite, wide
from .laws import Law
from .problems import host, place_of

SHAPES = Law("shapes", "what is decoded is shaped and typed like the original")
ZERO = Law("zero", "zero is decoded as zero, and what is finite as finite")
FIXED = Law("fixed payload", "the shapes of a payload do not depend on the values")
SHARED = Law("shared key", "a payload and the shared key are enough to decode")
REPEATS = Law("repeats", "the same array and keys give the same payload")
LINEAR = Law("linear", "if declared, the mean of payloads decodes to the mean")
BACKENDS_AGREE = Law("backends agree", "vmap, a mesh and no workers decode the same")
CONTRACTS = Law("contracts", "fit for error feedback: it adds no error", optional=True)
UNBIASED = Law("unbiased", "fit for a plain mean: right on average", optional=True)
ALARM = Law("shows NaN", "what is not finite is seen by who decodes", optional=True)

LEAVES = [(), (1,), (0,), (3, 0), (7,), (3, 5), (64, 33)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
DRAWS = 1024  # so many that what one draw of 61 shows is seen many times


@dataclass(eq=False)
class Packed:
    """A compressor, and arrays that it is tried on."""

    compressor: Compressor

    def keys(self, step: Any = 0, worker: int = 0) -> Keys:
        """Keys of a leaf: one for all workers, one for each."""
        fold = jax.random.fold_in
        shared, private = (fold(jax.random.key(seed), step) for seed in (1, 2))
        return Keys(shared, fold(private, worker))

    def payload(self, x: jax.Array, keys: Keys) -> tuple[Any, Any]:
        """What travels, and what was agreed on before."""
        c = self.compressor
        agreed = None if c.statistic is None else c.statistic(x)
        return c.encode(x, keys, agreed), agreed

    def back(self, x: jax.Array, keys: Keys) -> jax.Array:
        """There and back."""
        payload, agreed = self.payload(x, keys)
        return self.compressor.decode(payload, x, keys, agreed)

    @functools.cached_property
    def once(self) -> Callable:
        """There and back at a step, compiled: there a maximum may lose a NaN."""
        return jax.jit(lambda x, t: self.back(x, self.keys(t)))

    @functools.cached_property
    def draws(self) -> Callable:
        """There and back with many keys, ``[n] -> [draws, n]``."""
        back = jax.vmap(lambda x, t: self.back(x, self.keys(t)), in_axes=(None, 0))
        return jax.jit(lambda x: back(x, jnp.arange(DRAWS)))


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """A Gaussian array, the same each time."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


@SHAPES.clause(dtype=DTYPES)
def what_is_decoded_is_shaped_and_typed_like_the_original(c: Packed, dtype: Any):
    """Scalars, empty arrays, vectors and matrices."""
    for shape in LEAVES:
        like = jax.ShapeDtypeStruct(shape, dtype)
        try:
            out = jax.eval_shape(c.back, like, c.keys())
        except Exception as problem:
            raise Broken(f"of {like.dtype}{shape}: {problem}") from problem
        if (out.shape, out.dtype) != (like.shape, like.dtype):
            raise Broken(f"{like.dtype}{shape} is decoded as {out.dtype}{out.shape}")


@SHAPES.clause()
def a_payload_has_the_bytes_that_were_announced(c: Packed):
    """``payload_bytes`` of the compressor."""
    x = normal(7, 5)
    sent = sum(part.nbytes for part in jax.tree.leaves(c.payload(x, c.keys())))
    if sent != payload_bytes(c.compressor, x):
        raise Broken(f"{sent} bytes travel, not {payload_bytes(c.compressor, x)}")
    return f"{sent} bytes for {x.nbytes}"


@ZERO.clause(dtype=DTYPES)
def zero_is_decoded_as_zero(c: Packed, dtype: Any):
    """And values of usual sizes as finite ones."""
    x = jnp.zeros(33, dtype)
    finite({"zero": (out := c.back(x, c.keys()))}, "decoded")
    if part := difference(out, x):
        raise Broken(f"decoded from zeros {part}")
    for size in (1e-3, 1.0, 1e3):
        out = c.back(size * normal(33, dtype=dtype), c.keys())
        finite({"x": out}, f"decoded from values of size {size:g}")


@FIXED.clause()
def payload_shapes_do_not_depend_on_values(c: Packed):
    """Zeros, equal values, NaN and huge ones included."""
    x = np.array(normal(33))
    found = {}
    for name, y in {
        "Gaussian": x,
        "zero": 0 * x,
        "equal": x / x,
        "NaN": np.where(x > 1, np.nan, x),
        "huge": np.float32(1e30) * x,
    }.items():
        payload = host(c.payload(jnp.asarray(y), c.keys()))
        kinds = [f"{part.dtype}{part.shape}" for part in jax.tree.leaves(payload)]
        found.setdefault(str(kinds), name)
    if len(found) > 1:
        said = " and ".join(f"{kinds} for {name}" for kinds, name in found.items())
        raise Broken(f"what travels is {said} values")


@SHARED.clause(dtype=DTYPES)
def another_worker_decodes_the_same(c: Packed, dtype: Any):
    """Without the private key of who encoded."""
    x, mine = normal(33, dtype=dtype), c.keys(step=4, worker=1)
    payload, agreed = c.payload(x, mine)
    expected = c.compressor.decode(payload, x, mine, agreed)
    received = jax.tree.map(lambda part: jnp.asarray(np.asarray(part)), payload)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    there = c.compressor.decode(received, like, mine._replace(private=None), agreed)
    if part := difference(there, expected):
        raise Broken(f"another worker decodes what {part}")


@REPEATS.clause()
def the_same_array_and_keys_give_the_same_payload(c: Packed):
    """Three times over."""
    first, *others = [host(c.payload(normal(33), c.keys())) for _ in range(3)]
    for other in others:
        if part := difference({"payload": other}, {"payload": first}):
            raise Broken(f"encoded again, {part}: draw from the keys alone")


@LINEAR.clause()
def the_mean_of_payloads_decodes_to_the_mean(c: Packed):
    """Of four workers with one shared key."""
    if not c.compressor.linear:
        raise NotApplicable("not declared (linear=True)")
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.integers(-99, 99, (4, 33)), jnp.float32)
    agreed = None
    if c.compressor.statistic is not None:
        agreed = jnp.max(jnp.stack([c.compressor.statistic(x) for x in xs]), 0)
    payloads = [
        c.compressor.encode(x, c.keys(worker=w), agreed) for w, x in enumerate(xs)
    ]
    mean = lambda *parts: sum(map(precise, parts)) / len(parts)
    decode = lambda payload: c.compressor.decode(payload, xs[0], c.keys(), agreed)
    decoded = mean(*map(decode, payloads))
    together = decode(jax.tree.map(mean, *payloads))
    if not apart(together, decoded) <= 12:  # four summands, and a few more roundings
        raise Broken(f"the mean of payloads {difference(together, decoded)}")


@BACKENDS_AGREE.clause(backend=["vmap", "shard_map"])
def workers_decode_the_same_wherever_they_run(c: Packed, backend: str):
    """Against the same call without workers."""
    if backend == "shard_map" and len(jax.devices()) < 4:
        raise NotApplicable(f"needs 4 devices, JAX sees {len(jax.devices())}")
    # Few bits, so that sums are exact and no rounding flips a code.
    x = jnp.round(8 * normal(33)) / 8
    back = lambda x: c.back(x, c.keys(step=5))
    there = jax.jit(spread(back, **place_of(backend, 4)))(stack(x, 4))
    here = jax.jit(back)(x)
    for w in range(4):
        if not apart(there[w], here) <= 4:
            raise Broken(f"on worker {w} of four {difference(there[w], here)}")


def promised(compressor: Compressor) -> set[str]:
    """The names of the properties that a compressor declares, and so must have."""
    check_law(compressor.law)
    kinds = {Contraction: CONTRACTS.name, Unbiased: UNBIASED.name}
    return {kinds[type(compressor.law)]} if compressor.law is not None else set()


def tried() -> dict[str, np.ndarray]:
    """What a constant must hold for: arrays in which little and much is alike."""
    rng, n = np.random.default_rng(1), 61  # a prime, so that no block divides it
    equal = rng.choice([-1.0, 1.0], n)
    # Halfway between two steps of grids of 2, 4 and 8 bits, and where √n is worst.
    small = {
        "1/2": 1 / 2,
        "1/8": 1 / 8,
        "1/14": 1 / 14,
        "1/254": 1 / 254,
        "1/√n": n**-0.5,
    }
    return {
        "Gaussian": rng.normal(size=n),
        "heavy-tailed": rng.normal(size=n) ** 5,
        "equal": equal,
        "zero but one": np.where(np.arange(n) == 7, -3.0, 0.0),
        **{
            f"all but one {share}": np.where(np.arange(n) == 7, 1.0, size * equal)
            for share, size in small.items()
        },
    }


def losses(c: Packed) -> Iterator[tuple[str, float, float]]:
    """The mean of ‖C(x) − x‖²/‖x‖² over many keys, and four standard errors of it.

    One-sided, four are exceeded by chance once in 30 000 times; a rounding is added.
    """
    for name, x in tried().items():
        x = np.asarray(x, np.float32)
        decoded = np.asarray(c.draws(jnp.asarray(x)), np.float64)
        lost = np.square(decoded - x).sum(1) / np.square(x, dtype=np.float64).sum()
        yield name, lost.mean(), 4 * lost.std() / DRAWS**0.5 + 1e-6


@CONTRACTS.clause()
def it_loses_less_than_it_was_given(c: Packed):
    """E‖C(x) − x‖² ≤ (1 − δ)‖x‖², with the δ it declares or any above 0."""
    law, worst, n = c.compressor.law, 0.0, 61
    delta = law.delta(n) if isinstance(law, Contraction) else 0.0
    if isinstance(law, Contraction) and not 0 < delta <= 1:
        raise Broken(f"of {n} entries it declares δ = {delta:.3g}, not in (0, 1]")
    for name, lost, noise in losses(c):
        worst = max(worst, lost)
        declared = lost <= 1 - delta + noise if delta else lost < 1
        if not declared:
            least = f"at most {1 - delta:.3g}" if delta else "less than 1"
            raise Broken(f"of {name} entries it loses {lost:.3g}, not {least}")
    return f"the error is at most {worst:.3g} of the squared norm"


@UNBIASED.clause()
def it_is_right_on_average(c: Packed):
    """E C(x) = x over many keys."""
    x = np.asarray(tried()["Gaussian"], np.float32)
    decoded = np.asarray(c.draws(jnp.asarray(x)), np.float64)
    bias = decoded.mean(0) - x
    # Four standard errors of the whole array, and the rounding of what does not vary.
    allowed = 16 * decoded.var(0).sum() / DRAWS + np.square(1e-6 * x).sum()
    if not np.square(bias).sum() <= allowed:
        i = int(np.argmax(np.abs(bias)))
        raise Broken(f"{x[i]:.4g} is {decoded[:, i].mean():.4g} on average")


@UNBIASED.clause()
def its_variance_is_within_what_it_declares(c: Packed):
    """E‖C(x) − x‖² ≤ ω‖x‖²."""
    if not isinstance(c.compressor.law, Unbiased):
        raise NotApplicable("declares no variance (law=Unbiased(omega))")
    omega = c.compressor.law.omega(61)
    for name, lost, noise in losses(c):
        if not lost <= omega + noise:
            raise Broken(f"of {name} entries ω is {lost:.3g}, not at most {omega:.3g}")
    return f"ω is {omega:.3g} for 61 entries"


@UNBIASED.clause()
def noise_differs_between_workers(c: Packed):
    """What is random in what they send; the mean would keep what they share."""
    law = c.compressor.law
    if c.compressor.linear or not (isinstance(law, Unbiased) and law.omega(61) > 0):
        raise NotApplicable("declares no noise, or is linear and may well share it")
    x = jnp.asarray(tried()["Gaussian"], jnp.float32)
    one, other = (host(c.payload(x, c.keys(worker=w))) for w in range(2))
    if difference({"payload": one}, {"payload": other}) is None:
        raise Broken("two workers send the same of one array: draw from keys.private")


@ALARM.clause(value=[np.nan, np.inf], size=[33, 4096])
def what_is_not_finite_is_not_hidden(c: Packed, value: float, size: int):
    """An array that holds nothing else, small or large."""
    if np.isfinite(wide(c.back(jnp.full(size, value), c.keys()))).all():
        raise Broken(f"an array of {value} is decoded as finite numbers")


@ALARM.clause(value=[np.nan, np.inf], size=[33, 4096])
def one_entry_that_is_not_finite_is_seen(c: Packed, value: float, size: int):
    """One that is sent of usual numbers; what is left out stays in memory."""
    x = normal(size)
    for step in range(3):
        sent = np.flatnonzero(wide(c.once(x, step)))
        where = sent[len(sent) // 2] if len(sent) else size // 2
        if np.isfinite(wide(c.once(x.at[where].set(value), step))).all():
            raise Broken(f"{value} as one of {size} entries is decoded as finite")
