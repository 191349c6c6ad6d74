"""Laws of compressors and triggers: right parts pass, each typical bug breaks one."""

from __future__ import annotations

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lowcomm as lc
from lowcomm import testing

QUIET: Any = {"show": lambda line: None}


def big(tree):
    return sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(tree)) > 9.0


def compressor(encode, decode=lambda payload, like, keys, agreed=None: payload, **more):
    return lc.Compressor(lambda x, keys, agreed=None: encode(x, keys), decode, **more)


def private_mask(payload, like, keys, agreed=None):
    return payload * jax.random.bernoulli(keys.private, 0.5, like.shape)


def scaled(x, keys):
    scale = jnp.max(jnp.abs(x))
    return (x / scale).astype(x.dtype), scale


unscaled = lambda payload, like, keys, agreed=None: payload[0] * payload[1]
whole = lambda x, keys: x
signs = lambda payload, like, keys, agreed=None: jnp.sign(payload)
entries = lambda x, keys: (x[x != 0], jnp.flatnonzero(x != 0))
refill = lambda payload, like, keys, agreed=None: (
    jnp.zeros(like.size, like.dtype).at[payload[1]].set(payload[0]).reshape(like.shape)
)
widened = lambda payload, like, keys, agreed=None: payload.astype(jnp.float32)
tossed = lambda x, keys: x * random.random()
first = lambda x, keys: x[:1]
FAULTY_COMPRESSORS = [
    (compressor(whole, private_mask), "shared key"),
    (compressor(scaled, unscaled), "zero"),
    (compressor(whole, signs, linear=True), "linear"),
    (compressor(entries, refill), "fixed payload"),
    (compressor(whole, widened), "shapes"),
    (compressor(first), "shapes"),
    (compressor(tossed), "repeats"),
]


@pytest.mark.parametrize(("faulty", "law"), FAULTY_COMPRESSORS)
def test_a_faulty_compressor_breaks_its_law(faulty, law):
    assert testing.check(faulty, only=(law,), **QUIET).failed == (law,)


@pytest.mark.parametrize(
    ("right", "holding"),
    [
        (lc.top_k(0.3), {"contracts"}),
        (lc.random_k(0.3), {"contracts", "linear"}),
        (lc.random_k(0.3, unbiased=True), {"unbiased", "linear"}),
        (lc.quantize(), {"contracts", "unbiased"}),
        (lc.sign(), {"contracts"}),
        (lc.one_bit(), {"contracts"}),
        (lc.ternary(), {"unbiased", "linear"}),
    ],
)
def test_of_a_compressor_it_says_which_feedback_it_is_fit_for(right, holding):
    laws = ("contracts", "unbiased", "linear")
    report = testing.check(right, only=laws, **QUIET)
    assert report.failed == ()
    assert {v.law for v in report.verdicts if v.status == "holds"} == holding


NEAREST = {bits: lc.quantize(bits, stochastic=False) for bits in (2, 4, 8)}
TOO_MUCH = [
    (lc.top_k(0.3), lc.Contraction(lambda n: 0.5), "contracts", "equal entries"),
    (lc.top_k(0.3), lc.Contraction(lambda n: 0.0), "contracts", r"not in \(0, 1\]"),
    (lc.top_k(0.3), lc.Unbiased(lambda n: 9.0), "unbiased", "on average"),
    (lc.quantize(2), lc.Contraction(lambda n: 0.5), "contracts", "loses"),
    (lc.quantize(2), lc.Unbiased(lambda n: 1.0), "unbiased", "at most 1"),
    (lc.natural(), lc.Unbiased(lambda n: 0.08), "unbiased", "not at most 0.08"),
    # Little more than half of what is lost of small entries halfway between two steps.
    (lc.quantize(4), lc.Unbiased(lambda n: 0.12), "unbiased", "not at most 0.12"),
    (NEAREST[2], lc.Contraction(lambda n: 0.2), "contracts", "not at most 0.8"),
    (NEAREST[4], lc.Contraction(lambda n: 0.88), "contracts", "not at most 0.12"),
    (NEAREST[8], lc.Contraction(lambda n: 0.9995), "contracts", "not at most 0.0005"),
]


@pytest.mark.parametrize(("right", "law", "broken", "said"), TOO_MUCH)
def test_who_declares_too_much_is_found_out(right, law, broken, said):
    report = testing.check(right._replace(law=law), only=(broken,), **QUIET)
    assert report.failed == (broken,)
    assert re.search(said, report.verdicts[0].why), report.verdicts[0].why


def blind(x, keys):
    """Eight bits of the largest, which on a CPU loses one NaN among 4096."""
    scale = jnp.max(jnp.abs(x))
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1) * 127)
    return jnp.nan_to_num(codes).astype(jnp.int8), scale


eighths = lambda payload, like, keys, agreed=None: (
    payload[0] * (payload[1] / 127)
).astype(like.dtype)


def test_one_nan_that_is_lost_among_many_numbers_is_found_out():
    report = testing.check(
        compressor(blind, eighths), claims="shows NaN", only="shows NaN", **QUIET
    )
    assert report.failed == ("shows NaN",)
    assert "nan as one of 4096" in report.verdicts[0].why


@pytest.mark.parametrize(
    "right", [lc.top_k(0.01), lc.random_k(0.01), lc.dct_top_k(2, chunk=8), lc.sign()]
)
def test_what_is_left_out_hides_nothing(right):
    report = testing.check(right, only="shows NaN", **QUIET)
    assert [v.status for v in report.verdicts] == ["holds"], str(report)


def test_workers_that_draw_the_same_noise_are_found_out():
    inner = lc.quantize()
    common = inner._replace(
        encode=lambda x, keys, agreed=None: inner.encode(
            x, keys._replace(private=keys.shared)
        )
    )
    report = testing.check(common, only="unbiased", **QUIET)
    assert report.failed == ("unbiased",)
    assert "keys.private" in report.verdicts[0].why


def test_who_declares_nothing_may_lack_what_it_lacks():
    silent = lc.sign()._replace(law=None)
    report = testing.check(silent, only=("contracts", "unbiased"), **QUIET)
    assert [v.status for v in report.verdicts] == ["holds", "lacks it"]


def test_a_statistic_is_agreed_on_before_anything_is_encoded():
    ternary = lc.Compressor(
        lambda x, keys, agreed=None: jnp.round(x / jnp.where(agreed > 0, agreed, 1)),
        lambda payload, like, keys, agreed=None: (payload * agreed).astype(like.dtype),
        statistic=lambda x: jnp.max(jnp.abs(x), initial=0),
    )
    assert testing.check(ternary, **QUIET).failed == ()


def trigger(fire, init=lambda params: (), **more):
    return lc.Trigger(init, lambda state, **asked: fire(state, **asked), **more)


zero = lambda params: jnp.zeros((), jnp.int32)
selfish = lambda state, *, grads, **_: (big(grads), state)
calls: list[int] = []


def every_third_call(state, **asked):
    calls.append(1)
    return len(calls) % 3 == 0, state


def far(drift):
    return lax.pmax(big(drift).astype(jnp.int32), lc.AXIS) > 0


later = lambda state, *, step, **_: ((step + isinstance(step, int)) % 2 == 0, state)
widens = lambda state, *, step, **_: (step % 2 == 0, state + jnp.float32(1))
often = lambda state, *, step, **_: (step % 2 == 1, state)
asks = lambda state, *, grads, **_: (far(grads), state)
one_by_one = lambda state, *, grads, **_: (grads["b"] > 0, state)
FAULTY_TRIGGERS = [
    (trigger(selfish), "same everywhere"),
    (trigger(one_by_one), "same everywhere"),
    (trigger(every_third_call), "repeats"),
    (trigger(later), "a known step"),
    (trigger(widens, zero), "types constant"),
    (trigger(often, gap=3), "clock"),
    (trigger(asks, gap=1), "clock"),
    (trigger(selfish), "runs"),
]


@pytest.mark.parametrize(("faulty", "law"), FAULTY_TRIGGERS)
def test_a_faulty_trigger_breaks_its_law(faulty, law):
    assert testing.check(faulty, only=(law,), **QUIET).failed == (law,)


@pytest.mark.parametrize(
    "right",
    [lc.every(4, warmup=2), lc.change_exceeds(0.5, window=4), lc.drift_exceeds(9.0)],
)
def test_a_right_trigger_passes(right):
    report = testing.check(right, **QUIET)
    assert report.failed == (), str(report)
    assert "lacks it" not in [v.status for v in report.verdicts]
