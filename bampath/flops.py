"""Parameters and floating-point operations by formula; what share of a device's peak a run reaches (MFU).

A compiler's count is no help here: it counts the body of a scan once and a fused kernel hardly at all.
"""

from dataclasses import dataclass

from bampath.config import ModelConfig

# Dense bfloat16 peak of one device in FLOP/s, without sparsity, from the makers' data sheets; the key is looked for in
# JAX's device_kind, longer keys first.
PEAK_FLOPS: dict[str, float] = {
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A6000": 155e12,
    "L40S": 362e12,
    "L4": 121e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


@dataclass(frozen=True)
class Flops:
    """Training FLOPs per token (forward and backward, no recomputation): with causal attention, and with all pairs."""

    causal: float
    full: float


def body_parameters(config: ModelConfig) -> int:
    """Parameters of the decoder without its positional scheme.

    V·d (embedding) + d·V (head, unless tied) + d (final norm)
    + L·(d·D·(H + 2·Hkv) + H·D·d + 3·d·mlp + 2·d [+ (H + Hkv)·D with QK-norm] [+ (H + 2·Hkv)·D with QKV biases])
    """
    c = config
    attention = c.dim * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    norms = 2 * c.dim + (c.head_dim * (c.heads + c.kv_heads) if c.qk_norm else 0)
    attention += c.head_dim * (c.heads + 2 * c.kv_heads) if c.qkv_bias else 0
    embeddings = c.vocab_size * c.dim * (1 if c.tie_embeddings else 2)
    return embeddings + c.dim + c.layers * (attention + 3 * c.dim * c.mlp_dim + norms)


def train_flops_per_token(config: ModelConfig, parameters: int, length: int) -> Flops:
    """FLOPs that a token costs in a row of `length` tokens, for a model of `parameters` parameters in all.

    6·(N − V·d) + 6·L·H·D·T for causal attention, 12·L·H·D·T counting every pair. N − V·d leaves out the embedding of
    the input, which is looked up and not multiplied; the head counts, also when it is tied. Document masks and windows
    reduce the work further, PaTH's transport adds to it; neither is counted.
    """
    c = config
    multiplied = parameters - (0 if c.tie_embeddings else c.vocab_size * c.dim)
    pairs = 12.0 * c.layers * c.heads * c.head_dim * length
    return Flops(causal=6.0 * multiplied + pairs / 2, full=6.0 * multiplied + pairs)


def peak_flops(device_kind: str) -> float | None:
    """Peak of one device by its `device_kind`; None if it is not in the table (a CPU for example)."""
    for name in sorted(PEAK_FLOPS, key=len, reverse=True):
        if name.lower() in device_kind.lower():
            return PEAK_FLOPS[name]
    return None
