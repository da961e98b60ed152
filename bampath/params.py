"""Parameters that carry their own description: logical axes for sharding and a role for the optimiser.

The role is set where a parameter is declared, so weight decay, learning-rate groups and casts never depend on the
spelling of a name.
"""

from dataclasses import replace
from typing import Any, Literal, get_args

import jax
from flax import linen as nn
from flax import struct

Role = Literal["matrix", "embedding", "norm", "bias", "conv", "prior", "sharpness", "position"]
POSITIONAL_ROLES: tuple[Role, ...] = ("prior", "sharpness", "position")


@struct.dataclass
class Tagged(nn.meta.AxisMetadata[Any]):
    """A parameter with one logical axis name (or None) per dimension and one role."""

    value: Any
    axes: tuple[str | None, ...] = struct.field(pytree_node=False)
    role: Role = struct.field(pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Tagged":
        return replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Tagged":
        return replace(self, axes=(*self.axes[:index], params.get("name", "layers"), *self.axes[index:]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Tagged":
        return replace(self, axes=self.axes[:index] + self.axes[index + 1 :])


def tagged(init: Any, axes: tuple[str | None, ...], role: Role) -> Any:
    """Wrap an initialiser `init(key, shape, dtype)` for `module.param`, so that its value comes boxed in `Tagged`."""
    if role not in get_args(Role):
        raise ValueError(f"role={role!r} is not one of {', '.join(get_args(Role))}")

    def boxed(key: jax.Array, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Tagged:
        if len(axes) != len(shape):
            raise ValueError(f"axes={axes} name {len(axes)} dimensions, but the parameter has shape {shape}")
        return Tagged(init(key, shape, *args, **kwargs), axes, role)

    return boxed


def _is_tagged(node: Any) -> bool:
    return isinstance(node, Tagged)


def unbox(params: Any) -> Any:
    """The plain arrays of a tree of `Tagged` leaves (leaves that are not tagged pass through)."""
    return jax.tree.map(lambda leaf: leaf.value if _is_tagged(leaf) else leaf, params, is_leaf=_is_tagged)


def roles(params: Any) -> Any:
    """A tree of role strings with the structure of `unbox(params)`."""
    return jax.tree.map(lambda leaf: leaf.role, params, is_leaf=_is_tagged)


def axes(params: Any) -> Any:
    """A tree of logical axis-name tuples with the structure of `unbox(params)`."""
    return jax.tree.map(lambda leaf: leaf.axes, params, is_leaf=_is_tagged)
