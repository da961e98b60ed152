"""Which tensor of a Llama-family file is which array of the model, and how one becomes the other.

transformers keeps a linear map as [out, in] with heads flattened; bampath as [in, …] with heads and head_dim apart.
Both directions move numbers without arithmetic, so that a round trip gives back every bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bampath.config import ModelConfig
from bampath.convert.families import ConversionError

Array = np.ndarray
Convert = Callable[[Array], Array]


@dataclass(frozen=True)
class Tensor:
    """One tensor: its name and shape in the file, the path of its array, and the ways there and back."""

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    ours: Convert
    theirs: Convert


def tensors_of(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the model, in the file's usual order."""
    c = config
    same: Convert = lambda x: x
    yield Tensor("model.embed_tokens.weight", (c.vocab_size, c.dim), ("embedding",), same, same)
    for i in range(c.layers):
        theirs, ours = f"model.layers.{i}.", (f"layer_{i}",)
        yield Tensor(f"{theirs}input_layernorm.weight", (c.dim,), (*ours, "attention_norm", "scale"), same, same)
        yield from _attention(c, f"{theirs}self_attn.", (*ours, "attention"))
        yield Tensor(f"{theirs}post_attention_layernorm.weight", (c.dim,), (*ours, "mlp_norm", "scale"), same, same)
        for name in ("gate", "up", "down"):
            shape = (c.dim, c.mlp_dim) if name == "down" else (c.mlp_dim, c.dim)
            yield Tensor(f"{theirs}mlp.{name}_proj.weight", shape, (*ours, "mlp", name), np.transpose, np.transpose)
    yield Tensor("model.norm.weight", (c.dim,), ("final_norm", "scale"), same, same)
    if not c.tie_embeddings:
        yield Tensor("lm_head.weight", (c.vocab_size, c.dim), ("head",), np.transpose, np.transpose)


def _attention(c: ModelConfig, theirs: str, ours: tuple[str, ...]) -> Iterator[Tensor]:
    for letter, name, heads in (("q", "query", c.heads), ("k", "key", c.kv_heads), ("v", "value", c.kv_heads)):
        flat = heads * c.head_dim
        into: Convert = lambda x, h=heads: x.T.reshape(c.dim, h, c.head_dim)  # type: ignore[misc]
        back: Convert = lambda x: x.reshape(c.dim, -1).T
        yield Tensor(f"{theirs}{letter}_proj.weight", (flat, c.dim), (*ours, name), into, back)
        if c.qkv_bias:
            split: Convert = lambda x, h=heads: x.reshape(h, c.head_dim)  # type: ignore[misc]
            yield Tensor(f"{theirs}{letter}_proj.bias", (flat,), (*ours, f"{name}_bias"), split, np.ravel)
        if c.qk_norm and name != "value":
            spread: Convert = lambda x, h=heads: np.broadcast_to(x, (h, c.head_dim)).copy()  # type: ignore[misc]
            path = (*ours, f"{name}_norm", "scale")
            yield Tensor(f"{theirs}{letter}_norm.weight", (c.head_dim,), path, spread, lambda x: x[0])
    shape = (c.dim, c.heads * c.head_dim)
    out: Convert = lambda x: x.T.reshape(c.heads, c.head_dim, c.dim)
    yield Tensor(f"{theirs}o_proj.weight", shape, (*ours, "out"), out, lambda x: x.reshape(-1, c.dim).T)


def place(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """tree[path[0]][path[1]]… = value, making the dicts on the way."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def take(tree: Any, path: tuple[str, ...]) -> Any:
    """tree[path[0]][path[1]]…; ConversionError if it is not there."""
    for depth, name in enumerate(path):
        if name not in tree:
            raise ConversionError(f"the parameters have no {'/'.join(path[: depth + 1])}")
        tree = tree[name]
    return tree
