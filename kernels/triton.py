"""What all kernels written in Pallas-Triton share: which GPUs take them, tiles, products, and how they are called."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Array = jax.Array
LARGEST_HEAD = 256
SHARED_MEMORY = {"8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}  # KiB of a block


# ---- Tiles ----


@dataclass(frozen=True)
class Tiles:
    """A block of `rows` of one side walks the other side in steps of `step`."""

    rows: int
    step: int
    warps: int = 4
    stages: int = 2

    @classmethod
    def parse(cls, text: str) -> "Tiles":
        """The inverse of str: "128x64x4x3" is 128 rows, steps of 64, 4 warps, 3 stages."""
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.rows}x{self.step}x{self.warps}x{self.stages}"

    def shared_memory(self, head_dim: int, itemsize: int) -> int:
        """Estimate in bytes: per stage two arrays [step, D] and a float32 tile of the prior, once two arrays [rows, D]
        and one [step, D] for changes of layout. Triton 3.6 takes less for sm_90 with every entry of the table of tiles.
        """
        stage = itemsize * 2 * head_dim * self.step + 4 * self.rows * self.step
        return self.stages * stage + itemsize * head_dim * (2 * self.rows + self.step)

    def fitted(self, head_dim: int, itemsize: int, room: int) -> "Tiles":
        """These tiles, smaller if they do not fit into `room` bytes: fewer stages, shorter steps, then fewer rows."""
        tiles = self
        while tiles.shared_memory(head_dim, itemsize) > room:
            if tiles.stages > 1:
                tiles = replace(tiles, stages=tiles.stages - 1)
            elif tiles.step > 16:
                tiles = replace(tiles, step=tiles.step // 2)
            elif tiles.rows > 16:
                tiles = replace(tiles, rows=tiles.rows // 2)
            else:
                break
        return tiles


class Chosen(NamedTuple):
    """Tiles of the three kernels of an attention."""

    forward: Tiles
    queries: Tiles
    keys: Tiles


def padded_head(dim: int) -> int:
    """The power of two, 16 at least, that a head_dim is padded to."""
    return max(16, 1 << (dim - 1).bit_length())


# ---- Machines ----


def capability() -> str:
    """Compute capability of the first device, or why there is none."""
    if jax.default_backend() != "gpu":
        return f"none: the default backend is {jax.default_backend()}"
    return str(getattr(jax.devices()[0], "compute_capability", "unknown"))


def machine_lacks() -> str | None:
    """None, or what keeps these kernels from running here."""
    found = capability()
    if not found[:1].isdigit() or float(found) < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0 or later, found {found}"
    return None


def room_on(device: str) -> int:
    """Bytes of shared memory that a block can have on a GPU of that compute capability; the least known if unknown."""
    return 1024 * SHARED_MEMORY.get(device, min(SHARED_MEMORY.values()))


def refusal(q: Array, v: Array, device: str, choose_tiles: Callable[[int, int, int], Chosen]) -> str | None:
    """None, or why the dtype and head dimensions of q and v (…, D and Dv last) are too much for a GPU of compute
    capability `device`. choose_tiles: (padded head_dim, bytes of a number, bytes of shared memory) -> tiles."""
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"q, k and v must be bfloat16, float16 or float32, got {q.dtype}"
    head = max(q.shape[-1], v.shape[-1])
    if head > LARGEST_HEAD:
        return f"head_dim {head} is more than {LARGEST_HEAD}"
    wide, size, room = padded_head(head), q.dtype.itemsize, room_on(device)
    for name, chosen in choose_tiles(wide, size, room)._asdict().items():
        need = chosen.shared_memory(wide, size)
        if need > room:
            return f"the {name} kernel needs about {need} bytes of shared memory, this GPU has {room}"
    return None


# ---- Kernels ----


def product(a: Array, b: Array, contract: tuple[int, int], exact: bool, interpret: bool) -> Array:
    """Matrix product with float32 sums; exact: of float32 operands split into three TF32 terms."""
    precision: Any = None
    if exact:
        precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def launch(
    body: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    arrays: dict[str, Array],
    outputs: dict[str, Any],
    *,
    warps: int,
    stages: int,
    interpret: bool,
) -> dict[str, Array]:
    """Run `body(names, *refs)` on a grid, with every array whole; refs and names are those of `arrays`, then of
    `outputs` (their shapes).

    name: what profiles show. warps, stages: of a program; interpret: emulate it instead of compiling it.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    params: Any = {}
    if not interpret:
        params["compiler_params"] = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    run = pl.pallas_call(
        partial(body, (*arrays, *outputs)),
        grid=grid,
        in_specs=[whole] * len(arrays),
        out_specs=[whole] * len(outputs),
        out_shape=list(outputs.values()),
        interpret=interpret,
        name=name,
        **params,
    )
    return dict(zip(outputs, run(*arrays.values()), strict=True))
