"""A checkpoint as something to run: its model, parameters, tokenizer and configuration, on this machine's devices."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bampath import checkpoint
from bampath.config import Config, from_json
from bampath.data import Tokenizer, tokenizer_of
from bampath.model import LM
from bampath.params import unbox

TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class Loaded:
    """What `load` gives. path is the checkpoint that was read, step the training steps behind it."""

    path: Path
    step: int
    config: Config
    model: LM
    params: Any
    tokenizer: Tokenizer


def load(path: Path | str, tokenizer: str | None = None, **model_changes: Any) -> Loaded:
    """Read a run's latest checkpoint, or the one named.

    tokenizer: the path of the tokenizer's file; by default the copy in the checkpoint. model_changes replace fields of
    the ModelConfig that change no parameter, such as dtype="bfloat16" or attention_impl="xla". CheckpointError if
    there is no complete checkpoint, its arrays are not those of its configuration, or the tokenizer is not the one it
    was trained with.
    """
    info = checkpoint.describe(path)
    config = from_json(json.dumps(info.config))
    copy = next((str(file) for name in TOKENIZER_NAMES if (file := info.path / name).is_file()), None)
    config = replace(config, data=replace(config.data, tokenizer=tokenizer or copy or config.data.tokenizer))
    config = replace(config, model=replace(config.model, **model_changes))
    codec = tokenizer_of(config.data)
    if codec.fingerprint != info.tokenizer:
        raise checkpoint.CheckpointError(
            f"{info.path} was trained with the tokenizer of fingerprint {info.tokenizer}, but "
            f"tokenizer={config.data.tokenizer!r} has {codec.fingerprint}: give the path of the right one (tokenizer=)"
        )
    model = LM(config.model)
    abstract = jax.eval_shape(lambda: unbox(model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]))
    return Loaded(info.path, info.step, config, model, checkpoint.read_params(info.path, like=abstract), codec)
