"""What trained models believe about positions, and figures of it."""

from bampath.analysis.figures import (
    exponent_figure,
    heatmap_figure,
    passkey_figure,
    perplexity_figure,
    prior_figure,
    save,
)
from bampath.analysis.heads import Head, read_heads

__all__ = [
    "Head",
    "exponent_figure",
    "heatmap_figure",
    "passkey_figure",
    "perplexity_figure",
    "prior_figure",
    "read_heads",
    "save",
]
