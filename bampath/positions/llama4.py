"""Llama 4's temperature: queries grow slowly with their position."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from bampath.positions.options import option
from bampath.positions.sharpness import refuse_idle_inside, sharpen
from bampath.positions.slots import Geometry, Part, SlotName, Slots, Tokens

Array = jax.Array


@dataclass(frozen=True)
class Llama4(Part):
    """r_i = 1 + scale · ln(floor((p_i + 1) / floor) + 1), p_i the query's position; nothing is learned.

    The temperature of Llama 4's NoPE layers (Meta's released code: scale 0.1, floor 8192), as in
    `3*rope,nope+llama4`. It scales content logits; inside=true scales the prior as well.
    """

    NAME: ClassVar[str] = "llama4"
    SLOT: ClassVar[SlotName] = "sharpness"

    scale: float = option(0.1, doc="growth per factor e of length", examples=("scale=0.5,floor=4",))
    floor: int = option(8192, doc="positions below this are left alone", examples=("floor=8",))
    inside: bool = option(False, doc="scale content and prior together, or content only")

    def validate(self) -> None:
        if self.floor < 1:
            raise ValueError(f"llama4: floor is {self.floor} but must be at least 1")
        if self.scale < 0:
            raise ValueError(f"llama4: scale is {self.scale} but must not be negative")

    def check(self, others: tuple[Part, ...]) -> None:
        refuse_idle_inside(self, others)

    def fill(
        self, params: dict[str, Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        steps = (jnp.maximum(tokens.positions, 0) + 1) // self.floor
        factor = 1 + self.scale * jnp.log(steps.astype(jnp.float32) + 1)
        return sharpen(slots, factor[:, :, None], geometry, self.inside), carry
