"""The mesh of a run, and which one is in use while a program is traced."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from bampath.config import Config, MeshConfig

AXES = ("data", "fsdp", "tensor", "context")
BATCH = ("data", "fsdp")  # the axes that rows of a batch are spread over

_current: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The mesh data × fsdp × tensor × context over `devices` (default: all of them); None for a mesh of one device.

    Neighbours on the mesh are neighbours in the machine where its topology is known. ValueError with both numbers if
    there are too few devices, or (with several processes, or devices that were given) others than the mesh has places.
    """
    shape = tuple(getattr(config, name) for name in AXES)
    size = config.size
    if size == 1 and devices is None and jax.process_count() == 1:
        return None
    found = jax.devices() if devices is None else list(devices)
    spare = devices is None and jax.process_count() == 1
    if size > len(found) or (size < len(found) and not spare):
        product = " × ".join(f"mesh.{name}={n}" for name, n in zip(AXES, shape, strict=True))
        raise ValueError(f"{product} is a mesh of {size} devices, but there are {len(found)}")
    grid = mesh_utils.create_device_mesh(shape, found[:size], allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@cache
def _mesh(config: MeshConfig) -> Mesh | None:
    return make_mesh(config)


def mesh_of(config: Config) -> Mesh | None:
    """The mesh of a run on this machine's devices; None for one device."""
    return _mesh(config.mesh)


@contextmanager
def use(mesh: Mesh | None) -> Iterator[None]:
    """Trace what is inside for `mesh`: `constrain`, `weight` and the attention of the model follow it."""
    token = _current.set(mesh)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Mesh | None:
    """The mesh that is in use; None for one device."""
    return _current.get()
