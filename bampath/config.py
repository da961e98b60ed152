"""Configurations: frozen dataclasses, validated when built, named, overridden by `key=value`, kept as JSON.

    config = get("bam-120m", "position=rope", "train.steps=100")

Named configurations live in `bampath.named`; the papers' numbers that they carry are explained in docs/training.md.
"""

import difflib
import inspect
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from bampath import overrides as _overrides
from bampath.data.config import DataConfig

Dtype = Literal["float32", "bfloat16"]
Init = Literal["torch", "normal"]
Remat = Literal["none", "full", "attention"]


@dataclass(frozen=True)
class ModelConfig:
    """The decoder. `head_dim=0` means dim / heads, `kv_heads=0` means heads; both are resolved when built.

    init: "torch" (uniform ±1/√fan_in, embeddings N(0, 1)) or "normal" (N(0, init_std)); dtype: the compute dtype, the
    parameters themselves are float32; train_length: the context in training, which some positional schemes use.
    scan: layers run as one compiled loop over stacked weights (made in each step from the layers' own), so that compile
    time does not grow with depth; the same numbers.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    position: str
    train_length: int
    qk_norm: bool = False
    qkv_bias: bool = False
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init: Init = "torch"
    init_std: float = 0.02
    dtype: Dtype = "float32"
    remat: Remat = "none"
    scan: bool = False
    attention_impl: str | None = None

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim == 0:
            _divides("model.dim", self.dim, "model.heads", self.heads)
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        _positive(
            "model", self, "vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "mlp_dim", "train_length"
        )
        _positive("model", self, "norm_eps", "init_std")
        _choices("model", self)
        if self.init == "torch":
            _refuse_idle("model", self, "model.init=torch", "init_std")
        _divides("model.heads", self.heads, "model.kv_heads", self.kv_heads)
        from bampath.positions.registry import (
            parse,  # here: it brings JAX, which reading a configuration can do without
        )

        parse(self.position)


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule. Roles, not names, decide what decays and which rate applies.

    lr_start and lr_end are fractions of lr; decay_steps is the length of the final decay of "wsd". The *_lr fields are
    factors on lr for positional parameters by role, prior_decay their own weight decay. clip_norm=0 turns clipping off;
    clip_positional says whether positional parameters count in the global norm and are clipped by it. muon_dtype: of
    Muon's Newton-Schulz steps; its momentum stays as wide as the parameters.
    """

    name: Literal["radam", "adamw", "muon"] = "radam"
    lr: float = 1e-3
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    lr_start: float = 0.0
    lr_end: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embedding: bool = True
    clip_norm: float = 1.0
    clip_positional: bool = True
    prior_lr: float = 1.0
    sharpness_lr: float = 1.0
    position_lr: float = 1.0
    prior_decay: float = 0.0
    muon_momentum: float = 0.95
    muon_steps: int = 5
    muon_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _choices("optim", self)
        _positive("optim", self, "lr", "eps", "muon_steps")
        _not_negative("optim", self, "warmup_steps", "decay_steps", "lr_start", "lr_end", "weight_decay", "clip_norm")
        _not_negative("optim", self, "prior_lr", "sharpness_lr", "position_lr", "prior_decay")
        _below("optim", self, 31, "warmup_steps", "decay_steps")
        for name in ("b1", "b2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be in [0, 1)")
        if self.name == "radam" and self.b2 <= 0.6:
            raise ValueError(f"optim.b2={self.b2}: RAdam rectifies only where 2/(1 - b2) - 1 > 4, that is b2 > 0.6")
        if self.schedule == "wsd" and self.decay_steps == 0:
            raise ValueError("optim.schedule=wsd needs optim.decay_steps, the number of steps of its final decay")
        if self.schedule != "wsd":
            _refuse_idle("optim", self, f"optim.schedule={self.schedule} (it is for wsd)", "decay_steps")
        if self.name != "muon":
            _refuse_idle("optim", self, f"optim.name={self.name}", "muon_momentum", "muon_steps", "muon_dtype")
        if self.clip_norm == 0:
            _refuse_idle("optim", self, "optim.clip_norm=0", "clip_positional")


@dataclass(frozen=True)
class TrainConfig:
    """The loop. The data.batch_size rows of an optimiser step are worked off in `accumulate` equal parts.

    seed: of the initial parameters; loss_chunk: tokens whose logits exist at one time; *_every count steps, 0 turns the
    thing off; keep: how many of the latest checkpoints stay, keep_every: steps whose checkpoints stay for ever.
    init_from: a run or checkpoint whose weights a new run begins with, all but those of the positional scheme;
    init_positional: those as well.
    """

    steps: int = 1000
    accumulate: int = 1
    seed: int = 42
    loss_chunk: int = 4096
    log_every: int = 1
    eval_every: int = 0
    eval_batches: int = 8
    save_every: int = 1000
    keep: int = 2
    keep_every: int = 0
    tensorboard: bool = True
    init_from: str = ""
    init_positional: bool = False

    def __post_init__(self) -> None:
        _positive("train", self, "steps", "accumulate", "loss_chunk", "log_every", "eval_batches", "keep")
        _not_negative("train", self, "seed", "eval_every", "save_every", "keep_every")
        _below("train", self, 31, "steps")
        _below("train", self, 32, "seed")  # JAX's keys drop higher bits, so two seeds would be one
        if not self.init_from:
            _refuse_idle("train", self, "train.init_from=", "init_positional")


@dataclass(frozen=True)
class MeshConfig:
    """Over how many devices a run is spread: data × fsdp × tensor × context (docs/scaling.md).

    data: the rows of a batch; fsdp: rows as well, with parameters and optimiser state cut up and gathered layer by
    layer; tensor: heads and the width of the MLP; context: the tokens of a row.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        _positive("mesh", self, "data", "fsdp", "tensor", "context")

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.tensor * self.context


@dataclass(frozen=True)
class Config:
    """Everything that a run needs: the model, its data, its optimiser, the loop and the devices."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        _divides("data.batch_size", self.data.batch_size, "train.accumulate", self.train.accumulate)
        _spreads_evenly(self)


ALIASES = {"position": "model.position"}


def get(name: str, *overrides: str) -> Config:
    """The configuration called `name` with `section.key=value` overrides, checked as a whole.

    `position=…` is short for `model.position=…`. Unknown names and keys raise ValueError with the nearest that exist.
    A head_dim, kv_heads or train_length that followed from another key keeps following it when that key is overridden.
    """
    return override(named(name), *overrides)


def override(base: Config, *overrides: str) -> Config:
    """`get` on a configuration that is at hand."""
    return _overrides.override(base, [*overrides, *_followers(base, overrides)], ALIASES)


def names() -> list[str]:
    """Every named configuration."""
    from bampath.named import NAMED  # here, because bampath.named builds its configurations from this file's classes

    return list(NAMED)


def named(name: str) -> Config:
    """The configuration called `name` as it is registered. ValueError with the nearest name if there is none."""
    from bampath.named import NAMED

    if name not in NAMED:
        near = difflib.get_close_matches(name, NAMED, n=1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise ValueError(f"no configuration is called {name!r}{hint} There are: {', '.join(NAMED)}")
    return NAMED[name]()


def _followers(base: Config, overrides: Sequence[str]) -> list[str]:
    """Overrides for the keys that follow from overridden ones, unless they are given themselves."""
    given = dict(_overrides.split_overrides(overrides, ALIASES))
    model = base.model
    derived = []
    if {"model.dim", "model.heads"} & set(given) and model.head_dim * model.heads == model.dim:
        derived.append("model.head_dim=0")
    if "model.heads" in given and model.kv_heads == model.heads:
        derived.append("model.kv_heads=0")
    if "data.sequence_length" in given and model.train_length == base.data.sequence_length:
        derived.append(f"model.train_length={given['data.sequence_length']}")
    return [entry for entry in derived if entry.partition("=")[0] not in given]


def to_json(config: Config) -> str:
    """The resolved configuration as JSON text, every key written out."""
    return json.dumps(_overrides.to_dict(config), indent=2)


def from_json(text: str) -> Config:
    """The configuration of `to_json`'s text; unknown keys, wrong types and impossible values are refused."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise TypeError(f"a configuration is a JSON object, not a {type(values).__name__}")
    return _overrides.from_dict(Config, values)


def read(path: Path) -> Config:
    """The configuration in a file that holds `to_json`'s text. ValueError that names the file if it holds none."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no configuration: {error}") from error


def describe(config: Config, base: Config | None = None) -> str:
    """One line per key, grouped by section; keys that differ from `base` are marked with `*` and its value."""
    lines = []
    before = _overrides.flat(base) if base is not None else {}
    for key, value in _overrides.flat(config).items():
        changed = key in before and before[key] != value
        lines.append(f"{'*' if changed else ' '} {key:<24} {value}" + (f"   (was {before[key]})" if changed else ""))
    return "\n".join(lines)


def reference() -> str:
    """Every key with its type and default, under the explanation of its section: the text of a command's help."""
    hints = get_type_hints(Config)
    sections = {field.name: hints[field.name] for field in fields(Config)}
    blocks = []
    for section, cls in sections.items():
        lines = [f"{section}.*", textwrap.indent(inspect.cleandoc(cls.__doc__ or ""), "  "), ""]
        lines += [f"  {section}.{key:<22} {kind}" for key, kind in _overrides.document(cls)]
        blocks.append("\n".join(lines))
    shortcuts = "\n".join(f"  {short} is short for {full}" for short, full in ALIASES.items())
    return "\n\n".join([*blocks, shortcuts])


def _positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{section}.{name}={getattr(config, name)} must be greater than 0")


def _not_negative(section: str, config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{section}.{name}={getattr(config, name)} must not be negative")


def _below(section: str, config: Any, bits: int, *names: str) -> None:
    for name in names:
        if getattr(config, name) >= 1 << bits:
            raise ValueError(f"{section}.{name}={getattr(config, name)} must be below 2^{bits}: it has {bits} bits")


def _refuse_idle(section: str, config: Any, beside: str, *names: str) -> None:
    """ValueError for an option that was changed although nothing reads it."""
    for name in names:
        default = type(config).__dataclass_fields__[name].default
        if getattr(config, name) != default:
            raise ValueError(
                f"{section}.{name}={getattr(config, name)} has no effect with {beside}; leave it at {default}"
            )


def _divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if divisor <= 0 or value % divisor:
        raise ValueError(f"{name}={value} is not divisible by {divisor_name}={divisor}")


def _spreads_evenly(config: Config) -> None:
    """ValueError for a dimension that its mesh axes do not divide: XLA would pad it, or keep it whole, silently."""
    model, data, mesh = config.model, config.data, config.mesh
    rows = data.batch_size // config.train.accumulate
    for name in ("heads", "kv_heads", "mlp_dim"):
        _divides(f"model.{name}", getattr(model, name), "mesh.tensor", mesh.tensor)
    _divides("model.vocab_size", model.vocab_size, "mesh.tensor × mesh.fsdp", mesh.tensor * mesh.fsdp)
    _divides("model.dim", model.dim, "mesh.fsdp", mesh.fsdp)
    _divides("data.batch_size / train.accumulate", rows, "mesh.data × mesh.fsdp", mesh.data * mesh.fsdp)
    if mesh.context > 1:  # two chunks per device
        _divides("data.sequence_length", data.sequence_length, "2 × mesh.context", 2 * mesh.context)
    tokens = mesh.context * mesh.tensor
    _divides("data.sequence_length", data.sequence_length, "mesh.context × mesh.tensor", tokens)


def _choices(section: str, config: Any) -> None:
    """ValueError for a Literal field whose value is not one of its choices."""
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_args(kind) and all(isinstance(a, str) for a in get_args(kind)) and value not in get_args(kind):
            raise ValueError(f"{section}.{name}={value!r} is not one of {', '.join(get_args(kind))}")
