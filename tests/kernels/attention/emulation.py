"""The bodies of the Mosaic GPU attention kernels, run on CPU one operation at a time.

What Pallas, loops and conditionals do on the GPU is done in Python: shared memory is a NumPy array, copies and products
are immediate, barriers do nothing. Warpgroups run one after the other, the one that moves data first, so a kernel needs
as many stages as it walks tiles: this shows what a kernel computes, not that its barriers are right.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.attention import (
    mosaic_gpu,
    mosaic_gpu_backward,
    mosaic_gpu_backward_keys,
    mosaic_gpu_forward,
    mosaic_gpu_spec,
)

Array = jax.Array
IDS: dict[str, Array] = {}  # of the grid and the warpgroup


def _places(index: Any) -> tuple[Any, ...]:
    def place(i: Any) -> Any:
        if i is Ellipsis or isinstance(i, slice):
            return i
        return slice(int(i.start), int(i.start) + int(i.size)) if isinstance(i, pl.Slice) else int(i)

    return tuple(map(place, index if isinstance(index, tuple) else (index,)))


class Ref:
    """A piece of memory; `at` gives a part of it, cut off where memory ends."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def at(self) -> Any:
        return _At(self)

    def __getitem__(self, index: Any) -> Array:
        return jnp.asarray(self.array[_places(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[_places(index)] = np.asarray(value)

    def transpose(self, axes: tuple[int, ...]) -> "Ref":
        return Ref(self.array.transpose(axes))


class _At:
    def __init__(self, ref: Ref) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> Ref:
        return Ref(self.ref.array[_places(index)])


class Barrier:
    """Barriers, and the one that an index picks."""

    at = property(lambda self: self)

    def __getitem__(self, _: Any) -> "Barrier":
        return self


def _load(source: Ref, target: Ref, _: Any) -> None:
    """As the copy engine: what lies past the end is 0."""
    inside = tuple(slice(0, n) for n in source.array.shape)
    target.array[...] = 0
    target.array[inside] = source.array


def _store(source: Ref, target: Ref) -> None:
    target.array[...] = source.array[tuple(slice(0, n) for n in target.array.shape)]


def _multiply(total: Ref, a: Any, b: Ref) -> None:
    left = a.array if isinstance(a, Ref) else np.asarray(a)
    total.array += left.astype(np.float32) @ b.array.astype(np.float32)


class Accumulator:
    """plgpu.ACC: the shape of one, or with `init` its first value."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.value = np.zeros(shape, dtype)

    @classmethod
    def init(cls, value: Array) -> "Accumulator":
        made = cls((), np.float32)
        made.value = np.array(value)
        return made


def _run_scoped(run: Callable[..., Any], *accumulators: Accumulator) -> Any:
    return run(*(Ref(a.value) for a in accumulators))


def _run_state(run: Callable[[Any], None]) -> Callable[[Any], Any]:
    def go(state: Any) -> Any:
        of = lambda value: Ref(value.value if isinstance(value, Accumulator) else np.array(value))
        refs = jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, Accumulator))
        run(refs)
        return jax.tree.map(lambda ref: jnp.asarray(ref.array), refs, is_leaf=lambda x: isinstance(x, Ref))

    return go


def _fori_loop(low: Any, high: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    for i in range(int(low), int(high)):
        carry = body(jnp.int32(i), carry)
    return carry


def _loop(low: Any, high: Any) -> Callable[[Callable[[Any], None]], None]:
    return lambda body: _fori_loop(low, high, lambda i, _: body(i), None)


def _when(condition: Any) -> Callable[[Callable[[], None]], None]:
    return lambda run: run() if bool(condition) else None


def _allocate(types: Any) -> Any:
    if isinstance(types, dict):
        return {name: _allocate(t) for name, t in types.items()}
    if isinstance(types, Barrier):
        return types
    return Ref(np.full(types.shape, np.nan if jnp.issubdtype(types.dtype, jnp.floating) else -77, types.dtype))


def _kernel(
    body: Any, *, out_type: Any, scratch_types: Any, grid: Any, grid_names: Any, num_threads: int, **_: Any
) -> Any:
    def call(*arrays: Array) -> list[Array]:
        inputs = [Ref(np.asarray(a)) for a in arrays]
        outputs = [_allocate(o) for o in out_type]
        for place in itertools.product(*map(range, grid)):
            IDS.update(zip(grid_names, map(jnp.int32, place), strict=True))
            memory = [_allocate(t) for t in scratch_types]
            for group in (num_threads - 1, *range(num_threads - 1)):
                IDS["wg"] = jnp.int32(group)
                body(*inputs, *outputs, *memory)
        return [jnp.asarray(o.array) for o in outputs]

    return call


def _tile(table: Ref, base: Any, columns: int, sign: int, entries: int, pairs: bool) -> Array:
    assert not pairs
    row, column = np.arange(64)[:, None], np.arange(columns)[None]
    return jnp.asarray(table.array[int(base) + sign * (column - row)])


def _sums(x: Array) -> Array:
    return x.reshape(64, -1, 8).sum(1)


class _Instead:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def install(patch: pytest.MonkeyPatch, tiles: tuple[str, str, str]) -> None:
    """Serve "mosaic_gpu" on this machine, with these tiles (forward, queries, keys). Call under jax.disable_jit."""
    nothing = lambda *_, **__: None
    silent = ("barrier_wait", "barrier_arrive", "commit_smem", "wait_smem_to_gmem", "set_max_registers", "wgmma_wait")
    shaped = lambda shape, dtype, transforms=(): jax.ShapeDtypeStruct(shape, dtype)
    gpu = _Instead(
        plgpu,
        **dict.fromkeys(silent, nothing),
        **{"kernel": _kernel, "ACC": Accumulator, "SMEM": shaped, "Barrier": lambda **_: Barrier()},
        **{"wgmma": _multiply, "copy_gmem_to_smem": _load, "copy_smem_to_gmem": _store},
        wgmma_accumulator_load=lambda ref, wait_n: jnp.asarray(ref.array.copy()),
        layout_cast=lambda x, layout: x,
        load=lambda ref, layout, optimized=True: jnp.asarray(ref.array.copy()),
        broadcasted_iota=lambda dtype, shape, axis, layout: lax.broadcasted_iota(dtype, shape, axis),
        CompilerParams=nothing,
    )
    python = _Instead(
        lax,
        fori_loop=_fori_loop,
        axis_index=IDS.__getitem__,
        cond=lambda condition, yes, no: yes() if bool(condition) else no(),
        optimization_barrier=lambda x: x,
    )
    flow = _Instead(pl, run_scoped=_run_scoped, run_state=_run_state, loop=_loop, when=_when)
    for module in (mosaic_gpu_spec, mosaic_gpu_forward, mosaic_gpu_backward, mosaic_gpu_backward_keys):
        for name, instead in (("plgpu", gpu), ("lax", python), ("pl", flow)):
            patch.setattr(module, name, instead)
    patch.setattr(mosaic_gpu_spec, "toeplitz_tile", _tile)
    totals = lambda tile, tables, base, sign, entries, pairs: [
        _sums(tile * _tile(t, base, tile.shape[1], sign, entries, pairs)) for t in tables
    ]
    patch.setattr(mosaic_gpu_backward, "toeplitz_totals", totals)
    patch.setattr(mosaic_gpu_backward, "partial_dot", lambda a, b: _sums(a * b))
    zeros_after = lambda tile, columns: jnp.pad(tile, ((0, 0), (0, columns - tile.shape[1])))
    patch.setattr(mosaic_gpu_forward, "with_zeros", zeros_after)
    for module in (mosaic_gpu_backward, mosaic_gpu_backward_keys):
        patch.setattr(module, "partial_sum", _sums)
    attend, chosen = mosaic_gpu.attend, tuple(map(mosaic_gpu_spec.Tiles.parse, tiles))
    patch.setattr(mosaic_gpu, "_check_room", nothing)
    patch.setattr(mosaic_gpu, "supports", mosaic_gpu.refusal)
    patch.setattr(mosaic_gpu, "attend", lambda call: attend(call, tiles=chosen))
