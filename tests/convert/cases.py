"""Tiny random models of every family, as transformers writes them, and the logits that it computes with them.

`python -m tests.convert.cases [NAME ...]` writes them anew with torch and transformers into fixtures/: one folder per
case with config.json, safetensors and expected.npz. The committed ones let every run of the suite compare with the real
classes without installing them; test_live.py makes them again where transformers is installed.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).with_name("fixtures")
LENGTH = 40
BASE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, **options}}


# Of LongRoPE's two lists transformers takes the second beyond the original context.
_LISTS: dict[str, Any] = {"short_factor": [1.125, 1.0], "long_factor": [1.0, 3.5], "factor": 4.0}
LONGROPE = rope("longrope", original_max_position_embeddings=16, **_LISTS)
LONGROPE_SHORT = rope("longrope", original_max_position_embeddings=40, attention_factor=1.25, **_LISTS)

# name -> (class, changes of BASE, options of import_model, the position that it must become)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}, {}, "rope(10000)"),
    "llama-tied-linear": (
        "Llama",
        {"tie_word_embeddings": True, **rope("linear", factor=4.0)},
        {},
        "rope(10000,scaling=linear,factor=4)",
    ),
    "llama3": (
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
        {},
        "rope(10000,scaling=llama3,factor=8,original=32)",
    ),
    "llama-yarn": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=16, beta_slow=2, attention_factor=1.3),
        {},
        "rope(10000,scaling=yarn,factor=4,original=16,beta_fast=16,beta_slow=2,attention_factor=1.3)",
    ),
    "llama-dynamic": (
        "Llama",
        {"max_position_embeddings": 24, **rope("dynamic", factor=2.0)},
        {"length": LENGTH},
        "rope(10000,scaling=ntk,factor=2,original=24,length=40)",
    ),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 8}, {}, "rope(10000)+window(7)"),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        {},
        "rope(10000),2*rope(10000)+window(9)",
    ),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}, {}, "rope(10000)"),
    "llama-yarn-mscale": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5, truncate=False),
        {},
        "rope(10000,scaling=yarn,factor=4,original=16,truncate=false,attention_factor=1.0648216253695715)",
    ),
    "llama-longrope": (
        "Llama",
        LONGROPE,
        {},
        "rope(10000,scaling=longrope,factor=4,original=16,factors=1:3.5)",
    ),
    "qwen2-longrope-short": (
        "Qwen2",
        {"max_position_embeddings": 160, **LONGROPE_SHORT},
        {"length": LENGTH},
        "rope(10000,scaling=longrope,factor=4,original=40,attention_factor=1.25,factors=1.125:1)",
    ),
    "llama-proportional": (
        "Llama",
        {"head_dim": 8, **rope("proportional", partial_rotary_factor=0.5, factor=2.0)},
        {},
        "rope(10000,scaling=linear,factor=2,fraction=0.5)",
    ),
}


def make(name: str, folder: Path, dtype: str = "bfloat16", shard: str = "5GB") -> np.ndarray:
    """Write the model of a case to `folder` and return its float32 logits [2, LENGTH, V] for `tokens()`."""
    import torch
    import transformers

    kind, changes, _, _ = CASES[name]
    torch.manual_seed(list(CASES).index(name))
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from initial values, so that every tensor matters
            moved = parameter + torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2)
            parameter.copy_(moved.to(getattr(torch, dtype)).float())
        logits = model(torch.tensor(tokens())).logits.numpy()  # before the cast, which would round the rotation too
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
        return logits


def tokens() -> np.ndarray:
    return np.random.default_rng(7).integers(0, BASE["vocab_size"], (2, LENGTH))


def main(names: Sequence[str] = ()) -> None:
    for name in names or CASES:
        shutil.rmtree(FIXTURES / name, ignore_errors=True)
        logits = make(name, FIXTURES / name, shard="6KB" if name == "llama" else "5GB")
        (FIXTURES / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(FIXTURES / name / "expected.npz", logits=logits.astype(np.float32))


if __name__ == "__main__":
    main(sys.argv[1:])
