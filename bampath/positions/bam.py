"""GGD-BAM: a generalised Gaussian prior over distance, learned per head."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from bampath.positions.alibi import alibi_slopes
from bampath.positions.options import option
from bampath.positions.priors import as_float
from bampath.positions.slots import Geometry, Param, Part

Array = jax.Array

EPS = 1e-5  # added to the distance inside the power, as in the authors' code
BETA_LIMIT = 6.0  # guard=clip
BIAS_FLOOR = -1e4  # guard=floor


def ggd_log_prior(
    d: Array,
    theta_alpha: Array,
    theta_beta: Array,
    mu: Array | None = None,
    *,
    scale_inside: bool = False,
    floor: float | None = None,
) -> Array:
    """-exp(theta_alpha) · (|d - mu| + 1e-5)^theta_beta elementwise, or with the scale inside the power.

    d: integer array j - i of any shape; the rest are scalars. Computed as -exp(theta_alpha + theta_beta ln x), so that
    either sign of theta_beta works and the gradient to theta_beta is b ln x. The gradient to mu is 0 at d = mu.
    """
    x = as_float(d, theta_alpha)
    if mu is None:
        distance = jnp.abs(x)
    else:  # |x - mu| with derivative 0 at 0, where that of jnp.abs is not
        distance = (x - mu) * jax.lax.stop_gradient(jnp.sign(x - mu))
    if scale_inside:
        log_cost = theta_beta * jnp.log(distance * jnp.exp(theta_alpha) + EPS)
    else:
        log_cost = theta_alpha + theta_beta * jnp.log(distance + EPS)
    if floor is not None:  # before the exponential: afterwards an overflow would give 0 · inf in the gradient
        log_cost = jnp.minimum(log_cost, math.log(-floor))
    return -jnp.exp(log_cost)


@dataclass(frozen=True)
class BAM(Part):
    """log π(d) = -exp(theta_alpha) · (|d - mu| + 1e-5)^theta_beta,  mu = 2 sinh(theta_mu),  d = j - i.

    The generalised Gaussian prior of the Bayesian Attention Mechanism (arXiv 2505.22842; the exact form is that of the
    authors' code at the time of the paper, github.com/ArthurSBianchessi/BAM). theta_beta is the exponent itself and
    unconstrained: 1 is Laplace (ALiBi), 2 Gauss, 0 uniform, negative favours far tokens. Softmax ignores the density's
    normalising constant, so it is left out; the paper's scale is exp(-theta_alpha / theta_beta). Parameters:
    theta_alpha and theta_beta (and theta_mu if trained), [H] per layer. A head with theta_beta < -7.7 overflows float32
    at d = mu unless a guard is on.
    """

    NAME: ClassVar[str] = "bam"
    BY_HAND: ClassVar[tuple[str, ...]] = ("theta_mu",)  # of a frozen shift that is not at 0

    init: Literal["uniform", "laplace", "slopes", "linear", "sampled"] = option(
        "uniform",
        doc="start of (theta_alpha, theta_beta): uniform (0, 0); laplace (1, 1); slopes (ln ALiBi slope, 1); "
        "linear (ln ALiBi slope, evenly from 0 to 1 over heads); sampled (exp(N(0,1)), N(0,1))",
    )
    mu: Literal["frozen", "trainable"] = option("frozen", doc="theta_mu: fixed at 0, or learned from 0")
    scope: Literal["layer", "global"] = option("layer", doc="one prior per layer, or one for all layers")
    scale: Literal["outside", "inside"] = option(
        "outside", doc="exp(theta_alpha) multiplies the power, or the distance inside it (first version of the code)"
    )
    guard: Literal["none", "clip", "floor"] = option(
        "none", doc="none as published; clip theta_beta to [-6, 6]; floor the log-prior at -10,000"
    )

    @property
    def shared(self) -> bool:
        return self.scope == "global"

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        names = ["theta_alpha", "theta_beta"] + (["theta_mu"] if self.mu == "trainable" else [])
        return {name: Param((geometry.heads,), _start(self.init, name), ("heads",), "prior") for name in names}

    def prior_params(self, params: Any, heads: int | None) -> Any:
        beta = params["theta_beta"]
        kernel = {
            "theta_alpha": params["theta_alpha"],
            "theta_beta": jnp.clip(beta, -BETA_LIMIT, BETA_LIMIT) if self.guard == "clip" else beta,
        }
        if "theta_mu" in params:
            theta_mu = params["theta_mu"]
            kernel["mu"] = 2 * jnp.sinh(theta_mu if self.mu == "trainable" else jax.lax.stop_gradient(theta_mu))
        return kernel

    def log_prior(self, params: Any, d: Array) -> Array:
        return ggd_log_prior(
            d,
            params["theta_alpha"],
            params["theta_beta"],
            params.get("mu"),
            scale_inside=self.scale == "inside",
            floor=BIAS_FLOOR if self.guard == "floor" else None,
        )


def _start(init: str, name: str) -> Any:
    """The initialiser of one theta."""

    def start(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        heads = shape[0]
        log_slopes = jnp.log(jnp.asarray(alibi_slopes(heads), dtype))
        if name == "theta_mu" or init == "uniform":
            return jnp.zeros(shape, dtype)
        if init == "laplace":
            return jnp.ones(shape, dtype)
        if init == "sampled":
            normal = jax.random.normal(key, shape, dtype)
            return jnp.exp(normal) if name == "theta_alpha" else normal
        if name == "theta_alpha":
            return log_slopes
        return jnp.linspace(0.0, 1.0, heads, dtype=dtype) if init == "linear" else jnp.ones(shape, dtype)

    return start
