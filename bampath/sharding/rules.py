"""Where arrays live: parameters by the logical axes they were declared with, activations by what their axes mean.

Stored: "heads", "kv_heads" and "mlp" are cut over tensor, "embed" of matrices over fsdp; embedding and head by "vocab"
over both, in pieces that are whole rows. Vectors (norms, biases, priors) are small and whole but for their heads.
Optimiser moments lie with their parameters.
Used: a weight is gathered over fsdp where it is multiplied, in the compute type, and its gradient is added up and cut
again at once; heads and the MLP's width stay cut.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bampath.sharding.mesh import BATCH, current

Array = jax.Array
Axes = tuple[str | None, ...]

TENSOR_AXES = ("heads", "kv_heads", "mlp")
TABLE = ("tensor", "fsdp")  # what the vocabulary is cut over
ACTIVATIONS: dict[str, Any] = {"batch": BATCH, "length": "context"}


def stored(axes: Axes, role: str) -> P:
    """Placement of a parameter, its gradient and its moments."""

    def place(name: str | None) -> str | tuple[str, ...] | None:
        if name == "vocab":
            return TABLE
        if name in TENSOR_AXES:
            return "tensor"
        return "fsdp" if name == "embed" and role == "matrix" else None

    return P(*map(place, axes))


def _used(axes: Axes) -> P:
    return P(*("tensor" if name in TENSOR_AXES else None for name in axes))


def weight(x: Array, axes: Axes, role: str = "matrix") -> Array:
    """A parameter ready to be multiplied: gathered over fsdp, still cut over tensor. Nothing without a mesh."""
    mesh = current()
    if mesh is None:
        return x
    return _moved(x, NamedSharding(mesh, _used(axes)), NamedSharding(mesh, stored(axes, role)))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: Array, used: NamedSharding, kept: NamedSharding) -> Array:
    """x placed as `used`, its gradient as `kept`: otherwise the gradient would be whole everywhere before it is cut.

    x itself is held at `kept` first: otherwise a compiler may gather what x was cast from, in twice as many bytes.
    """
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, kept), used)


_moved.defvjp(
    lambda x, used, kept: (_moved(x, used, kept), None),
    lambda used, kept, _, gradient: (jax.lax.with_sharding_constraint(gradient, kept),),
)


def constrain(x: Array, *names: str | None) -> Array:
    """x with its axes placed by name: "batch", "length", or None for an axis that is not cut."""
    mesh = current()
    if mesh is None:
        return x
    spec = P(*(ACTIVATIONS.get(name) if name else None for name in names))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def replicated(mesh: Mesh | None) -> jax.sharding.Sharding:
    """The same on every device of the mesh, or on the one device of a run without a mesh.

    Everything of a run is put somewhere explicitly: arrays that JAX placed by default make another program, so that a
    resumed run would compile its step once more, and differently.
    """
    return NamedSharding(mesh, P()) if mesh is not None else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def batch_sharding(mesh: Mesh | None) -> jax.sharding.Sharding:
    """Of arrays [B, T]."""
    return replicated(None) if mesh is None else NamedSharding(mesh, P(BATCH, "context"))


def local_rows(mesh: Mesh | None, rows: int) -> np.ndarray:
    """Which rows of a batch of `rows` rows lie on devices of this process: int64, in order.

    Processes that share rows (their devices differ along tensor or context only) each have them.
    """
    every = np.arange(rows, dtype=np.int64)
    if mesh is None:
        return every
    pieces = NamedSharding(mesh, P(BATCH)).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([every[index] for index in pieces.values()]))


def place_batch(batch: dict[str, Any], mesh: Mesh | None, rows: int) -> dict[str, Array]:
    """Arrays [local_rows(mesh, rows), T] as global arrays [rows, T], rows over data and fsdp, tokens over context."""
    if mesh is None:
        return jax.device_put(batch, replicated(None))
    sharding, mine = batch_sharding(mesh), local_rows(mesh, rows)

    def whole(array: Any) -> Array:
        if len(array) != len(mine):
            raise ValueError(f"a batch has {len(array)} rows, but this process holds {len(mine)} of {rows}")

        def piece(index: Any) -> Any:
            first, end, _ = index[0].indices(rows)
            start = int(np.searchsorted(mine, first))  # a device's rows are neighbours, also among those of its process
            return array[start : start + end - first, index[1]]

        return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, piece)

    return {name: whole(array) for name, array in batch.items()}


def parameter_shardings(axes: Any, roles: Any, mesh: Mesh) -> Any:
    """The placement of every parameter, from the trees of their axes and roles."""
    place = lambda role, names: NamedSharding(mesh, stored(names, role))
    return jax.tree.map(place, roles, axes, is_leaf=lambda node: isinstance(node, str))


def state_shardings(state: Any, axes: Any, roles: Any, mesh: Mesh | None) -> Any:
    """The placement of every array of an (abstract) train state.

    An array whose path ends with a parameter's path and has its number of axes lies with that parameter: its moments,
    whatever optimiser keeps them. Everything else is on every device.
    """
    if mesh is None:
        return jax.tree.map(lambda _: replicated(None), state)
    known = jax.tree_util.tree_leaves_with_path(parameter_shardings(axes, roles, mesh))
    ranks = {_keys(path): len(sharding.spec) for path, sharding in known}
    by_path = {_keys(path): sharding for path, sharding in known}

    def place(path: Any, leaf: Any) -> NamedSharding:
        keys = _keys(path)
        for start in range(len(keys)):
            if ranks.get(keys[start:]) == leaf.ndim:
                return by_path[keys[start:]]
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(place, state)


def _keys(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
