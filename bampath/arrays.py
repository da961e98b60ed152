"""The arrays of a tree in words: names, shapes, types and placements, and how two such listings differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class ArrayInfo:
    """One array of a checkpoint, as it was when saved: name is its path, placement its sharding in words."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize


def index(tree: Any) -> tuple[ArrayInfo, ...]:
    """Names, shapes, types and placements of the arrays (or ShapeDtypeStructs) of a tree."""
    return tuple(
        ArrayInfo(_name(path), tuple(leaf.shape), str(np.dtype(leaf.dtype)), _placement(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )


def differences(a: Sequence[ArrayInfo], b: Sequence[ArrayInfo], a_name: str, b_name: str) -> list[str]:
    """Arrays that only one of two listings has, or that differ in shape or type, in words and in order."""
    left, right = {x.name: x for x in a}, {x.name: x for x in b}
    lines = []
    for name in dict.fromkeys([*left, *right]):
        if name not in right:
            lines.append(f"{name} {_kind(left[name])} is only in {a_name}")
        elif name not in left:
            lines.append(f"{name} {_kind(right[name])} is only in {b_name}")
        elif _kind(left[name]) != _kind(right[name]):
            lines.append(f"{name} is {_kind(left[name])} in {a_name} and {_kind(right[name])} in {b_name}")
    return lines


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _kind(array: ArrayInfo) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def _placement(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return "host"
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"{sharding.spec} on ({mesh})"
    devices = sorted(str(device) for device in sharding.device_set)
    return devices[0] if len(devices) == 1 else f"{len(devices)} devices"
