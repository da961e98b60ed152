"""What a run prints before its first step, so that nobody has to guess what is being trained."""

import jax

from bampath.config import Config
from bampath.data.tokenizer import Tokenizer
from bampath.flops import peak_flops, train_flops_per_token
from bampath.params import POSITIONAL_ROLES
from bampath.positions.registry import parse
from bampath.step import Declared


def check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    """ValueError if the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, but model.vocab_size="
            f"{config.model.vocab_size}; set model.vocab_size to at least {tokenizer.vocab_size}"
        )


def banner(config: Config, declared: Declared, tokenizer: Tokenizer) -> str:
    """Backend, precision, scheme per layer, masks, parameters, batch and FLOPs, one line each."""
    model, data, train = config.model, config.data, config.train
    devices = jax.devices()
    flops = train_flops_per_token(model, declared.count, data.sequence_length)
    peak = peak_flops(devices[0].device_kind)
    tokens = data.batch_size * data.sequence_length
    backend = f"{jax.default_backend()}, JAX {jax.__version__}"
    rows = {
        "device": f"{devices[0].device_kind} ({backend}), 1 of {len(devices)} used",
        "precision": f"compute {model.dtype}, parameters and positions float32, matrix products of float32 "
        + (getattr(jax.config, "jax_default_matmul_precision", None) or "as the backend does by default"),
        "attention": model.attention_impl or "the best kernel for each call on this backend",
        "position": schemes(config),
        "mask": masks(config),
        "parameters": f"{declared.count:,}, of which {declared.count_of(*POSITIONAL_ROLES):,} positional",
        "tokenizer": f"{tokenizer.name}, {tokenizer.vocab_size:,} of {model.vocab_size:,} embeddings used",
        "batch": f"{data.batch_size} × {data.sequence_length} = {tokens:,} tokens in {train.accumulate} part(s), "
        f"{train.steps:,} steps = {tokens * train.steps:,} tokens",
        "work": f"{flops.causal:.3g} FLOP per token ({flops.full:.3g} if all pairs are counted), peak "
        + (f"{peak:.3g} FLOP/s" if peak else "of this device unknown: no MFU"),
    }
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def schemes(config: Config) -> str:
    """Which layers have which composition: `0–2, 4–6: rope+window(512); 3, 7: nope`."""
    scheme = parse(config.model.position)
    layers: dict[str, list[int]] = {}
    for layer in range(config.model.layers):
        layers.setdefault(scheme.at(layer).name, []).append(layer)
    if len(layers) == 1:
        return f"{next(iter(layers))} in all {config.model.layers} layers"
    return "; ".join(f"{name} in layers {_runs(found)}" for name, found in layers.items())


def masks(config: Config) -> str:
    """The visibility rule of the run."""
    scheme = parse(config.model.position)
    windows = sorted({w for layer in range(config.model.layers) if (w := scheme.at(layer).window)})
    words = ["causal", "within documents" if config.data.document_mask else "across documents"]
    return ", ".join(words + [f"windows of {', '.join(map(str, windows))} in the layers that say so"] * bool(windows))


def _runs(numbers: list[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))
