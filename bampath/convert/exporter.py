"""A model as a folder that transformers reads: config.json, safetensors and the tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bampath.command import folder_to_make
from bampath.config import ModelConfig
from bampath.convert.families import ConversionError, hf_config
from bampath.convert.files import SHARD_BYTES, write_safetensors
from bampath.convert.tensors import take, tensors_of

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def export_model(
    folder: Path | str,
    config: ModelConfig,
    params: Any,
    *,
    dtype: str = "float32",
    tokenizer: tuple[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `params` of LM(config) to a new folder.

    tokenizer: name and content of its file. dtype: of the tensors; parameters that came from bfloat16 tensors go back
    to them bit for bit. ConversionError, by name, for what no class of transformers' Llama family can express; nothing
    is written then. FileExistsError if the folder has something in it.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise ConversionError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    raw = hf_config(config, _shared_norms(config, params))
    folder_to_make(folder)
    folder = folder.resolve()  # what a link or "." stands for: a new folder takes its place
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    kind = DTYPES[dtype]
    arrays = ((t.name, t.theirs(np.asarray(take(params, t.path))).astype(kind)) for t in tensors_of(config))
    write_safetensors(partial, arrays, shard_bytes)
    text = json.dumps({**raw, "dtype": dtype, "torch_dtype": dtype}, indent=1)
    (partial / "config.json").write_text(text + "\n", encoding="utf-8")
    if tokenizer is not None:
        (partial / tokenizer[0]).write_bytes(tokenizer[1])
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def _shared_norms(config: ModelConfig, params: Any) -> bool:
    """Whether the QK-norm weights of a layer are the same for all heads."""
    if not config.qk_norm:
        return True
    scales = [
        np.asarray(take(params, t.path))
        for t in tensors_of(config)
        if t.path[-2:-1] in (("query_norm",), ("key_norm",))
    ]
    return all((scale == scale[:1]).all() for scale in scales)
