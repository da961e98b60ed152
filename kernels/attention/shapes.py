"""Named shapes that tests and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """q [batch, length, heads, head_dim], k and v [batch, kv_length, kv_heads, head_dim]; None: as for q."""

    batch: int
    length: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    kv_length: int | None = None

    def flops(self, *, causal: bool, backward: bool = False) -> float:
        """Floating-point operations of the matrix products: 4·B·H·T·S·D, 3.5 times that with the backward pass (which
        recomputes the scores), half of it when causal (T = S)."""
        pairs = self.length * (self.kv_length or self.length) * (0.5 if causal else 1)
        return 4 * self.batch * self.heads * pairs * self.head_dim * (3.5 if backward else 1)


HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 256)
ODD_LENGTHS = (1, 2, 3, 17, 63, 65, 127, 130)

# Small enough for a CPU test of outputs and every gradient.
TEST: dict[str, Shape] = {
    **{f"length-{n}": Shape(2, n, 2, 16) for n in ODD_LENGTHS},
    **{f"head-dim-{n}": Shape(1, 24, 2, n) for n in HEAD_DIMS},
    "grouped": Shape(2, 40, 6, 16, kv_heads=2),
    "one-key-head": Shape(1, 40, 4, 16, kv_heads=1),
    "decode": Shape(2, 1, 4, 16, kv_heads=2, kv_length=77),
    "chunk": Shape(2, 20, 4, 16, kv_length=77),
    "more-queries": Shape(1, 70, 2, 16, kv_length=33),
}

# One accelerator: training at the usual total of tokens, and long sequences.
BENCHMARK: dict[str, Shape] = {
    "4k-d64": Shape(8, 4096, 16, 64),
    "4k-d128": Shape(4, 4096, 16, 128),
    "32k-d64": Shape(1, 32768, 16, 64),
    "16k-d128": Shape(1, 16384, 16, 128),
}

# Two CPU cores: a layer of the tiny model in training, and long rows in evaluation.
CPU_BENCHMARK: dict[str, Shape] = {
    "256": Shape(8, 256, 4, 32),
    "4k": Shape(1, 4096, 4, 32),
    "decode-100k": Shape(1, 1, 4, 32, kv_length=100_000),
}
