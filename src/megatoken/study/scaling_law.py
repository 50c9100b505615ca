"""Fit the final loss of runs: L = E + A / N^a + B / D^b (Hoffmann et al. 2022, eq. 2).

N is the number of weights in matmuls, D the number of training tokens, and C = 6 N D the FLOPs
without attention. If only N or only D differs between runs, or both grow together (C), the law has
one term: L = E + A / x^a.

For fixed exponents, the law is linear in E, A and B. The fit therefore searches only a grid of
exponents, refined step by step. At each grid point, it finds the nonnegative E, A and B with the
least sum of squared relative errors (variable projection, Golub & Pereyra 1973).
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from megatoken.base.errors import DataError
from megatoken.plan.loss_law import Law, Terms, list_variables

EXPONENTS = (0.02, 1.5)  # search range; published ones are 0.05 to 0.5
GRID = 13  # exponents per refinement
REFINEMENTS = 6  # each a third as wide
RESAMPLES = 200
INTERVAL = (0.1, 0.9)
FEWEST_VALUES = 3  # how many different values of N or D a term needs
IN_STEP = 0.98  # correlation of log N and log D above which only a law of C can be fitted
Array = np.ndarray


def count_unknowns(terms: Terms) -> int:
    """Return the number of coefficients to fit: E, and a factor and an exponent per term."""
    return 1 + 2 * len(terms)


def choose_terms(parameters: Array, tokens: Array) -> Terms:
    """Return the terms that can be fitted to these runs.

    Raises DataError if there are too few runs or too few different values of N and D.
    """
    logs = {"N": np.log(parameters), "D": np.log(tokens)}
    varied = [name for name, x in logs.items() if len(np.unique(x.round(6))) >= FEWEST_VALUES]
    if len(varied) == 2 and abs(np.corrcoef(logs["N"], logs["D"])[0, 1]) > IN_STEP:
        varied = ["C"]
    unknowns = count_unknowns(tuple(varied))
    if not varied or len(parameters) <= unknowns:
        what = (
            f"{len(parameters)} runs do not determine a law in {' and '.join(varied) or 'N or D'}"
        )
        fix = f"give more than {unknowns} runs, of {FEWEST_VALUES} sizes or lengths"
        raise DataError(what, fix=fix)
    return tuple(varied)


def fit_law(terms: Terms, parameters: Array, tokens: Array, losses: Array) -> Law:
    """Fit a law by least squares of relative errors. All arrays have one value per run."""
    values = list_variables(terms, parameters, tokens)
    scales = [np.exp(np.log(x).mean()) for x in values]  # for well-conditioned factors
    ratios = [np.log(x / scale) for x, scale in zip(values, scales, strict=True)]
    centers = [np.sqrt(EXPONENTS[0] * EXPONENTS[1])] * len(values)
    width = np.log(EXPONENTS[1] / EXPONENTS[0]) / 2
    for _ in range(REFINEMENTS):
        axes = [np.clip(c * np.exp(np.linspace(-width, width, GRID)), *EXPONENTS) for c in centers]
        grid = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
        powers = np.exp(-grid[:, :, None] * np.stack(ratios)[None])  # (points, terms, runs)
        columns = np.concatenate([np.ones_like(powers[:, :1]), powers], axis=1) / losses
        coefficients, errors = _solve_not_negative(columns)
        best = int(errors.argmin())
        centers = list(grid[best])
        width /= 3
    floor, *factors = coefficients[best]
    exponents = tuple(float(e) for e in centers)
    unscaled = (float(f * scale**e) for f, scale, e in zip(factors, scales, exponents, strict=True))
    return Law(terms, float(floor), tuple(unscaled), exponents)


def _solve_not_negative(columns: Array) -> tuple[Array, Array]:
    """Find nonnegative coefficients for which the weighted sum of the columns is closest to 1.

    columns: (points, k, runs); each point is solved separately. Return the coefficients (points, k)
    and the sums of squared errors (points,).
    """
    points, k, _ = columns.shape
    best = np.zeros((points, k))
    least = np.full(points, np.inf)
    for size in range(1, k + 1):
        for chosen in combinations(range(k), size):
            part = columns[:, list(chosen)]
            gram = part @ part.transpose(0, 2, 1) + 1e-12 * np.eye(size)
            solved = np.linalg.solve(gram, part.sum(axis=2, keepdims=True))[..., 0]
            errors = ((np.einsum("pk,pkr->pr", solved, part) - 1) ** 2).sum(axis=1)
            better = (solved >= 0).all(axis=1) & (errors < least)
            least = np.where(better, errors, least)
            best[better] = 0
            best[np.ix_(better, chosen)] = solved[better]
    return best, least


def resample(law: Law, parameters: Array, tokens: Array, losses: Array) -> list[Law]:
    """Fit RESAMPLES laws to noisy copies of the losses that `law` predicts.

    The relative noise is normal, with the standard deviation of the law's relative errors.
    """
    fitted: Array = law.loss(parameters, tokens)
    freedom = max(len(losses) - count_unknowns(law.terms), 1)
    noise = np.sqrt(((losses / fitted - 1) ** 2).sum() / freedom)
    draws = np.random.default_rng(0).normal(0.0, noise, (RESAMPLES, len(losses)))
    return [fit_law(law.terms, parameters, tokens, fitted * (1 + draw)) for draw in draws]


def interval(values: Sequence[float] | Array) -> tuple[float, float]:
    """Return the ends of the central 80% of resampled values."""
    low, high = np.nanquantile(np.asarray(values, dtype=float), INTERVAL)
    return float(low), float(high)
