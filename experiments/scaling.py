r"""Power laws of the loss in the size of a model, and what they foretell.

    L(N) = L∞ + (N_c / N)^α        or, with L∞ = 0, a straight line in logarithms

Fitted by least squares in ln L, so that large losses of small models do not outweigh
all others; sizes count parameters without embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.special import stdtrit

from .trials import Interval


class PowerLaw(NamedTuple):
    """A fitted law, and what the residuals say of its certainty."""

    exponent: float  # α
    size: float  # N_c, where the loss is 1 above its floor
    floor: float  # L∞, what no size undercuts
    deviation: float  # of a residual of ln L
    freedom: int  # number of points minus that of parameters
    spread: np.ndarray  # covariance of (α, ln N_c, ln L∞) over the squared deviation

    def __call__(self, size: float) -> float:
        """The loss at this size."""
        return float(self.floor + (self.size / size) ** self.exponent)

    @property
    def exponent_error(self) -> float:
        """The standard error of the exponent."""
        return self.deviation * float(np.sqrt(self.spread[0, 0]))


def fit(
    sizes: Sequence[float], losses: Sequence[float], *, floor: bool = False
) -> PowerLaw:
    """The law of these points, several of which may have one size.

    With ``floor`` the loss at infinite size is fitted too; a decade of sizes rarely
    tells it from 0, and the exponent then is that of the decade.

    Raises:
        ValueError: losses or sizes that are not positive, or fewer sizes than
            parameters.

    Example:
        >>> law = fit([1e3, 1e4, 1e5], [4.0, 2.0, 1.0])
        >>> print(f"{law.exponent:.4f} {law.size:.0f} {law(1e6):.2f}")
        0.3010 100000 0.50
    """
    n, y = np.asarray(sizes, float), np.asarray(losses, float)
    parameters = 3 if floor else 2
    if not (np.isfinite(y).all() and (y > 0).all() and (n > 0).all()):
        raise ValueError(f"sizes and losses must be positive, not {losses}.")
    if len(set(n)) < parameters:
        raise ValueError(
            f"{len(set(n))} sizes cannot tell {parameters} parameters: give more sizes."
        )
    slope, height = np.polyfit(np.log(n), np.log(y), 1)
    found = np.array([-slope, -height / slope])
    if floor:
        # From several floors, since one that is too high is a valley of its own.
        starts = [_start(n, y, share) for share in (0.01, 0.3, 0.6, 0.9)]
        ends = [_descend(n, y, start) for start in starts]
        found = min(ends, key=lambda theta: float(np.sum(_residuals(theta, n, y) ** 2)))
    freedom = len(y) - parameters
    squares = float(np.sum(_residuals(found, n, y) ** 2))
    slopes = _slopes(found, n)
    return PowerLaw(
        float(found[0]),
        float(np.exp(found[1])),
        float(np.exp(found[2])) if floor else 0.0,
        np.sqrt(squares / freedom) if freedom else np.nan,
        freedom,
        np.linalg.pinv(slopes.T @ slopes),
    )


def predict(law: PowerLaw, size: float, *, runs: int = 1) -> tuple[float, float, float]:
    """The loss of a run of that size: low, middle and high, at 95 %.

    Of the mean of ``runs`` runs, if there are several. The interval knows the scatter
    of the points about the law, not whether the law goes on.
    """
    theta = np.array([law.exponent, np.log(law.size)])
    if law.floor:
        theta = np.append(theta, np.log(law.floor))
    slopes = _slopes(theta, np.array([size], float))[0]
    width = law.deviation * np.sqrt(1 / runs + slopes @ law.spread @ slopes)
    half = stdtrit(law.freedom, 0.975) * width if law.freedom else np.nan
    middle = law(size)
    return middle * np.exp(-half), middle, middle * np.exp(half)


def local_exponent(sizes: tuple[float, float], losses: tuple[float, float]) -> float:
    """The exponent of the law through two points.

    Example:
        >>> f"{local_exponent((4e9, 10e9), (2.224, 2.090)):.4f}"
        '0.0678'
    """
    (n, m), (a, b) = sizes, losses
    return float(np.log(a / b) / np.log(m / n))


def exponent_gap(one: PowerLaw, other: PowerLaw) -> Interval:
    """The difference of two exponents and two standard errors of it."""
    error = np.hypot(one.exponent_error, other.exponent_error)
    return Interval(one.exponent - other.exponent, 2 * float(error))


def _parts(theta: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``ln L`` and the share of it that falls with size."""
    power = theta[0] * (theta[1] - np.log(n))
    if len(theta) == 2:
        return power, np.ones_like(n)
    whole = np.logaddexp(theta[2], power)
    return whole, np.exp(power - whole)


def _residuals(theta: np.ndarray, n: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _parts(theta, n)[0] - np.log(y)


def _slopes(theta: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Of ``ln L`` by the parameters, ``[points, parameters]``."""
    share = _parts(theta, n)[1]
    columns = [share * (theta[1] - np.log(n)), share * theta[0]]
    return np.stack(columns + [1 - share] * (len(theta) - 2), -1)


def _start(n: np.ndarray, y: np.ndarray, share: float) -> np.ndarray:
    floor = share * y.min()
    slope, height = np.polyfit(np.log(n), np.log(y - floor), 1)
    return np.array([-slope, -height / slope, np.log(floor)])


def _descend(n: np.ndarray, y: np.ndarray, start: np.ndarray) -> np.ndarray:
    tight = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 2000}
    slopes = lambda theta, n, y: _slopes(theta, n)
    how = {"jac": slopes, "args": (n, y), "method": "lm", **tight}
    return least_squares(_residuals, start, **how).x
