"""A sliding window: which keys a query may see at all."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from bampath.positions.options import option
from bampath.positions.slots import Geometry, Part, SlotName, Slots, Tokens
from kernels.attention.checks import LARGEST_WINDOW


@dataclass(frozen=True)
class Window(Part):
    """Query i sees key j only if i - j < size (and j <= i): itself and the size - 1 tokens before it.

    Local attention as in Longformer (arXiv 2004.05150, section 3.1); `rope+window(N)` with N the training length is the
    local-RoPE baseline of BAM's code.
    """

    NAME: ClassVar[str] = "window"
    SLOT: ClassVar[SlotName] = "visibility"
    MAIN: ClassVar[str | None] = "size"

    size: int = option(doc="number of keys that a query sees, itself included", examples=("5",))

    def validate(self) -> None:
        if self.size < 1:
            raise ValueError(f"window: size is {self.size} but must be at least 1 (the query itself)")
        if self.size > LARGEST_WINDOW:
            raise ValueError(
                f"window: size is {self.size} but must be at most {LARGEST_WINDOW}, as distances are int32"
            )

    def fill(
        self, params: dict[str, jax.Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        return replace(slots, window=self.size), carry
