"""A configuration and a text that are small enough to train within a test."""

from pathlib import Path

from bampath import config
from bampath.config import Config

WORDS = (
    "the",
    "sun",
    "was",
    "over",
    "hill",
    "and",
    "river",
    "ran",
    "under",
    "old",
    "bridge",
    "while",
    "bell",
    "far",
    ".",
)


def text_file(folder: Path) -> Path:
    """20 documents of words in a fixed, uneven order, as one file per document."""
    (folder / "text").mkdir()
    for i in range(20):
        words = [WORDS[(i * 7 + j * j + j * i) % len(WORDS)] for j in range(40 + 11 * (i % 5))]
        (folder / "text" / f"{i:02d}.txt").write_text(" ".join(words))
    return folder / "text"


# One layer of 16, rows of 24 bytes, dense attention (it compiles fastest).
SMALL = (
    *("model.layers=1", "model.dim=16", "model.heads=2", "model.mlp_dim=32", "model.vocab_size=272"),
    *("model.attention_impl=reference", "data.sequence_length=24", "data.batch_size=4"),
    *("train.log_every=1", "train.tensorboard=false", "optim.warmup_steps=0"),
)


def small(*overrides: str) -> Config:
    """`tiny` made smaller, for six steps."""
    return config.override(config.get("tiny", *SMALL, "train.steps=6", "train.save_every=2"), *overrides)
