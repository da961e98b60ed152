"""A model of one positional scheme as the beginning of a model of another.

Everything that means the same in both is copied; what the new scheme adds starts as it would in a fresh model, by the
options of its spec; what only the old one had is dropped. Nothing is guessed: a report says which is which.

For `path` from a model without it, the published conversion (arXiv 2505.16381, section 4.3) does not say how w and beta
start. Here they are the scheme's own: with `path(bias=-4)` the products begin near the identity (beta = 0.04), with the
default beta = 1 they reflect from the first step on.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bampath import runs
from bampath.checkpoint import Saver
from bampath.config import Config, ModelConfig
from bampath.data import Tokenizer
from bampath.model import LM
from bampath.overrides import to_dict
from bampath.params import unbox
from bampath.positions.registry import parse


@dataclass(frozen=True)
class Report:
    """Names of arrays: copied as they were, made anew, and dropped."""

    loaded: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"loaded   {len(self.loaded)} arrays"]
        for title, names in (("new", self.new), ("dropped", self.dropped)):
            lines.append(f"{title:<8} {len(names)} arrays" + (":" if names else ""))
            lines += [f"  {name}" for name in names]
        return "\n".join(lines)


def transplant(
    config: ModelConfig, params: Any, position: str, *, seed: int = 0
) -> tuple[ModelConfig, dict[str, Any], Report]:
    """(configuration, parameters, report) of the model with another scheme.

    Arrays are matched by name and shape: a positional part that both schemes have (as `bam` in `bam` → `bam+ssmax`)
    keeps its parameters where its options leave them their shapes. seed: of what is made anew. ValueError for a wrong
    spec, or parameters that are not those of `config`.
    """
    after = replace(config, position=parse(position).name)
    fresh = _flat(_fresh(after, seed))
    old, expected = _flat(params), jax.eval_shape(lambda: _fresh(config, seed))
    wrong = sorted(set(old) ^ set(_flat(expected)))
    if wrong:
        raise ValueError(f"the parameters are not those of {config.position!r}: they differ in {wrong[0]}")
    fits = lambda name: name in old and old[name].shape == fresh[name].shape
    made: dict[str, Any] = {}
    for name, value in fresh.items():
        *parents, last = name.split("/")
        node = made
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = old[name] if fits(name) else value
    report = Report(
        loaded=tuple(name for name in fresh if fits(name)),
        new=tuple(name for name in fresh if not fits(name)),
        dropped=tuple(name for name in old if name not in fresh or not fits(name)),
    )
    return after, made, report


def write_start(folder: Path, config: Config, params: Any, tokenizer: Tokenizer) -> None:
    """A run's folder with one checkpoint of step 0, without optimiser state."""
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_config(config, folder)
    facts = {"config": to_dict(config), "data": {}, "tokenizer": tokenizer.fingerprint, "elapsed": 0.0}
    with Saver(folder) as saver:
        saver.save(0, params, {}, facts, dict([tokenizer.file]) if tokenizer.file else {})


def _fresh(config: ModelConfig, seed: int) -> Any:
    return unbox(LM(config).init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"])


def _flat(tree: Any) -> dict[str, Any]:
    """{"layer_0/attention/query": array, …}"""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}
