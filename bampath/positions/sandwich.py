"""Sandwich: the inner product of sinusoidal position vectors as a fixed prior."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from bampath.positions.options import option
from bampath.positions.phases import angle
from bampath.positions.priors import as_float
from bampath.positions.slots import Part

Array = jax.Array


@dataclass(frozen=True)
class Sandwich(Part):
    """log π_h(d) = H / (8h) · Σ_{n=1..m/2} (cos(d / 10000^(2n/m)) - 1), h = 1..H (arXiv 2212.10356).

    The inner product of two sinusoidal vectors of size m = dim, divided by the head's compression ratio 8h/H; the
    constant that makes it 0 at d = 0 is ours (softmax ignores it). No parameters. It falls with distance on average,
    not at each step. Costs m/2 cosines per score where other priors cost one or two functions.
    """

    NAME: ClassVar[str] = "sandwich"
    MAIN: ClassVar[str | None] = "dim"

    dim: int = option(128, doc="size m of the sinusoidal vectors", examples=("16",))

    def validate(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"sandwich: dim is {self.dim} but must be an even number, at least 2")

    def prior_params(self, params: Any, heads: int | None) -> Any:
        if heads is None:
            raise ValueError("sandwich has no parameters that say how many heads there are: pass heads=")
        return {"gain": heads / (8 * jnp.arange(1, heads + 1, dtype=jnp.float32))}

    def log_prior(self, params: Any, d: Array) -> Array:
        total = jnp.zeros_like(as_float(d, params["gain"]))
        for n in range(1, self.dim // 2 + 1):
            total = total + (jnp.cos(angle(d, 10000.0 ** (-2 * n / self.dim))) - 1)
        return params["gain"] * total
