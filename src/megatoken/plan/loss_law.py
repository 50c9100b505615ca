"""The loss by size and length of training: L = E + A / N^a + B / D^b (Hoffmann et al. 2022).

N is the number of parameters, D that of training tokens, and C = 6 N D the FLOPs.
"""

import math
from dataclasses import dataclass
from typing import Any

Terms = tuple[str, ...]  # the variables of a law: N and D, or only one of N, D and C


@dataclass(frozen=True)
class Law:
    """L = floor + sum of factor / variable^exponent over the terms, in nats.

    Its methods take numbers or arrays.
    """

    terms: Terms
    floor: float
    factors: tuple[float, ...]
    exponents: tuple[float, ...]

    def loss(self, parameters: Any, tokens: Any) -> Any:
        values = list_variables(self.terms, parameters, tokens)
        parts = (f / x**e for f, x, e in zip(self.factors, values, self.exponents, strict=True))
        return self.floor + sum(parts)

    def best_split(self, flops: Any) -> tuple[Any, Any]:
        """Return the compute-optimal N and D for 6 N D = flops (Hoffmann et al. 2022, eq. 4).

        The law must have the terms N and D. Both are NaN if a factor is 0.
        """
        (a_factor, b_factor), (a, b) = self.factors, self.exponents
        ratio = (
            (a * a_factor / (b * b_factor)) ** (1 / (a + b)) if a_factor and b_factor else math.nan
        )
        parameters = ratio * (flops / 6) ** (b / (a + b))
        return parameters, flops / 6 / parameters


def list_variables(terms: Terms, parameters: Any, tokens: Any) -> list[Any]:
    """Return the values of the terms' variables."""
    variables = {"N": parameters, "D": tokens, "C": 6.0 * parameters * tokens}
    return [variables[name] for name in terms]
