"""``check``: which laws hold of a method, a compressor or a trigger."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..compressors import Compressor
from ..leaves import PyTree
from ..spmd import AXIS, Axis, NotUniform
from ..triggers import Trigger
from . import compressors, programs, sizes, triggers, values
from .equality import NotApplicable
from .laws import Law, by_name
from .subject import LOOK_AHEAD, Subject, heavy_ball

METHOD_LAWS = by_name(
    programs.RUNS,
    programs.ONE_PROGRAM,
    programs.TYPES,
    programs.RESUME,
    values.STILL,
    programs.BACKENDS_AGREE,
    programs.SCAN,
    programs.DONATION,
    values.HALF,
    values.ANY_NUMBER,
    values.COPIES,
    values.INNER_SEES,
    values.COMPOSES,
    values.LEARNS,
    programs.FRESH,
    values.ALONE,
    values.PERMUTES,
    values.AGREE,
    sizes.RESIZES,
)
COMPRESSOR_LAWS = by_name(
    compressors.SHAPES,
    compressors.ZERO,
    compressors.FIXED,
    compressors.SHARED,
    compressors.REPEATS,
    compressors.LINEAR,
    compressors.BACKENDS_AGREE,
    compressors.CONTRACTS,
    compressors.UNBIASED,
    compressors.ALARM,
)
TRIGGER_LAWS = by_name(
    triggers.IN_A_VERB,
    triggers.SAME,
    triggers.BACKENDS_AGREE,
    triggers.TYPES,
    triggers.REPEATS,
    triggers.KNOWN,
    triggers.CLOCK,
    triggers.ALARM,
)


class Verdict(NamedTuple):
    """What was found of one law."""

    law: str
    status: str  # holds, fails, lacks it, exempt or not applicable
    why: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.status:14}  {self.law:33}  {self.why}".rstrip()


class Report(NamedTuple):
    """What was found of all laws that were asked."""

    verdicts: tuple[Verdict, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the laws that do not hold."""
        return tuple(v.law for v in self.verdicts if v.status == "fails")

    def __repr__(self) -> str:
        """One line a law."""
        return "\n".join(map(str, self.verdicts))

    def __str__(self) -> str:
        """One line a law."""
        return repr(self)


def check(
    method: Any,
    *,
    workers: int | None = None,
    steps: int | None = None,
    syncs: int | None = None,
    exact: int | None = None,
    smooth: bool | None = None,
    bitwise: bool = False,
    claims: Collection[str] = (),
    exempt: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
    axis: Axis = AXIS,
    extra_args: Callable[[PyTree], dict] | None = None,
    show: Callable[[str], Any] = print,
) -> Report:
    """Run the laws on ``method`` and show, one line each, which of them hold.

    A law that fails is a line of the report, not an exception: a test of your own is
    ``assert not check(method).failed``. The laws are listed in ``lowcomm.testing``.
    They need as many devices as workers; on the CPU, call
    ``jax.config.update("jax_num_cpu_devices", 8)`` before JAX starts.

    Only ``method`` must be given. What else is declared is asked for as well.

    Args:
        method: a function of the inner optimizer (and of ``workers``, if it depends on
            how many there are) that returns a transformation, as
            ``lambda inner: optax.chain(my_exchange, inner)``; or a transformation, of
            which less can be asked; or a ``Compressor`` or a ``Trigger``.
        workers: how many, 4 unless given. Where the method does not take them as an
            argument, this says that it is made for so many.
        steps: how many. Unless given, until each kind of step was seen twice, at least
            8 and at most 64: give the method a short period.
        syncs: after every so many steps all workers hold the same model.
        exact: for so many steps, around SGD with rate and momentum 1/2, float32 is
            exact on small integers, and bits are asked for. Where nothing need be
            rounded, they are then asked for at every step.
        smooth: a rounding stays a rounding over steps, also on real data.
        bitwise: right after a sync all workers hold the same bits, not only the same
            values to two roundings.
        claims: properties that the method has, so that lacking one is a failure.
        exempt: law -> why it does not apply.
        only: the laws to ask, all unless given.
        axis: the name the method talks along, or several.
        extra_args: of ``local_step``, from a batch to what ``update`` is passed, such
            as ``lambda batch: {"weight": 1.0}``.
        show: what is done with each line.

    Raises:
        ValueError: something that is no method, compressor or trigger; a function that
            fails or returns no transformation; the name of no law.

    Example:
        >>> import optax
        >>> from lowcomm import local_sgd, testing
        >>> method = lambda inner: local_sgd(inner, period=4)
        >>> report = testing.check(method, only="scan")  # doctest: +ELLIPSIS
        holds           scan ... a scan of steps is the loop (bit for bit)
        >>> drifts = lambda inner: optax.chain(method(inner), optax.scale(1.01))
        >>> report = testing.check(drifts, steps=8, claims=["workers agree"],
        ...     only=["workers agree"], show=lambda line: None)
        >>> report.failed
        ('workers agree',)
    """
    declared = {
        "exact": exact,
        "smooth": smooth,
        "syncs": syncs,
        "extra_args": extra_args,
    }
    if isinstance(method, Compressor | Trigger):
        declared |= {"workers": workers, "steps": steps}
        told = [name for name, value in declared.items() if value is not None]
        if told:
            kind = type(method).__name__
            raise ValueError(f"{told[0]}= is asked of methods, not of a {kind}.")
    if isinstance(method, Compressor):
        subject, laws = compressors.Packed(method), COMPRESSOR_LAWS
    elif isinstance(method, Trigger):
        subject, laws = triggers.Asked(method, axis), TRIGGER_LAWS
    else:
        described = _described(method, workers)
        subject = Subject(**described, **declared, bitwise=bitwise, axis=axis)
        laws = METHOD_LAWS
    exempt = {} if exempt is None else exempt
    asked = _named("only", laws if only is None else only, laws)
    claimed = _named("claims", claims, laws)
    claimed |= {"workers agree"} if syncs is not None else set()
    if isinstance(method, Compressor):
        claimed |= compressors.promised(method)
    _named("exempt", exempt, laws)
    verdicts: list[Verdict] = []
    with warnings.catch_warnings():
        # What spread cannot check on a mesh, the laws find there.
        warnings.simplefilter("ignore")
        if isinstance(subject, Subject):
            _choose_steps(subject, steps)
        for law in laws.values():
            if law.name not in asked:
                continue
            if law.name in exempt:
                verdict = Verdict(law.name, "exempt", exempt[law.name])
            elif any(v.law == "runs" and v.status == "fails" for v in verdicts):
                verdict = Verdict(law.name, "not applicable", "it does not run")
            else:
                verdict = _judged(law, subject, law.name in claimed)
            show(str(verdict))
            verdicts.append(verdict)
    return Report(tuple(verdicts))


def _named(option: str, given: Collection[str], laws: Mapping[str, Law]) -> set[str]:
    chosen = {given} if isinstance(given, str) else set(given)
    for name in chosen - set(laws):
        raise ValueError(
            f"{option} takes names of laws, and {name!r} is none of {', '.join(laws)}."
        )
    return chosen


def _judged(law: Law, subject: Any, claimed: bool) -> Verdict:
    notes, skipped = [], []
    for clause in law.clauses:
        try:
            notes.append(clause.ask(subject, **clause.variant))
        except NotApplicable as reason:
            skipped.append(str(reason))
        except Exception as problem:  # whatever it is, the law does not hold
            # What keeps it from running at all has nothing to do with a question.
            why = f"{clause}: " * (law.name != "runs") + _first_line(problem)
            if law.optional and not claimed:
                return Verdict(law.name, "lacks it", f"and need not have it; {why}")
            if _counts_workers(problem) and not getattr(subject, "counted", True):
                why += " Take the number as a second argument, or pass workers="
            return Verdict(law.name, "fails", why)
    if not notes:
        return Verdict(law.name, "not applicable", skipped[0])
    missing = [f"in part: {reason}" for reason in skipped if "devices" in reason]
    said = "; ".join(dict.fromkeys(filter(None, notes + missing)))
    return Verdict(law.name, "holds", law.says + (f" ({said})" if said else ""))


def _counts_workers(problem: Exception) -> bool:
    """Whether a part complains that there are more or fewer workers than it is for."""
    mine = isinstance(problem, ValueError) and not isinstance(problem, NotUniform)
    return mine and "workers" in str(problem)


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    said = lines[0] if lines else "no message"
    if isinstance(problem, AssertionError | ValueError) and lines:
        return said
    return f"{type(problem).__name__}: {said}"


def _described(method: Any, workers: int | None) -> dict[str, Any]:
    """How to build the method, and what is fixed about it."""
    count = 4 if workers is None else workers
    if count < 2:
        raise ValueError(f"workers={count}: nobody to talk to; give 2 or more.")
    if hasattr(method, "init") and hasattr(method, "update"):
        fixed = "needs a function of the inner optimizer, not a transformation"
        build = lambda inner, workers, steps: method
        return {
            "build": build,
            "workers": count,
            "fixed_inner": fixed,
            "fixed_workers": fixed,
        }
    if not callable(method):
        raise ValueError(
            "check takes a function of the inner optimizer that returns a "
            "transformation, a transformation, a Compressor or a Trigger, not "
            f"{type(method).__name__}."
        )
    named, second = _takes_workers(method)
    if named:
        build = lambda inner, workers, steps: method(inner, workers=workers)
    elif second:
        build = lambda inner, workers, steps: method(inner, workers)
    else:
        build = lambda inner, workers, steps: method(inner)
    try:
        made = build(heavy_ball(0.0625), count, 8)
    except Exception as problem:
        raise ValueError(
            f"method({'inner, workers' if named or second else 'inner'}) raised "
            f"{type(problem).__name__}: {problem} Hand check a function of the inner "
            "optimizer alone, such as lambda inner: local_sgd(inner, period=4)."
        ) from problem
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise ValueError(
            f"method(inner) returned {type(made).__name__}, not a transformation, "
            "which has init and update."
        )
    counted = named or second
    fixed = "" if counted or workers is None else f"it is made for {count} workers"
    return {
        "build": build,
        "workers": count,
        "counted": counted,
        "fixed_workers": fixed,
    }


def _takes_workers(method: Callable) -> tuple[bool, bool]:
    """Whether a function takes ``workers=``, or else a second argument."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # of something built in
        return False, False
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    named = any(p.name == "workers" for p in parameters)
    return named, len(needed) == 2


def _choose_steps(s: Subject, steps: int | None) -> None:
    """So many steps that each kind of them was seen twice, if nothing else is said."""
    if steps is not None:
        if steps < 1:
            raise ValueError(f"steps={steps}: nothing can be asked of no steps.")
        s.steps = steps
        return
    s.steps = LOOK_AHEAD
    try:
        payload = s.fitted()[0].payload
    except Exception:  # "runs" will say why
        s.steps = 8
        return
    often = [np.flatnonzero(payload == kind)[:2].max() for kind in set(payload)]
    s.steps = max(8, 1 + int(max(often))) if payload.any() else 8
