"""NoPE: no positional information at all."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from bampath.positions.slots import Geometry, Part, SlotName, Slots, Tokens


@dataclass(frozen=True)
class NoPE(Part):
    """Keys reach the query unchanged, Φ = I, and every visible key is equally likely beforehand.

        logit_ij = s · ⟨q_i, k_j⟩

    Under a causal mask this is a uniform prior over 0..i (BAM, arXiv 2505.22842, Lemma 1). A scheme that fills neither
    the input, the transport nor the prior is written with `nope`, as in `nope+ssmax`.
    """

    NAME: ClassVar[str] = "nope"
    SLOT: ClassVar[SlotName] = "transport"

    def check(self, others: tuple[Part, ...]) -> None:
        speaking = [part.spec for part in others if part.SLOT in ("input", "prior")]
        if speaking:
            raise ValueError(f"nope means no positional information, but {', '.join(speaking)} gives some: drop one")

    def fill(
        self, params: dict[str, jax.Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        return slots, carry
