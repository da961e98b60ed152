"""Log-n scaling: logits grow with log n / log(training length)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from bampath.positions.options import option
from bampath.positions.sharpness import refuse_idle_inside, sharpen
from bampath.positions.slots import Geometry, Part, SlotName, Slots, Tokens

Array = jax.Array


@dataclass(frozen=True)
class LogN(Part):
    """r_i = ln n_i / ln L, n_i the number of keys that query i sees, L the training length; nothing is learned.

    Keeps attention as focused as it was at length L (log n: Chiang and Cholak, arXiv 2202.12172; normalised by the
    training length: J. Su, kexue.fm/archives/8823). clip holds r at 1 up to L, so that nothing changes within the
    training length, as in Qwen's code. It scales content logits; inside=true scales the prior as well.
    """

    NAME: ClassVar[str] = "logn"
    SLOT: ClassVar[SlotName] = "sharpness"
    MAIN: ClassVar[str | None] = "length"

    length: int | None = option(None, doc="L; none: the training length", examples=("64",))
    clip: bool = option(False, doc="never below 1")
    inside: bool = option(False, doc="scale content and prior together, or content only")

    def validate(self) -> None:
        if self.length is not None and self.length < 2:
            raise ValueError(f"logn: length is {self.length} but must be at least 2")

    def check(self, others: tuple[Part, ...]) -> None:
        refuse_idle_inside(self, others)

    def fill(
        self, params: dict[str, Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        length = self.length or geometry.train_length
        if length < 2:
            raise ValueError(f"logn needs a training length of at least 2, got {length}")
        log_n = jnp.log(jnp.maximum(tokens.counts, 1).astype(jnp.float32))[:, :, None]
        factor = log_n / math.log(length)
        return sharpen(slots, jnp.maximum(factor, 1) if self.clip else factor, geometry, self.inside), carry
