"""Flip-flop language modelling (Liu et al., arXiv 2306.00946): remember the last bit that was written."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from bampath.evaluation.state.tasks import Rows
from bampath.positions.options import check, option

WRITE, READ, IGNORE = 2, 3, 4
SYMBOLS = ("0", "1", "w", "r", "i")


@dataclass(frozen=True)
class FlipFlop:
    """FFL(p): rows of (instruction, bit) pairs over {w, r, i, 0, 1}; the bit after r is the last one after a w.

    p is the probability of i; w and r share the rest. The first instruction is w, the last r; bits are uniform except
    after r. Asked for: the bit after each r. Depth: tokens from the last written bit to the r.
    """

    NAME: ClassVar[str] = "fflm"
    MAIN: ClassVar[str | None] = None

    pairs: int = option(256, doc="(instruction, bit) pairs per row")
    ignore: float = option(0.8, doc="probability of the instruction i")

    def __post_init__(self) -> None:
        check(self)
        if self.pairs < 2:
            raise ValueError(f"fflm: pairs={self.pairs} must be at least 2: a write and a read")
        if not 0 <= self.ignore < 1:
            raise ValueError(f"fflm: ignore={self.ignore} must be in [0, 1)")

    @property
    def vocab_size(self) -> int:
        return len(SYMBOLS)

    @property
    def length(self) -> int:
        return 2 * self.pairs

    @property
    def asked(self) -> int:
        return self.pairs

    @property
    def answers(self) -> range:
        return range(2)

    def draw(self, draws: np.random.Generator, rows: int) -> Rows:
        chosen = draws.random((rows, self.pairs))
        write = (1 - self.ignore) / 2
        instructions = np.where(chosen < write, WRITE, np.where(chosen < 2 * write, READ, IGNORE))
        instructions[:, 0], instructions[:, -1] = WRITE, READ
        bits = draws.integers(0, 2, (rows, self.pairs))
        places = np.broadcast_to(np.arange(self.pairs), bits.shape)
        last = np.maximum.accumulate(np.where(instructions == WRITE, places, 0), axis=1)
        read = instructions == READ
        bits = np.where(read, np.take_along_axis(bits, last, axis=1), bits)
        pair = lambda even, odd: np.stack([even, odd], axis=2).reshape(rows, -1)
        zero = np.zeros_like(bits)
        return Rows(
            tokens=pair(instructions, bits).astype(np.int32),
            targets=pair(np.where(read, bits, 0), zero).astype(np.int32),
            weights=pair(read, zero).astype(np.float32),
            depth=pair(np.where(read, 2 * (places - last) - 1, 0), zero).astype(np.int32),
        )

    def tests(self) -> dict[str, "FlipFlop"]:
        return {
            "in-distribution": replace(self, ignore=0.8),
            "sparse": replace(self, ignore=0.98),
            "dense": replace(self, ignore=0.1),
        }
