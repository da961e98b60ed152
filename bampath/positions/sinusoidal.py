"""Sinusoidal position vectors, added to the token embeddings."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bampath.positions.options import option
from bampath.positions.phases import cos_sin
from bampath.positions.slots import Geometry, Part, SlotName

Array = jax.Array


@dataclass(frozen=True)
class Sinusoidal(Part):
    """e_p[2n] = sin(p ω_n), e_p[2n + 1] = cos(p ω_n), ω_n = base^(-2n/dim) (arXiv 1706.03762, section 3.5).

    Added once, before the first layer; no parameters. With odd_cosines the cosines use base^(-(2n + 1)/dim) instead, a
    quirk of the sinusoidal baseline in BAM's code. Phases are exact at any position.
    """

    NAME: ClassVar[str] = "sinusoidal"
    SLOT: ClassVar[SlotName] = "input"
    MAIN: ClassVar[str | None] = "base"

    base: float = option(10000.0, doc="ratio of the slowest wavelength to the fastest", examples=("1000",))
    odd_cosines: bool = option(False, doc="frequencies of the cosines as in BAM's code")

    def validate(self) -> None:
        if self.base <= 1:
            raise ValueError(f"sinusoidal: base is {self.base} but must be greater than 1")

    def embed(self, params: dict[str, Array], geometry: Geometry, positions: Array) -> Array:
        if geometry.dim % 2:
            raise ValueError(f"sinusoidal needs an even dim, got {geometry.dim}")
        even = np.arange(0, geometry.dim, 2, dtype=np.float64)
        sines = cos_sin(positions, self.base ** (-even / geometry.dim))[1]
        cosines = cos_sin(positions, self.base ** (-(even + self.odd_cosines) / geometry.dim))[0]
        return jnp.stack([sines, cosines], axis=-1).reshape(*positions.shape, geometry.dim)
