"""GGUF files: the permuted rows, and small files that the package gguf writes against transformers' own logits."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bampath.convert import import_model
from bampath.convert.families import ConversionError
from bampath.convert.files import SafetensorsFolder
from bampath.convert.gguf import _config, _halves
from bampath.model import LM
from tests.convert.cases import FIXTURES, tokens

gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf")
NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores them: what stood at i and at i + D/2 of a head becomes 2i and 2i + 1."""
    size, out = len(rows) // heads, np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            for j in range(2):
                out[head * size + 2 * i + j] = rows[head * size + i + j * (size // 2)]
    return out


@pytest.mark.parametrize("heads", [1, 3])
def test_rows_of_q_and_k_are_put_back(heads: int) -> None:
    rows = np.random.default_rng(heads).normal(size=(heads * 8, 5))
    np.testing.assert_array_equal(_halves(pairs(rows, heads), heads), rows)
    assert not np.array_equal(pairs(rows, heads), rows)


def write(name: str, path: Path, permute: bool = True, extra: dict[str, np.ndarray] | None = None) -> Path:
    """The model of a fixture as llama.cpp's converter writes it, in float32."""
    from gguf import GGUFWriter

    config = json.loads((FIXTURES / name / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    out = GGUFWriter(path, config["model_type"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config["rope_parameters"]["rope_type"] == "linear":
        from gguf import RopeScalingType

        out.add_rope_scaling_type(RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(config["rope_parameters"]["factor"])
    out.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    found = SafetensorsFolder(FIXTURES / name)
    for theirs in found.shapes:
        value, there = found.read(theirs).astype(np.float32), theirs
        for part, count in heads.items():
            value = pairs(value, count) if permute and part in theirs else value
        for long, short in NAMES.items():
            there = there.replace(long, short)
        out.add_tensor(there, value)
    for there, value in (extra or {}).items():
        out.add_tensor(there, value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def logits(path: Path) -> Any:
    found = import_model(path, dtype="float32")
    return LM(found.config).apply({"params": found.params}, jnp.asarray(tokens()))


@gguf
@pytest.mark.parametrize("name", ["llama", "llama-tied-linear", "qwen3"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    want = np.load(FIXTURES / name / "expected.npz")["logits"]
    permute = name != "qwen3"  # only the llama architecture has its rows permuted
    np.testing.assert_allclose(logits(write(name, tmp_path / "m.gguf", permute)), want, atol=1e-4)
    assert abs(np.asarray(logits(write(name, tmp_path / "n.gguf", not permute))) - want).max() > 0.1


@gguf
def test_rescaled_rotations_come_as_a_tensor(tmp_path: Path) -> None:
    """Llama 3.1's rescaling, from its definition: wavelengths against an original context of 32."""
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(2) / 2)
    divisors = [1.0 if w < 32 / 4 else 8.0 if w > 32 else 1 / ((1 - s) / 8 + s) for w in wavelengths
                for s in [(32 / w - 1) / 3]]  # fmt: skip
    assert divisors == [1.0, 8.0]
    path = write("llama3", tmp_path / "m.gguf", extra={"rope_freqs.weight": np.asarray(divisors, np.float32)})
    assert import_model(path).config.position == "rope(10000,scaling=longrope,original=64,factors=1:8)"
    want = np.load(FIXTURES / "llama3" / "expected.npz")["logits"]
    np.testing.assert_allclose(logits(path), want, atol=1e-4)


@gguf
def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    whole = write("llama3", tmp_path / "m.gguf", extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ConversionError, match=r"tensor blk\.0\.attn_sinks\.weight has no place"):
        import_model(whole)
    wrong = write("llama3", tmp_path / "w.gguf", extra={"blk.3.attn_q.weight": np.ones((16, 16), np.float32)})
    with pytest.raises(ConversionError, match=r"tensor model\.layers\.3\.self_attn\.q_proj\.weight has no place"):
        import_model(wrong)
    cut = tmp_path / "cut.gguf"
    data = write("llama3", tmp_path / "c.gguf").read_bytes()
    cut.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(ConversionError, match=r"cut\.gguf is cut short: tensor blk\.\d\.\w+\.weight ends at byte"):
        import_model(cut)
    cut.write_bytes(data[:100])
    with pytest.raises(ConversionError, match=r"cut\.gguf cannot be read as GGUF"):
        import_model(cut)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.context_length": None}, r"llama\.context_length=None must be a positive whole number"),
        ({"llama.rope.scale_linear": 4.0}, r"rope\.scale_linear=4\.0 has no counterpart; it must be 1"),
        ({"llama.attention.sliding_window": 8}, r"sliding_window=8 has no counterpart"),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count=4 has no counterpart; it must be the head's 8"),
        ({"tokenizer.ggml.tokens": None}, r"no tokenizer\.ggml\.tokens"),
    ],
)
def test_keys_that_mean_something_else_are_refused(changes: dict[str, Any], words: str) -> None:
    keys = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "b"], "llama.context_length": 64}
    keys |= {"llama.embedding_length": 16, "llama.attention.head_count": 2, "llama.rope.dimension_count": 8}
    assert _config(keys, {})["max_position_embeddings"] == 64
    wrong = {name: value for name, value in (keys | changes).items() if value is not None}
    with pytest.raises(ConversionError, match=words):
        _config(wrong, {})
