"""What a Llama-family config.json says, as a ModelConfig, and a ModelConfig as a config.json.

Llama (SmolLM2 among them), Mistral, Qwen2 (Qwen2.5) and Qwen3 are one decoder with different switches. Whatever a
config.json asks for that this decoder does not do is refused by its key: weights that load but mean something else are
worse than none.
"""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from bampath.config import ModelConfig
from bampath.positions.registry import Composition, Scheme, parse
from bampath.positions.rope import RoPE
from bampath.positions.window import Window

Json = Mapping[str, Any]
FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "mistral": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
# Keys that would change the function, and the values with which they do not.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (None, False),
    "attention_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "pretraining_tp": (None, 1),
}

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_MAY_BE_NULL = ("head_dim", "num_key_value_heads", "sliding_window")
_COUNTS = (*_MAY_BE_NULL, "max_position_embeddings", "max_window_layers")
_ROPE_NEEDS = {  # keys without which a rescaling means nothing
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


class ConversionError(ValueError):
    """A model, file or tensor that cannot be converted, with its name."""


def model_config(config: Json, dtype: str | None = None, length: int | None = None) -> ModelConfig:
    """The ModelConfig of a config.json.

    dtype: compute dtype, by default the one that the weights are meant for. length: the context that "dynamic" NTK
    scaling serves (see `RoPE`), by default the scaled one. ConversionError for an unknown model type or a key whose
    value has no counterpart.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConversionError(f"model_type={kind!r} is not one of {', '.join(FAMILIES)}")
    for key, allowed in _MUST_BE.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConversionError(f"{key}={config[key]!r} has no counterpart; it must be {allowed[-1]!r}")
    for key in _SIZES:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ConversionError(f"{key}={config.get(key)!r} must be a positive whole number")
    for key in _COUNTS:
        value = config.get(key, 1)
        if not (value is None and key in _MAY_BE_NULL) and (type(value) is not int or value < 0):
            raise ConversionError(f"{key}={value!r} must be a whole number")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if not config.get("head_dim") and width % heads:
        raise ConversionError(
            f"hidden_size={width} is not a multiple of num_attention_heads={heads}; head_dim must say more"
        )
    theirs = config.get("dtype") or config.get("torch_dtype") or "float32"
    options: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "dim": width,
        "layers": config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": _head_dim(config),
        "mlp_dim": config["intermediate_size"],
        "position": position_of(config, length),
        "train_length": config.get("max_position_embeddings", 2048),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "init": "normal",
        "dtype": dtype or DTYPES.get(theirs, "float32"),
    }
    return ModelConfig(**options | FAMILIES[kind])


def _head_dim(config: Json) -> int:
    """0 where the sizes are not there."""
    return config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)


def position_of(config: Json, length: int | None = None) -> str:
    """The positional scheme of a config.json: RoPE with its rescaling, and a window in the layers that have one."""
    rope = rope_of(config, length)
    layers = []
    for window in windows_of(config):
        layers.append(Composition((rope,) if window is None else (rope, Window(window))))
    return Scheme(tuple(layers)).name


def rope_of(config: Json, length: int | None = None) -> RoPE:
    """The RoPE part of a config.json (keys `rope_parameters`, or `rope_theta` and `rope_scaling`).

    length: the context that the scalings serve which follow the running length in transformers (dynamic, longrope).
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConversionError(f"rope_scaling={given!r} must be an object with rope_type")
    given = dict(given)
    base = float(given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    fraction = given.pop("partial_rotary_factor", None) or 1.0
    if fraction != 1 and kind != "proportional":
        raise ConversionError(f"partial_rotary_factor={fraction} with rope_type={kind!r} has no counterpart")
    for key in _ROPE_NEEDS.get(kind, ()) if isinstance(kind, str) else ():
        if given.get(key) is None:
            raise ConversionError(f"rope_type={kind!r} without {key}: it needs {', '.join(_ROPE_NEEDS[kind])}")
    longest = config.get("max_position_embeddings", 2048)
    trained = given.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    stretched = longest / trained if kind in ("yarn", "longrope") else 1.0
    factor = float(given.get("factor") or stretched)
    if kind == "proportional":
        stretch: dict[str, Any] = {} if factor == 1.0 else {"scaling": "linear", "factor": factor}
        return RoPE(base, fraction=float(fraction), **stretch)
    if kind == "default" or (factor == 1.0 and kind in ("linear", "llama3")):
        return RoPE(base)
    if kind == "linear":
        return RoPE(base, scaling="linear", factor=factor)
    if kind == "dynamic":
        return RoPE(base, scaling="ntk", factor=factor, original=trained, length=length)
    if kind == "yarn":
        return _yarn(base, given, factor, trained)
    if kind == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        return RoPE(base, scaling="llama3", factor=factor, original=trained, low_freq=low, high_freq=high)
    if kind == "longrope":
        name = "short_factor" if (length or longest) <= trained else "long_factor"
        chosen, pairs = given[name], _head_dim(config) // 2
        if pairs and len(chosen) != pairs:
            raise ConversionError(f"{name} has {len(chosen)} numbers, must have one per pair of a head: {pairs}")
        amplitude, slowed = given.get("attention_factor"), tuple(map(float, chosen))
        return RoPE(
            base, scaling="longrope", factor=factor, original=trained, factors=slowed, attention_factor=amplitude
        )
    known = "default, linear, dynamic, yarn, llama3, longrope, proportional"
    raise ConversionError(f"rope_type={kind!r} has no counterpart; known are {known}")


def _yarn(base: float, given: dict[str, Any], factor: float, trained: int) -> RoPE:
    """As in transformers, DeepSeek's mscale counts only with its mscale_all_dim, and without an attention_factor."""
    turns: dict[str, Any] = {"beta_fast": given.get("beta_fast") or 32.0, "beta_slow": given.get("beta_slow") or 1.0}
    amplitude, parts = given.get("attention_factor"), (given.get("mscale"), given.get("mscale_all_dim"))
    if amplitude is None and all(parts) and factor > 1:
        above, below = (0.1 * part * math.log(factor) + 1 for part in parts if part)
        amplitude = above / below
    truncate = given.get("truncate") is not False
    return RoPE(
        base,
        scaling="yarn",
        factor=factor,
        original=trained,
        attention_factor=amplitude,
        truncate=truncate,
        **turns,
    )


def windows_of(config: Json) -> list[int | None]:
    """The sliding window of every layer, None for full attention."""
    layers, size = config["num_hidden_layers"], config.get("sliding_window")
    if config["model_type"] == "mistral":
        return [size] * layers
    if not config.get("use_sliding_window") or size is None:
        return [None] * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", layers)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise ConversionError(
            f"layer_types={kinds!r} must name full_attention or sliding_attention for {layers} layers"
        )
    return [size if kind == "sliding_attention" else None for kind in kinds]


def hf_config(config: ModelConfig, shared_qk_norm: bool) -> dict[str, Any]:
    """The config.json that a transformers class reads for this model.

    shared_qk_norm: whether all heads of a layer have the same QK-norm weights, as Qwen3 wants it. ConversionError names
    what no class of the family can express.
    """
    scheme = parse(config.position)
    ropes, windows = set(), []
    for layer in range(config.layers):
        parts = {part.NAME: part for part in scheme.at(layer).parts}
        rope, window = parts.pop("rope", None), parts.pop("window", None)
        if parts or not isinstance(rope, RoPE):
            raise ConversionError(
                f"position={config.position!r} cannot be exported: transformers' Llama family knows rope, with or "
                f"without a window, and layer {layer} has {scheme.at(layer).name}"
            )
        ropes.add(rope)
        windows.append(window.size if isinstance(window, Window) else None)
    if len(ropes) > 1:
        raise ConversionError(f"position={config.position!r} cannot be exported: its layers have different rotations")
    if config.qk_norm and config.qkv_bias:
        raise ConversionError("qk_norm=true with qkv_bias=true cannot be exported: Qwen3 has no biases, Qwen2 no norm")
    if config.qk_norm and not shared_qk_norm:
        raise ConversionError("qk_norm=true cannot be exported: the heads' norm weights differ, Qwen3 has one for all")
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "mistral" if any(windows) else "llama"
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.train_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "use_cache": True,
        **_rope_keys(next(iter(ropes)), config.train_length, config.head_dim),
        **_window_keys(kind, windows),
    }


def _rope_keys(rope: RoPE, trained: int, head_dim: int) -> dict[str, Any]:
    if rope.layout != "half" or (rope.fraction != 1 and rope.scaling not in ("none", "linear")):
        raise ConversionError(
            f"{rope.spec} cannot be exported: transformers' Llama family pairs dimensions in halves, and leaves pairs "
            "out only without rescaling or with a linear one"
        )
    kinds = {"none": "default", "ntk": "dynamic"}
    keys: dict[str, Any] = {"rope_type": kinds.get(rope.scaling, rope.scaling)}
    if rope.scaling != "none":
        keys["factor"] = rope.factor
    if rope.fraction != 1:
        keys |= {"rope_type": "proportional", "partial_rotary_factor": rope.fraction}
    if rope.scaling in ("yarn", "llama3", "longrope"):
        keys["original_max_position_embeddings"] = rope.original or trained
    if rope.scaling == "ntk" and (rope.original or trained) != trained:
        raise ConversionError(f"{rope.spec} cannot be exported: original must be the model's train_length={trained}")
    if rope.scaling == "yarn":
        keys |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.attention_factor is not None:
        keys["attention_factor"] = rope.attention_factor
    if rope.scaling == "llama3":
        keys |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.factors is not None:  # one list for all rows, so that the running length decides nothing
        factors = list(rope.factors) * (head_dim // 2 if len(rope.factors) == 1 else 1)
        keys |= {"short_factor": factors, "long_factor": factors}
    # Both spellings: transformers 5 reads rope_parameters, older versions rope_theta and rope_scaling.
    old = {} if keys["rope_type"] == "default" else {"rope_scaling": keys}
    return {"rope_theta": rope.base, **old, "rope_parameters": {"rope_theta": rope.base, **keys}}


def _window_keys(kind: str, windows: list[int | None]) -> dict[str, Any]:
    sizes = {size for size in windows if size is not None}
    if len(sizes) > 1:
        raise ConversionError(f"windows of {sorted(sizes)} cannot be exported: the family has one size for all layers")
    size = next(iter(sizes), None)
    if kind == "llama":
        return {}
    if kind == "mistral":
        if None in windows:
            raise ConversionError("a window in some layers only cannot be exported: Mistral has it in all or none")
        return {"sliding_window": size}
    if size is None:
        return {"use_sliding_window": False}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    order = [name for name, _ in groupby(kinds)]
    if order not in (["full_attention", "sliding_attention"], ["sliding_attention"]):
        raise ConversionError("windows in this pattern of layers cannot be exported: Qwen has them in the last layers")
    return {
        "use_sliding_window": True,
        "sliding_window": size,
        "max_window_layers": kinds.count("full_attention"),
        "layer_types": kinds,
    }
