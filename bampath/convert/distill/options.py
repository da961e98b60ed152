"""Which stages a distillation has, and `key=value` words that change them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from bampath import overrides
from bampath.config import ALIASES, Config, ModelConfig, OptimConfig, TrainConfig
from bampath.positions.registry import parse

Kind = Literal["attention", "logits", "text"]
Error = Literal["mse", "norm"]

# What a student may have otherwise than its teacher: its positions, and how both are computed.
FREE = ("position", "train_length", "dtype", "remat", "scan", "attention_impl", "init", "init_std")
SHORT = {
    "steps": "train.steps",
    "lr": "optim.lr",
    "schedule": "optim.schedule",
    "warmup": "optim.warmup_steps",
    "batch": "data.batch_size",
    "length": "data.sequence_length",
}
OWN = ("kind", "error", "temperature", "rest")

# Rates, batches, lengths and tokens of stages 1 and 2 are those of fla-org/hybrid-distillation (docs/conversion.md):
# 100M and 600M tokens. PaTH's paper states its tokens only (100M, 3B); stage 3 is a beginning, it trained on 21B.
RECIPE: tuple[dict[str, str], ...] = (
    {"kind": "attention", "steps": "2035", "batch": "96", "length": "512", "lr": "1e-3", "optim.lr_end": "0"},
    {"kind": "logits", "steps": "4578", "batch": "32", "length": "4096", "lr": "1e-4", "schedule": "constant",
     "rest": "0.07"},
    {"kind": "text", "steps": "1000", "batch": "32", "length": "4096", "lr": "1e-4", "optim.lr_end": "0"},
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One stage. kind: "attention" (outputs of attention on the teacher's hidden states), "logits" (KL of the next
    token's distribution) or "text" (ordinary training). config: the student's model with this stage's text, optimiser
    and loop. error: of "attention", "mse" or "norm"; temperature: of "logits"; rest: factor on the learning rate of
    everything outside the attention layers, 0 leaves it as it is."""

    name: str
    kind: Kind
    config: Config
    error: Error = "mse"
    temperature: float = 1.0
    rest: float = 1.0

    def __post_init__(self) -> None:
        idle = {"attention": ("temperature", "rest"), "logits": ("error",), "text": ("error", "temperature", "rest")}
        for option, choices in (("kind", Kind), ("error", Error)):
            if getattr(self, option) not in get_args(choices):
                value = getattr(self, option)
                raise ValueError(f"{self.name}.{option}={value!r} is not one of {', '.join(get_args(choices))}")
        for option in idle[self.kind]:
            default = type(self).__dataclass_fields__[option].default
            if getattr(self, option) != default:
                value = getattr(self, option)
                raise ValueError(f"{self.name}.{option}={value} has no effect with {self.name}.kind={self.kind}")
        if self.kind != "text" and self.config.train.eval_every:
            raise ValueError(f"train.eval_every has no effect in {self.name}; write stage3.train.eval_every")
        if not self.temperature > 0 or not 0 <= self.rest < float("inf"):
            raise ValueError(
                f"{self.name}: temperature={self.temperature} must be positive, rest={self.rest} at least 0"
            )


def stages_of(teacher: Config, words: Sequence[str]) -> tuple[Stage, ...]:
    """The stages of `words` for a teacher, those with steps=0 left out.

    words: `position=SPEC`, `section.key=value` for all stages, `stageN.key=value` for one (N = 1, 2, 3), where key is
    kind, error, temperature, rest, steps, lr, schedule, warmup, batch, length or section.key. ValueError at once for
    anything unknown, and for a student that would not have its teacher's architecture.
    """
    general: dict[str, str] = {}
    own: list[dict[str, str]] = [{} for _ in RECIPE]
    for key, value in overrides.split_overrides(words, ALIASES):
        number, dot, rest = key.removeprefix("stage").partition(".")
        if not key.startswith("stage") or not dot:
            general[key] = value
            continue
        if number not in ("1", "2", "3"):
            raise ValueError(f"{key}: there are the stages stage1, stage2 and stage3")
        own[int(number) - 1][_long(rest, key)] = value
    if "model.position" not in general:
        raise ValueError("position=SPEC is missing: the scheme of the student, such as position=path+fox")
    found = [_stage(teacher, index, general, own[index]) for index in range(len(RECIPE))]
    stages = tuple(stage for stage in found if stage is not None)
    if not stages:
        raise ValueError("every stage has steps=0: nothing would be trained")
    return stages


def _long(key: str, word: str) -> str:
    if key in OWN or key in SHORT:
        return SHORT.get(key, key)
    if key.startswith("model."):
        raise ValueError(f"{word}: the model is the same in all stages; write {key} without a stage")
    if "." not in key:
        raise ValueError(f"{word}: a stage has {', '.join((*OWN, *SHORT))}, or any section.key")
    return key


def _stage(teacher: Config, index: int, general: dict[str, str], own: dict[str, str]) -> Stage | None:
    name, recipe = f"stage{index + 1}", {_long(key, key): value for key, value in RECIPE[index].items()}
    changed = own.get("kind", recipe["kind"]) != recipe["kind"]
    if changed:  # the recipe's options of another kind mean nothing to it
        recipe = {key: value for key, value in recipe.items() if key not in OWN}
    recipe["data.sequence_length"] = str(min(int(recipe["data.sequence_length"]), teacher.model.train_length))
    words = {**recipe, **general, **own}
    special = {key: words.pop(key) for key in OWN if key in words}
    if words["train.steps"] == "0":
        return None
    base = replace(
        teacher,
        optim=OptimConfig(name="adamw", weight_decay=0.0),
        train=TrainConfig(log_every=10, save_every=500, tensorboard=False),
    )
    model_words = [f"{key}={value}" for key, value in words.items() if key.startswith("model.")]
    refuse_other_architecture(teacher.model, overrides.override(base, model_words, ALIASES).model)
    config = overrides.override(base, [f"{key}={value}" for key, value in words.items()], ALIASES)
    config = replace(config, model=replace(config.model, position=parse(config.model.position).name))
    if config.mesh.size > 1:
        raise ValueError("mesh: distillation runs on one device; spread stage 3 with experiments.train --init-from")
    if config.train.init_from:
        raise ValueError("train.init_from: a stage begins with the weights of the one before it")
    options: dict[str, Any] = {"kind": RECIPE[index]["kind"], **special}
    for key in ("temperature", "rest"):
        if key in options:
            options[key] = overrides.parse_value(float, options[key], f"{name}.{key}")
    return Stage(name=name, config=config, **options)


def refuse_other_architecture(teacher: ModelConfig, student: ModelConfig, whose: str = "the student") -> None:
    """ValueError unless both have the same arrays but for their positional schemes, the vocabulary first."""
    names = ["vocab_size", *(f.name for f in fields(ModelConfig) if f.name not in FREE and f.name != "vocab_size")]
    for name in names:
        ours, theirs = getattr(student, name), getattr(teacher, name)
        if ours != theirs:
            raise ValueError(
                f"model.{name} is {ours} in {whose} and {theirs} in its teacher: a student has its teacher's "
                "architecture, only position may differ"
            )
