"""Named shapes that tests and benchmarks share."""

from kernels.attention.shapes import Shape
from kernels.path.plan import Plan

__all__ = ["BENCHMARK", "CPU_BENCHMARK", "HEAD_DIMS", "ODD_LENGTHS", "PLANS", "Shape"]

HEAD_DIMS = (16, 64, 80, 256)
ODD_LENGTHS = (1, 2, 3, 17, 63, 65, 130)

# Ways to cut a row of 21 tokens, padding at its end included: many blocks, many superblocks, single tokens, one block.
PLANS: dict[str, Plan] = {
    "blocks": Plan(1, 24, 3),
    "superblocks": Plan(3, 8, 4, group=1),
    "single-tokens": Plan(11, 2, 1),
    "one-block": Plan(1, 32, 32),
}

# One accelerator: training at the usual total of tokens, and long sequences.
BENCHMARK: dict[str, Shape] = {
    "4k-d64": Shape(8, 4096, 16, 64),
    "4k-d128": Shape(4, 4096, 16, 128),
    "32k-d64": Shape(1, 32768, 16, 64),
    "16k-d128": Shape(1, 16384, 16, 128),
}

# Two CPU cores: a layer of a small model in training, and longer rows.
CPU_BENCHMARK: dict[str, Shape] = {
    "256": Shape(8, 256, 4, 32),
    "1k": Shape(2, 1024, 4, 64),
    "4k": Shape(1, 4096, 2, 64),
}
