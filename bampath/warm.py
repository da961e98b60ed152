"""A new run that begins with another run's weights: everything but what belongs to the positional scheme.

Arrays are matched by name and shape, nothing is renamed or guessed, and a report says what became of every one. The
optimiser, the step, the data and the random key start anew.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from bampath import checkpoint
from bampath.checkpoint import ArrayInfo, CheckpointError
from bampath.config import Config
from bampath.data import Tokenizer

_SHOWN = 20


@dataclass(frozen=True)
class Plan:
    """Which arrays of a checkpoint a model takes over. loaded: from the checkpoint; missing: as a fresh model has them,
    because the checkpoint lacks them or they are positional; unused: of the checkpoint, and in no place."""

    path: Path
    step: int
    loaded: tuple[ArrayInfo, ...]
    missing: tuple[ArrayInfo, ...]
    unused: tuple[ArrayInfo, ...]

    def __str__(self) -> str:
        lines = [f"weights of {self.path} ({self.step} steps); optimiser, step and data start anew"]
        for title, arrays in (("loaded", self.loaded), ("missing, so fresh", self.missing), ("unused", self.unused)):
            count = sum(array.size for array in arrays)
            lines.append(f"  {title}: {len(arrays)} arrays of {count:,} parameters" + (":" if arrays else ""))
            names = collapsed(array.name for array in arrays)
            more = [f"… and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
            lines += [f"    {name}" for name in [*names[:_SHOWN], *more]]
        return "\n".join(lines)


def positional(name: str) -> bool:
    """Whether an array belongs to the positional scheme: of a layer, shared by layers, or added to the input."""
    return any(re.match(r"(input_|shared_)?position(_|$)", part) for part in name.split("/"))


def plan(config: Config, shapes: Any, tokenizer: Tokenizer) -> Plan:
    """What a run of `config` takes over from `train.init_from`. shapes: the model's (abstract) parameters.

    CheckpointError if there is no such checkpoint, it was trained with another tokenizer, an array has another shape,
    or nothing but fresh parameters would be left.
    """
    info = checkpoint.describe(config.train.init_from)
    if info.tokenizer != tokenizer.fingerprint:
        raise CheckpointError(
            f"train.init_from={info.path} was trained with the tokenizer of fingerprint {info.tokenizer}, but "
            f"data.tokenizer={config.data.tokenizer!r} has {tokenizer.fingerprint}: its embeddings mean other tokens"
        )
    wanted = lambda array: config.train.init_positional or not positional(array.name)
    ours, theirs = checkpoint.index(shapes), {array.name: array for array in info.params if wanted(array)}
    pairs = [(array, theirs.get(array.name)) for array in ours if wanted(array)]
    _refuse_shapes(info.path, [(a, b) for a, b in pairs if b is not None and a.shape != b.shape])
    loaded = tuple(array for array, other in pairs if other is not None)
    if not loaded:
        raise CheckpointError(f"train.init_from={info.path} has none of this model's arrays")
    names = {array.name for array in loaded}
    missing = tuple(array for array in ours if array.name not in names)
    return Plan(info.path, info.step, loaded, missing, tuple(a for a in info.params if a.name not in names))


def take_over(plan: Plan, like: Any, draw: Callable[[], Any]) -> Any:
    """Parameters of the types and in the places of `like` (abstract): the plan's from the checkpoint, others fresh.

    draw: () -> all fresh parameters, traceable. Only what is missing is compiled, nothing if all is there: the
    initialisation of a deep model can take longer to compile than a short run takes.
    """
    names = {array.name for array in plan.missing}
    if names:
        where = jax.tree.map(lambda leaf: leaf.sharding, _only(like, names))
        like = _merged(like, jax.jit(lambda: _only(draw(), names), out_shardings=where)())
    chosen = _only(like, {array.name for array in plan.loaded})
    return _merged(like, checkpoint.read_some(plan.path, chosen))


def _refuse_shapes(path: Path, pairs: Sequence[tuple[ArrayInfo, ArrayInfo]]) -> None:
    if pairs:
        lines = [f"\n  {a.name} is {list(b.shape)} there and {list(a.shape)} here" for a, b in pairs[:5]]
        more = f"\n  … and {len(pairs) - 5} more" if len(pairs) > 5 else ""
        raise CheckpointError(f"train.init_from={path} is of a model of another shape:{''.join(lines)}{more}")


def collapsed(names: Iterable[str]) -> list[str]:
    """Names in order, those that differ in the number of the layer only as one: `layer_{0–11}/mlp/up`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        found = re.match(r"layer_(\d+)/", name)
        key = re.sub(r"^layer_\d+/", "layer_{}/", name)
        layers.setdefault(key, []).extend([int(found.group(1))] if found else [])
    return [key.replace("{}", _ranges(sorted(found)), 1) if found else key for key, found in layers.items()]


def _ranges(numbers: list[int]) -> str:
    """`0–3,7` of 0, 1, 2, 3, 7; in braces unless it is one number."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    text = ",".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))
    return text if len(numbers) == 1 else f"{{{text}}}"


def _only(tree: Any, names: set[str], at: str = "") -> Any:
    """The nested dict `tree` with the leaves of these names only."""
    if not isinstance(tree, dict):
        return tree
    chosen = {key: (value, f"{at}{key}") for key, value in tree.items()}
    return {
        key: _only(value, names, f"{name}/")
        for key, (value, name) in chosen.items()
        if (name in names if not isinstance(value, dict) else any(n.startswith(f"{name}/") for n in names))
    }


def _merged(params: Any, read: Any) -> Any:
    """`params` with the leaves of `read` in their places."""
    if not isinstance(params, dict):
        return read
    return {key: _merged(value, read[key]) if key in read else value for key, value in params.items()}
