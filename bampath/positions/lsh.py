"""Positional LSH: random blocks of positions whose mean mask is ALiBi."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from bampath.positions.alibi import alibi_slopes
from bampath.positions.options import option
from bampath.positions.priors import as_float
from bampath.positions.slots import Geometry, Part, Slots, Tokens
from kernels.lsh.grids import sample_grids

Array = jax.Array


@dataclass(frozen=True)
class LSH(Part):
    """log π(i, j) = log (1/s Σ_m [i and j share a block of grid m]): an estimate of −|d|/sigma_h from s random grids.

    Positional LSH (arXiv 2605.09472). Each head h has sigma_h = 1 / (ALiBi's slope), or one `sigma` for all. Training
    draws grids anew in every step (`redraw`), independently per layer; evaluation and decoding use the frozen draw of
    `seed`, or the exact prior that the masks have as their expectation. No parameters, no gradient to sigma. Attention
    costs T · (longest block) pairs, not T²; decoding remembers no more keys than that.
    """

    NAME: ClassVar[str] = "lsh"
    MAIN: ClassVar[str | None] = "samples"
    DRAWS: ClassVar[bool] = True

    samples: int = option(10, doc="s, grids per head", examples=("3",))
    sigma: float | None = option(
        None, doc="bandwidth in tokens, the same for all heads; none: 1/slope of ALiBi per head", examples=("sigma=6",)
    )
    law: Literal["integer", "continuous", "stratified", "antithetic", "fixed"] = option(
        "integer", doc="how widths and offsets are drawn; fixed is block-local attention, without chance"
    )
    combine: Literal["shared", "mean"] = option(
        "shared", doc="one normaliser for all samples, as in the theorems, or the mean of the samples' outputs"
    )
    redraw: Literal["step", "never"] = option("step", doc="when training draws new grids")
    across: Literal["head", "layer"] = option(
        "head", doc="what has random numbers of its own: each head, or each layer with its heads in step"
    )
    evaluate: Literal["frozen", "exact"] = option(
        "frozen", doc="outside training: the frozen draw, or ALiBi itself (combine=shared only)"
    )
    seed: int = option(0, doc="of the frozen draw", examples=("seed=3",))

    def validate(self) -> None:
        if self.samples < 1:
            raise ValueError(f"lsh: samples is {self.samples} but must be at least 1")
        if self.sigma is not None and self.sigma <= 0:
            raise ValueError(f"lsh: sigma is {self.sigma} but must be greater than 0")
        if self.law == "antithetic" and self.samples % 2:
            raise ValueError(f"lsh: law=antithetic draws pairs, samples is {self.samples} but must be even")
        if self.evaluate == "exact" and self.combine == "mean":
            raise ValueError("lsh: evaluate=exact is the limit of combine=shared; combine=mean does not tend to ALiBi")
        if self.law == "fixed" and self.evaluate == "exact":
            raise ValueError("lsh: evaluate=exact is no limit of law=fixed, whose blocks are not random")
        if self.law == "fixed" and (self.redraw, self.across, self.seed) != ("step", "head", 0):
            raise ValueError("lsh: redraw, across and seed have no effect with law=fixed")

    def check(self, others: tuple[Part, ...]) -> None:
        for other in others:
            if other.SLOT in ("prior", "sharpness", "visibility") or other.CARRIES_KEYS:
                raise ValueError(
                    f"lsh cannot stand beside {other.spec}: it takes no other prior, gate, sharpness, window or "
                    "PaTH; beside rope, sinusoidal or learned it can"
                )

    def sigmas(self, heads: int) -> list[float]:
        """sigma_h of every head, in tokens."""
        return [1 / slope for slope in alibi_slopes(heads)] if self.sigma is None else [self.sigma] * heads

    def prior_params(self, params: Any, heads: int | None) -> Any:
        if heads is None:
            raise ValueError("lsh has no parameters that say how many heads there are: pass heads=")
        return {"slope": 1 / jnp.asarray(self.sigmas(heads), jnp.float32)}

    def log_prior(self, params: Any, d: Array) -> Array:
        """The expectation of the masks, ALiBi: what the heads believe on average."""
        return -params["slope"] * jnp.abs(as_float(d, params["slope"]))

    def grids(self, key: Array, heads: int) -> tuple[Array, Array]:
        """A draw: widths and offsets [H, samples]."""
        sigma = jnp.asarray(self.sigmas(heads), jnp.float32)
        if self.across == "head":
            return sample_grids(key, sigma, self.samples, law=self.law)
        alone = lambda one: sample_grids(key, one[None], self.samples, law=self.law)
        widths, offsets = jax.vmap(alone)(sigma)
        return widths[:, 0], offsets[:, 0]

    def frozen(self, geometry: Geometry) -> tuple[Array, Array]:
        """The draw of `seed` for a layer."""
        return self.grids(jax.random.fold_in(jax.random.key(self.seed), geometry.layer), geometry.heads)

    def reach(self, geometry: Geometry) -> int | None:
        """How many keys the frozen draw looks at, the query's own included; None for evaluate=exact: all of them."""
        if self.evaluate == "exact":
            return None
        with jax.ensure_compile_time_eval():
            return max(1, int(jnp.ceil(self.frozen(geometry)[0].max())))

    def module(self, geometry: Geometry, name: str | None = None) -> nn.Module:
        return LSHModule(self, geometry, name=name)


class LSHModule(nn.Module):
    """Draws the grids: with the rng "sample" in training, frozen without it."""

    part: LSH
    geometry: Geometry

    @nn.compact
    def __call__(self, slots: Slots, tokens: Tokens, carry: Any = None) -> tuple[Slots, Any]:
        training = self.has_rng("sample")
        if not training and self.part.evaluate == "exact":
            return self.part.fill({}, self.geometry, slots, tokens, carry)
        if training and self.part.redraw == "step" and self.part.law != "fixed":
            grids = self.part.grids(self.make_rng("sample"), self.geometry.heads)
        else:
            grids = self.part.frozen(self.geometry)
        return replace(slots, grids=grids, combine=self.part.combine), carry
