"""GGUF files (llama.cpp's format) as configuration, tensors and tokenizer, through the `gguf` package.

Quantised tensors are dequantised one at a time. For the llama architecture the rows of q and k are stored so that the
dimensions of a rotary pair are neighbours; they are put back to halves here, as transformers has them. What Llama 3.1
does to its rotations stands in these files as a tensor, rope_freqs, of one divisor per pair.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bampath.convert.families import ConversionError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FREQUENCIES = "rope_freqs.weight"
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# How the text is cut before byte-pair merging, by the name that the file gives it (tokenizer.ggml.pre).
_PRE_TOKENIZERS = ("gpt-2", "smollm")


def open_gguf(path: Path) -> tuple[Mapping[str, Any], "GgufTensors", Path | None]:
    """(config in config.json's terms, tensors, tokenizer.json made from the file's vocabulary).

    ConversionError names what cannot be read; ImportError if the package gguf is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise ImportError("reading .gguf files needs the package gguf: pip install gguf") from None

    class Reader(gguf.GGUFReader):
        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            _refuse_short_data(path, len(self.data) - start_offs, fields)
            super()._build_tensors(start_offs, fields)

    try:
        reader = Reader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
    except ConversionError:
        raise
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConversionError(f"{path} cannot be read as GGUF: {error}") from None
    config = _config(keys, {tensor.name: tensor for tensor in reader.tensors})
    return config, GgufTensors(reader, config), _tokenizer(keys)


def _refuse_short_data(path: Path, size: int, fields: Any) -> None:
    """ConversionError naming the first tensor that is not in the `size` bytes behind the header."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for field in sorted(fields, key=lambda field: int(field.parts[5][0])):
        _, name, _, dims, kind, offset = field.parts
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
        end = int(offset[0]) + int(np.prod(dims, dtype=np.int64)) * block_bytes // per_block
        if end > size:
            tensor = bytes(name).decode()
            raise ConversionError(
                f"{path} is cut short: tensor {tensor} ends at byte {end} of {size} behind the header"
            )


class GgufTensors:
    """Tensors under transformers' names, read and dequantised one at a time."""

    def __init__(self, reader: Any, config: Mapping[str, Any]) -> None:
        self._config = config
        self._tensors: dict[str, Any] = {}
        for tensor in reader.tensors:
            if tensor.name != _FREQUENCIES:
                self._tensors[_name(tensor.name)] = tensor
        self.shapes = {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(self.shapes[name])
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for part, key in heads.items():
            if part in name and self._config["model_type"] == "llama":
                value = _halves(value, self._config[key])
        return value


def _name(theirs: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays as it is."""
    if theirs == "output.weight":
        return "lm_head.weight"
    if theirs in _TOP:
        return _TOP[theirs]
    parts = theirs.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return theirs


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from pairs (2i, 2i + 1) to pairs (i, i + D/2)."""
    rest = rows.shape[1:]
    return rows.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(rows.shape)


def _config(keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    kind = keys.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ConversionError(f"general.architecture={kind!r} is not one of {', '.join(ARCHITECTURES)}")
    if "tokenizer.ggml.tokens" not in keys:
        raise ConversionError("the file has no tokenizer.ggml.tokens, which say how many tokens the model has")
    get = lambda name, default=None: keys.get(f"{kind}.{name}", default)
    heads = get("attention.head_count")
    _refuse_unknown_meanings(kind, get)
    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ConversionError(f"{kind}.rope.scaling.type={scaling!r} has no counterpart; known are none and linear")
    rope: dict[str, Any] = {}
    if scaling == "linear":
        rope = {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    if _FREQUENCIES in tensors:
        if rope:
            raise ConversionError(f"{_FREQUENCIES} beside {kind}.rope.scaling.type='linear' has no counterpart")
        divisors = np.asarray(tensors[_FREQUENCIES].data, np.float64).tolist()
        rope = {"rope_type": "longrope", "factor": 1.0, "short_factor": divisors, "long_factor": divisors}
    return {
        "model_type": kind,
        "vocab_size": len(keys["tokenizer.ggml.tokens"]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": {"rope_theta": get("rope.freq_base", 10000.0), **rope},
    }


def _refuse_unknown_meanings(kind: str, get: Callable[..., Any]) -> None:
    """ConversionError for values without which, or with which, the tensors would mean something else here."""
    context, dim, heads = (get(name) for name in ("context_length", "embedding_length", "attention.head_count"))
    if not isinstance(context, int):
        raise ConversionError(f"{kind}.context_length={context!r} must be a positive whole number")
    if get("rope.scale_linear", 1.0) != 1.0:
        raise ConversionError(f"{kind}.rope.scale_linear={get('rope.scale_linear')!r} has no counterpart; it must be 1")
    if 0 < get("attention.sliding_window", 0) < context:
        window = get("attention.sliding_window")
        raise ConversionError(f"{kind}.attention.sliding_window={window} has no counterpart; it must be the context")
    width = get("attention.key_length") or (dim // heads if isinstance(dim, int) and isinstance(heads, int) else None)
    if width is not None and get("rope.dimension_count", width) != width:
        turned = get("rope.dimension_count")
        raise ConversionError(f"{kind}.rope.dimension_count={turned} has no counterpart; it must be the head's {width}")


def _tokenizer(keys: Mapping[str, Any]) -> Path | None:
    """A tokenizer.json of the file's byte-pair vocabulary, in the temporary folder; None for other kinds."""
    known = keys.get("tokenizer.ggml.model") == "gpt2" and keys.get("tokenizer.ggml.pre") in _PRE_TOKENIZERS
    if not known or "tokenizer.ggml.merges" not in keys:
        return None
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = keys["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    cuts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if keys["tokenizer.ggml.pre"] == "smollm":
        cuts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    made.decoder = decoders.ByteLevel()
    kinds = keys.get("tokenizer.ggml.token_type", [])
    control = 3  # gguf.TokenType.CONTROL
    made.add_special_tokens(
        [AddedToken(w, special=True) for w, kind in zip(words, kinds, strict=True) if kind == control]
    )
    text = json.dumps(json.loads(made.to_str(pretty=False)))
    user = f"{os.getuid()}-" if hasattr(os, "getuid") else ""  # nobody else's files are written, or believed
    folder = Path(tempfile.gettempdir()) / f"bampath-{user}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return folder / "tokenizer.json"
