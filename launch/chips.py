"""What is known of TPU chips: memory that a program may use, bandwidths, and which chip a topology is made of.

HBM is what libtpu's compiler allows (it states the number when a program is too large). Bandwidths are those of
Google's pages (cloud.google.com/tpu/docs, v5e, v5p and v6e): of HBM, and of the interconnect in both directions, 400,
1200 and 800 GB/s per chip. One axis of the torus has a half of it (v5e, v6e: 2D) or a third (v5p: 3D), and half of that
is sending.
"""

import math
import re
from dataclasses import dataclass

from bampath.flops import peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """hbm: usable bytes; hbm_bandwidth: bytes/s; axis_bandwidth: bytes/s that a chip sends along one axis of the torus,
    to both neighbours together; kind: JAX's device_kind."""

    name: str
    kind: str
    hbm: float
    hbm_bandwidth: float
    axis_bandwidth: float

    @property
    def peak(self) -> float:
        """Dense bfloat16 FLOP/s."""
        found = peak_flops(self.kind)
        assert found is not None
        return found


class DoesNotFit(Exception):
    """The compiler found no place for a program in the chip's memory; `wanted` is its size in bytes, if it said so."""

    def __init__(self, message: str, wanted: float | None) -> None:
        super().__init__(message)
        self.wanted = wanted


CHIPS = {
    "v5e": Chip("v5e", "TPU v5 lite", 15.75 * GIB, 819e9, 100e9),
    "v5p": Chip("v5p", "TPU v5p", 95.74 * GIB, 2765e9, 200e9),
    "v6e": Chip("v6e", "TPU v6 lite", 31.25 * GIB, 1640e9, 200e9),
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v5e:16x16`. ValueError if it is not known."""
    name = topology.split(":")[0]
    if name not in CHIPS:
        raise ValueError(f"topology {topology!r} is not of one of the chips {', '.join(CHIPS)}; write v5e:16x16, say")
    return CHIPS[name]


def chips_in(topology: str) -> int:
    """How many chips a topology such as `v5e:16x16` or `v5p:2x2x2` has. ValueError if that is not its form."""
    name, _, shape = topology.partition(":")
    axes = 3 if name == "v5p" else 2
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape, re.ASCII) or shape.count("x") != axes - 1:
        example = "x".join("4" * axes)
        raise ValueError(f"topology {topology!r} must be {name}: and {axes} numbers of chips, such as {name}:{example}")
    return math.prod(map(int, shape.split("x")))
