"""A teacher that is trained in a moment."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath import config
from bampath.config import Config
from bampath.model import LM
from bampath.step import declare
from tests.train.small import SMALL

TINY = (
    *(word for word in SMALL if not word.startswith("model.layers")),
    *("model.layers=2", "model.kv_heads=1", "position=rope", "model.train_length=24"),
)


def tiny(*words: str) -> Config:
    return config.override(config.get("tiny", *TINY), *words)


def fresh(conf: Config, seed: int = 0) -> Any:
    """Parameters away from their initial values, so that every one of them matters."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        mean = 1 if path[-1].key == "scale" else 0
        return jnp.asarray(rng.normal(mean, 0.2, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, declare(LM(conf.model)).shapes)
