"""Named configurations. Sizes are rows of one table per family; recipes are the papers', sources beside them."""

from collections.abc import Callable
from functools import partial

from bampath.config import Config, ModelConfig, OptimConfig, TrainConfig
from bampath.data.config import DataConfig

# dim, layers, heads, kv_heads, mlp_dim: the sizes in the code of BAM (arXiv 2505.22842), where d_head = dim / heads.
BAM_SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "l6": (512, 6, 16, 16, 1024),
    "l8": (768, 8, 16, 16, 1536),
    "l12": (768, 12, 16, 16, 1536),
    "l15": (1152, 15, 24, 24, 2304),
    "l18": (1536, 18, 32, 32, 3072),
    "l24": (2048, 24, 64, 64, 4096),
    "l14.0": (1536, 14, 48, 48, 3072),
    "l14.1": (1536, 14, 32, 32, 3072),
    "l14.2": (1536, 14, 24, 24, 3072),
    "l14.3": (1536, 14, 16, 16, 3072),
    "l14.4": (1536, 14, 12, 12, 3072),
    "llama1b": (2048, 16, 32, 8, 8192),
}

# The paper's names. "432M" fits only the l14 head sweep: l14.1 keeps the head size 48 of l12, l15 and l18. "1.1B" fits
# both l24 and llama1b: l24 is taken, since it continues the family (MLP twice as wide as the model, one key head per
# head) and closes the published sweep over six sizes; llama1b stays under its own name.
BAM_NAMES = {"bam-120m": "l12", "bam-432m": "l14.1", "bam-1.1b": "l24"}


def tiny() -> Config:
    """Seconds on a CPU: for demonstrations and tests."""
    return Config(
        model=ModelConfig(
            vocab_size=384, dim=64, layers=2, heads=4, kv_heads=0, head_dim=0, mlp_dim=128,
            position="bam+ssmax", train_length=128,
        ),
        data=DataConfig(sequence_length=128, batch_size=8),
        optim=OptimConfig(name="adamw", lr=3e-3, warmup_steps=20, weight_decay=0.1),
        train=TrainConfig(steps=200, log_every=10, save_every=100),
    )  # fmt: skip


def bam(size: str) -> Config:
    """BAM's models and recipe: RAdam, 1,152 rows of 512 tokens, one epoch of FineWeb sample-10BT (19,226 steps)."""
    dim, layers, heads, kv_heads, mlp_dim = BAM_SIZES[size]
    return Config(
        model=ModelConfig(
            vocab_size=32_768, dim=dim, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=0, mlp_dim=mlp_dim,
            position="bam+ssmax", train_length=512, dtype="bfloat16",
        ),
        data=DataConfig(sequence_length=512, batch_size=1152),
        optim=OptimConfig(),
        train=TrainConfig(steps=19_226, accumulate=16, eval_every=32, eval_batches=4, log_every=10),
    )  # fmt: skip


def path_760m() -> Config:
    """PaTH's recipe (arXiv 2505.16381, section 4): 50B tokens of FineWeb-Edu at context 4,096.

    The paper states no shape and no Adam betas: 1536 × 24 layers × 24 heads of 64 is FoX's 760M, the MLP of 4,096 is
    the default of the library that it was trained with, and (0.9, 0.95) are FoX's; all three are assumptions.
    """
    return Config(
        model=ModelConfig(
            vocab_size=32_000, dim=1536, layers=24, heads=24, kv_heads=24, head_dim=64, mlp_dim=4096,
            position="path", train_length=4096, init="normal", dtype="bfloat16",
        ),
        data=DataConfig(sequence_length=4096, batch_size=512),
        optim=OptimConfig(
            name="adamw", warmup_steps=477, lr_start=0.03, lr_end=0.03, weight_decay=0.01
        ),
        train=TrainConfig(steps=23_842, accumulate=64, log_every=10, eval_every=500, eval_batches=2),
    )  # fmt: skip


NAMED: dict[str, Callable[[], Config]] = {
    "tiny": tiny,
    **{name: partial(bam, size) for name, size in BAM_NAMES.items()},
    "path-760m": path_760m,
    **{size: partial(bam, size) for size in BAM_SIZES},
}
