"""Head_dims below 64 in the kernels of `gpu.py`: arrays narrower than the tiles that are read from and written to them.

Triton's tiles are powers of two, so the kernels work on 64 columns, of which those beyond head_dim are 0; products of
blocks are the identity there. In memory nothing is padded: loads and stores leave those columns out.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

Array = jax.Array
TILE = 64


def tile_width(dim: int) -> int:
    """Columns of the tiles that hold `dim`, and rows and columns of the products of blocks."""
    return max(dim, TILE)


def tiled(ref: Any) -> Any:
    """The ref [rows, (heads,) D], for kernels as if D were 64 where it is less."""
    return Narrow(ref) if len(ref.shape) > 1 and ref.shape[-1] < TILE else ref


@dataclass(frozen=True)
class Narrow:
    """What `ref[rows, (head,) columns]` is for a ref of 64 columns, for one that has fewer."""

    ref: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.ref.shape[:-1], TILE)

    @property
    def dtype(self) -> Any:
        return self.ref.dtype

    def place(self, index: Any) -> tuple[Any, Array]:
        """(pointers to a tile, a mask of what is there). All 64 columns are one tile, whatever its slice says."""
        rows, *head, _ = (slice(None),) * len(self.ref.shape) if index is Ellipsis else index
        start, size = (0, self.ref.shape[0]) if isinstance(rows, slice) else (rows.start, rows.size)
        row = start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        column = lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
        inside = jnp.broadcast_to(column < self.ref.shape[-1], (size, TILE))
        return self.ref.at[(row, *head, column)], inside

    def __getitem__(self, index: Any) -> Array:
        at, inside = self.place(index)
        return pltriton.load(at, mask=inside, other=0.0)

    def __setitem__(self, index: Any, tile: Array) -> None:
        at, inside = self.place(index)
        pltriton.store(at, tile, mask=inside)


def load_some(ref: Any, index: Any, some: Array) -> Array:
    """ref[index] where the mask `some` is set, else 0; ref: from `tiled`."""
    if isinstance(ref, Narrow):
        at, inside = ref.place(index)
        return pltriton.load(at, mask=inside & some, other=0.0)
    return pltriton.load(ref.at[index], mask=some, other=0.0)
