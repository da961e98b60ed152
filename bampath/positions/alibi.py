"""ALiBi: a Laplace prior whose width is fixed per head."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from bampath.positions.options import option
from bampath.positions.priors import as_float
from bampath.positions.slots import Geometry, Param, Part

Array = jax.Array


def alibi_slopes(heads: int) -> list[float]:
    """The canonical slopes: 2^(-8h/H), h = 1..H, if H is a power of two; otherwise those of the power of two below,
    then every second slope of the power of two above (`get_slopes` in the authors' code)."""
    if heads < 1:
        raise ValueError(f"heads={heads} must be at least 1")
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


@dataclass(frozen=True)
class ALiBi(Part):
    """log π(d) = -m_h |d|, d = j - i, with canonical slopes m_h (arXiv 2108.12409, section 3).

    A Laplace density over distance; with the causal mask uniform × Laplace (BAM, arXiv 2505.22842, Lemma 2).
    Fixed slopes are no parameters. Trainable ones are kept as `log_slopes` [H], so that they stay positive.
    """

    NAME: ClassVar[str] = "alibi"

    trainable: bool = option(False, doc="learn the slopes (as logarithms), starting from the canonical ones")

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        if not self.trainable:
            return {}
        start = jnp.log(jnp.asarray(alibi_slopes(geometry.heads), jnp.float32))
        return {"log_slopes": Param((geometry.heads,), lambda key, shape, dtype: start, ("heads",), "prior")}

    def prior_params(self, params: Any, heads: int | None) -> Any:
        if self.trainable:
            return {"slope": jnp.exp(params["log_slopes"])}
        if heads is None:
            raise ValueError("alibi has no parameters that say how many heads there are: pass heads=")
        return {"slope": jnp.asarray(alibi_slopes(heads), jnp.float32)}

    def log_prior(self, params: Any, d: Array) -> Array:
        return -params["slope"] * jnp.abs(as_float(d, params["slope"]))
