"""KERPLE: learned logarithmic or power-law decay with distance."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from bampath.positions.options import option
from bampath.positions.priors import as_float
from bampath.positions.slots import Geometry, Param, Part

Array = jax.Array

_SMALLEST = 0.01  # the authors' code keeps every coefficient at or above this


@dataclass(frozen=True)
class Kerple(Part):
    """log: log π(d) = -r1 ln(1 + r2 |d|);  power: log π(d) = -r1 |d|^p with 0 < p < 2 (arXiv 2205.09921).

    Conditionally positive definite kernels of the distance. Parameters [H] per layer: log_r1 and log_r2, or log_r1 and
    logit_p (p = 2 sigmoid), which keeps r1, r2, p in their domain where the authors' code clamps. Starts as theirs:
    log form r1 ~ U(0, 2), r2 ~ U(0, 1); power form r1 ~ U(0, 1), p ~ U(0, 2), each at least 0.01. The power form with
    p = theta_beta is GGD-BAM at mu = 0.
    """

    NAME: ClassVar[str] = "kerple"
    MAIN: ClassVar[str | None] = "form"

    form: Literal["log", "power"] = option("log", doc="logarithmic or power-law decay")

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        make = lambda transform, top: Param((geometry.heads,), _uniform(transform, top), ("heads",), "prior")
        if self.form == "log":
            return {"log_r1": make(jnp.log, 2.0), "log_r2": make(jnp.log, 1.0)}
        return {"log_r1": make(jnp.log, 1.0), "logit_p": make(lambda p: jnp.log(p / (2 - p)), 2.0)}

    def prior_params(self, params: Any, heads: int | None) -> Any:
        r1 = jnp.exp(params["log_r1"])
        if self.form == "log":
            return {"r1": r1, "r2": jnp.exp(params["log_r2"])}
        return {"r1": r1, "p": 2 * jax.nn.sigmoid(params["logit_p"])}

    def log_prior(self, params: Any, d: Array) -> Array:
        distance = jnp.abs(as_float(d, params["r1"]))
        if self.form == "log":
            return -params["r1"] * jnp.log1p(params["r2"] * distance)
        apart = distance > 0  # at 0 the value and every gradient are 0, but ln 0 is not finite
        power = jnp.exp(params["p"] * jnp.log(jnp.where(apart, distance, 1)))
        return -params["r1"] * jnp.where(apart, power, 0)


def _uniform(transform: Any, top: float) -> Any:
    def start(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return transform(jax.random.uniform(key, shape, dtype, _SMALLEST, top - _SMALLEST))

    return start
