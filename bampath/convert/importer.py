"""A Llama-family model of a folder (config.json and safetensors) or a GGUF file as configuration and parameters."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bampath.checkpoint import FOLDER, INFO_NAME
from bampath.config import ModelConfig
from bampath.convert.families import ConversionError, model_config
from bampath.convert.files import SafetensorsFolder, Tensors
from bampath.convert.tensors import place, tensors_of

IGNORED = ("rotary_emb.inv_freq",)  # constants that older files keep beside the weights


@dataclass(frozen=True)
class Imported:
    """config: of the model; params: float32 arrays as `LM` has them; tokenizer: the file that came with it, if one did;
    dtype: that of the file's tensors (of the most bytes), which an export writes again."""

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: Path | None
    dtype: str


@dataclass(frozen=True)
class Opened:
    """A model of which no tensor has been read yet; see `Imported`."""

    config: ModelConfig
    tensors: Tensors
    tokenizer: Path | None

    def read(self, say: Callable[[str], None] = lambda _: None) -> Imported:
        """Read the tensors; memory is the float32 parameters and one tensor of the file. ConversionError names one that
        does not fit."""
        params, kind = read_params(self.config, self.tensors, say)
        return Imported(self.config, params, self.tokenizer, kind)


def import_model(
    path: Path | str,
    *,
    dtype: str | None = None,
    length: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Imported:
    """`open_model`, and its tensors."""
    return open_model(path, dtype=dtype, length=length).read(say)


def open_model(path: Path | str, *, dtype: str | None = None, length: int | None = None) -> Opened:
    """Read what a model says of itself.

    path: a folder as transformers saves it, or a .gguf file. dtype: the compute dtype, default the model's own. length:
    see `families.model_config`. ConversionError (a ValueError) names the key, file or tensor that does not fit.
    """
    path = Path(path).expanduser()
    raw: Mapping[str, Any]
    tensors: Tensors
    if path.suffix == ".gguf":
        from bampath.convert.gguf import open_gguf  # needs the package gguf

        raw, tensors, tokenizer = open_gguf(path)
    else:
        raw, tensors, tokenizer = _open_folder(path)
    try:
        config = model_config(raw, dtype, length)
    except (TypeError, AttributeError) as error:
        raise ConversionError(f"{path}: its configuration has a value of a wrong kind: {error}") from None
    return Opened(config, tensors, tokenizer)


def _open_folder(folder: Path) -> tuple[Mapping[str, Any], Tensors, Path | None]:
    _refuse_place(folder)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversionError(f"{folder} has no config.json to read: {error.strerror}") from None
    except ValueError as error:
        raise ConversionError(f"{folder / 'config.json'} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConversionError(f"{folder / 'config.json'} must be a JSON object, is {type(raw).__name__}")
    found = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    return raw, SafetensorsFolder(folder), next((file for file in found if file.is_file()), None)


def _refuse_place(folder: Path) -> None:
    """ConversionError for a place of no other library's model, where the name of a missing file would mislead."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise ConversionError(f"{folder} {what}: only local folders and .gguf files are read; download a model first")
    if any(True for place in ("", "*/", f"{FOLDER}/*/") for _ in folder.glob(place + INFO_NAME)):
        raise ConversionError(f"{folder} is one of bampath's own runs, which needs no import: use it as it is")


def read_params(
    config: ModelConfig, tensors: Tensors, say: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Any], str]:
    """(parameters, dtype of the file's tensors), tensor by tensor. ConversionError for one that is missing, too many or
    of another shape."""
    wanted = {tensor.name: tensor for tensor in tensors_of(config)}
    _refuse_strangers(config, wanted, tensors)
    params: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for number, (name, tensor) in enumerate(wanted.items(), 1):
        if name not in tensors.shapes:
            raise ConversionError(f"tensor {name} {list(tensor.shape)} is missing")
        if tensors.shapes[name] != tensor.shape:
            raise ConversionError(f"tensor {name} has shape {list(tensors.shapes[name])}, must be {list(tensor.shape)}")
        value = tensors.read(name)
        sizes[str(value.dtype)] = sizes.get(str(value.dtype), 0) + value.nbytes
        place(params, tensor.path, jnp.asarray(tensor.ours(value).astype(np.float32)))
        if number % 50 == 0:
            say(f"{number} of {len(wanted)} tensors")
    return params, max(sizes, key=lambda kind: sizes[kind])


def _refuse_strangers(config: ModelConfig, wanted: Mapping[str, Any], tensors: Tensors) -> None:
    extra = [name for name in tensors.shapes if name not in wanted and not name.endswith(IGNORED)]
    if config.tie_embeddings and "lm_head.weight" in extra:
        if not np.array_equal(tensors.read("lm_head.weight"), tensors.read("model.embed_tokens.weight")):
            raise ConversionError(
                "tensor lm_head.weight differs from the embedding although tie_word_embeddings is true"
            )
        extra.remove("lm_head.weight")
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConversionError(f"tensor {sorted(extra)[0]}{more} has no place in this model")
