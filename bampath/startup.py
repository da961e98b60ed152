"""What a run prints before its first step, so that nobody has to guess what is being trained."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bampath import sharding
from bampath.attention import Attention
from bampath.config import Config, MeshConfig
from bampath.data import Loader, Tokenizer, describe
from bampath.flops import body_parameters, peak_flops, train_flops_per_token
from bampath.optim import learning_rate
from bampath.positions.registry import parse
from bampath.step import Declared, build_model, declare
from kernels.attention import api as attention_api
from kernels.lsh import api as lsh_api
from kernels.path import api as path_api


def check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    """ValueError if the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, but model.vocab_size="
            f"{config.model.vocab_size}; set model.vocab_size to at least {tokenizer.vocab_size}"
        )


def programs_folder(folder: Path) -> Path:
    """The absolute path of a folder for compiled programs, which need not exist. OSError if it cannot be written."""
    folder = folder.expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        what = "has no permission to be written" if there.is_dir() else "is not a folder"
        raise OSError(f"--compile-cache {folder}: {there} {what}; choose another folder")
    return folder


def keep_programs(folder: Path) -> str:
    """Keep compiled programs in `folder` (shared by all processes of a run), and find those of earlier runs there.

    Before anything is compiled; returns a line about what is there. OSError if it cannot be written.
    """
    from jax.experimental.compilation_cache import compilation_cache

    folder = programs_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--compile-cache {folder} cannot be made ({error.strerror}); choose another folder") from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX reads the options once
    return f"compiled programs in {folder}: {len(list(folder.glob('*-cache')))} from earlier runs"


def banner(config: Config, declared: Declared, tokenizer: Tokenizer) -> str:
    """Backend, precision, scheme per layer, masks, parameters, batch and FLOPs, one line each."""
    model, data, train = config.model, config.data, config.train
    devices = jax.devices()
    flops = train_flops_per_token(model, declared.count, data.sequence_length)
    peak = peak_flops(devices[0].device_kind)
    tokens = data.batch_size * data.sequence_length
    backend = f"{jax.default_backend()}, JAX {jax.__version__}"
    rows = {
        "device": f"{devices[0].device_kind} ({backend}), {config.mesh.size} of {len(devices)} used"
        + spread(config.mesh),
        "precision": f"compute {model.dtype}, parameters and positions float32, matrix products of float32 "
        + (getattr(jax.config, "jax_default_matmul_precision", None) or "as the backend does by default"),
        "kernels": _per_layer(kernels(config)),
        "position": schemes(config),
        "mask": masks(config),
        "parameters": f"{declared.count:,}, of which the scheme's {declared.count - body_parameters(model):,}",
        "tokenizer": f"{tokenizer.name}, {tokenizer.vocab_size:,} of {model.vocab_size:,} embeddings used",
        "batch": f"{data.batch_size} × {data.sequence_length} = {tokens:,} tokens in {train.accumulate} part(s), "
        f"{train.steps:,} steps = {tokens * train.steps:,} tokens",
        "rate": schedule(config),
        "work": f"{flops.causal:.3g} FLOP per token ({flops.full:.3g} if all pairs are counted), peak "
        + (f"{peak:.3g} FLOP/s" if peak else "of this device unknown: no MFU"),
    }
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def first_rows(loader: Loader, step: int, lines: int = 12) -> str:
    """The row with most documents in the batch of `step` as the model sees it: segments, positions, loss and text."""
    batch = loader.batch_at(step)
    row = int(np.argmax([len(np.unique(ids)) for ids in batch["segment_ids"]]))
    shown = describe(batch, row, loader.source.tokenizer).splitlines()
    more = [f"… and {len(shown) - lines} more segments"] if len(shown) > lines + 1 else []
    return "\n".join(["first batch", *(f"  {line}" for line in [*(shown[:lines] if more else shown), *more])])


def schedule(config: Config) -> str:
    """The optimiser and its learning rate over the run, with a warning where the ramp is longer than the run."""
    o, steps = config.optim, config.train.steps
    end = {"constant": "constant", "wsd": f"constant, over the last {o.decay_steps:,} steps linear to"}
    shape = end.get(o.schedule, f"{o.schedule} to") + ("" if o.schedule == "constant" else f" {o.lr * o.lr_end:g}")
    if not o.warmup_steps:
        return f"{o.name}, {o.lr:g}, {shape} at step {steps:,}"
    ramp = f"{o.name}, {o.lr * o.lr_start:g} to {o.lr:g} over {o.warmup_steps:,} steps"
    if o.warmup_steps < steps:
        return f"{ramp}, then {shape} at step {steps:,}"
    last = float(learning_rate(o, steps)(steps))
    return f"{ramp}; this run of {steps:,} steps ENDS ON THIS RAMP at {last:g}: set optim.warmup_steps"


def spread(mesh: MeshConfig) -> str:
    """`: data 2 × fsdp 4`, the axes that a run is spread over; nothing for one device."""
    used = [f"{name} {getattr(mesh, name)}" for name in sharding.AXES if getattr(mesh, name) > 1]
    return f": {' × '.join(used)}" if used else ""


def schemes(config: Config) -> str:
    """Which layers have which composition: `0–2, 4–6: rope+window(512); 3, 7: nope`."""
    scheme = parse(config.model.position)
    return _per_layer([scheme.at(layer).name for layer in range(config.model.layers)])


def kernels(config: Config) -> list[str]:
    """The op and backend of each layer, `attention xla` for example, found by tracing a training batch.

    ValueError, with the reason, if model.attention_impl names a backend that cannot serve it.
    """
    rows = config.data.batch_size // config.train.accumulate
    tokens = jax.ShapeDtypeStruct((rows, config.data.sequence_length), jnp.int32)
    model = build_model(replace(config, model=replace(config.model, remat="none", scan=False)))
    found: list[str] = []

    def by_layer(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        start = len(found)
        output = call(*args, **kwargs)
        if isinstance(context.module, Attention) and len(found) > start:  # on a mesh a layer may call two kernels
            found[start:] = [" and ".join(dict.fromkeys(found[start:]))]
        return output

    def forward(params: Any, tokens: jax.Array) -> Any:
        ids = tokens if config.data.document_mask else None
        with nn.intercept_methods(by_layer), sharding.use(sharding.mesh_of(config)):
            return model.apply({"params": params}, tokens, ids, method="features")

    shapes = declare(model).shapes
    with _noting(attention_api, "attention", found), _noting(path_api, "path", found), _noting(lsh_api, "lsh", found):
        jax.eval_shape(forward, shapes, tokens)
    return found


@contextmanager
def _noting(api: Any, op: str, found: list[str]) -> Iterator[None]:
    """Write down what the op chooses, call by call: the choice depends on all its arguments, so it is not repeated here
    but overheard."""
    choose = api.choose

    def noted(*call: Any) -> str:
        found.append(f"{op} {(name := choose(*call))}")
        return name

    api.choose = noted
    try:
        yield
    finally:
        api.choose = choose


def masks(config: Config) -> str:
    """The visibility rule of the run."""
    scheme = parse(config.model.position)
    windows = sorted({w for layer in range(config.model.layers) if (w := scheme.at(layer).window)})
    words = ["causal", "within documents" if config.data.document_mask else "across documents"]
    return ", ".join(words + [f"windows of {', '.join(map(str, windows))} in the layers that say so"] * bool(windows))


def _per_layer(names: Sequence[str]) -> str:
    """`rope in layers 0–2, 4–6; nope in layers 3, 7`, from one name per layer."""
    if len(set(names)) == 1:
        return f"{names[0]} in all {len(names)} layers"
    layers = {name: [i for i, other in enumerate(names) if other == name] for name in dict.fromkeys(names)}
    return "; ".join(f"{name} in layers {_runs(found)}" for name, found in layers.items())


def _runs(numbers: list[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))
