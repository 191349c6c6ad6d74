"""What a law is: a sentence, and the clauses that ask whether it holds.

A clause is a function of the subject and of its variant (a backend, a type, a number
of workers). It raises ``Broken`` where the law does not hold, ``NotApplicable`` where
it cannot be asked, and may return a note on how it holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Ask = Callable[..., str | None]


class Clause(NamedTuple):
    """One question, in one of its variants."""

    ask: Ask
    variant: dict[str, Any]

    def __str__(self) -> str:
        """The question as a sentence, with its variant."""
        words = self.ask.__name__.replace("_", " ")
        kinds = [getattr(value, "__name__", str(value)) for value in self.options]
        return words + (f" ({', '.join(kinds)})" if kinds else "")

    @property
    def options(self) -> Iterator[Any]:
        """The values of the variant."""
        return iter(self.variant.values())


@dataclass(frozen=True)
class Law:
    """A law by its name, and its clauses.

    Attributes:
        name: as in ``exempt=``, ``claims=`` and ``only=``.
        says: the law in one sentence.
        optional: whether it is a property that some have and others, as rightly, lack.
        clauses: the questions, in the order they are asked.
    """

    name: str
    says: str
    optional: bool = False
    clauses: list[Clause] = field(default_factory=list)

    def clause(self, **variants: Iterable[Any]) -> Callable[[Ask], Ask]:
        """Add a question, once for each combination of these values."""

        def add(ask: Ask) -> Ask:
            for values in itertools.product(*variants.values()):
                variant = dict(zip(variants, values, strict=True))
                self.clauses.append(Clause(ask, variant))
            return ask

        return add


def by_name(*laws: Law) -> dict[str, Law]:
    """The laws of one kind of thing, in the order they are asked."""
    return {law.name: law for law in laws}
