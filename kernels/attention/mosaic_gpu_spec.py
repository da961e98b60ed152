"""What a Mosaic GPU attention kernel is specialised for, the ranges of tiles it walks, and its shared buffers."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.attention.mosaic_gpu_tiles import table_buffer, table_chunks, toeplitz_tile

Array = jax.Array
LOG2E = 1.4426950408889634
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class Tiles:
    """Rows of one warpgroup are 64; a block has `groups` of them and walks the other side in steps of `step`."""

    groups: int = 2
    step: int = 128
    stages: int = 2
    pairs: bool = False  # read the prior's table two entries at a time

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def slice(self) -> int:
        """Entries of the prior's table that a tile of scores touches."""
        return self.rows + self.step

    def shared_memory(self, head_dim: int, itemsize: int, stationary: int, tables: int) -> int:
        """Estimate in bytes of what a kernel asks for: `stationary` arrays [rows, D], two streamed ones [stages, step,
        D], `tables` slices per stage, and room for the vectors of rows and columns."""
        matrices = itemsize * head_dim * (stationary * self.rows + 2 * self.stages * self.step)
        slices = 4 * tables * self.stages * (self.slice + (self.slice + 32 if self.pairs else 0))
        return matrices + slices + 4 * 8 * (self.rows + self.stages * self.step) + 1024

    @classmethod
    def parse(cls, text: str) -> "Tiles":
        """The inverse of str: "2x128x3p" is 2 groups, step 128, 3 stages, with pairs."""
        groups, step, stages = text.removesuffix("p").split("x")
        return cls(int(groups), int(step), int(stages), text.endswith("p"))

    def __str__(self) -> str:
        return f"{self.groups}x{self.step}x{self.stages}{'p' * self.pairs}"


@dataclass(frozen=True)
class Spec:
    """Static description of one call; lengths are the real ones, head_dim that of the arrays: a multiple of 8 up to 64,
    or of 64."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    scale: float
    causal: bool
    window: int | None
    prior: bool
    slopes: int  # tables of d(log prior)/d(parameter)
    own_slope: bool  # wanted: sums over the log-prior itself, as one more slope, from what the sharpness needs anyway
    sharpness: bool
    sharpen_prior: bool
    gates: bool
    segments: bool
    skip: bool = False  # gates: tiles that weigh nothing are left out

    def name(self, tiles: Tiles) -> str:
        """What tells kernels apart in compiler reports and profiles."""
        on = (self.prior, self.sharpness, self.gates, self.segments)
        flags = "".join(letter for letter, present in zip("psgd", on, strict=True) if present)
        return f"d{self.head_dim}_{tiles}_{flags}{self.slopes}"

    @property
    def columns(self) -> int:
        """Columns of the tiles of q, k, v, o and their gradients: head_dim, and zeros up to a multiple of 64."""
        return -(-self.head_dim // 64) * 64

    @property
    def offsets(self) -> bool:
        """Is anything added to the content term."""
        return self.prior or self.gates

    @property
    def folded(self) -> bool:
        """Does the sharpness multiply everything: then the backward kernels carry it inside d(logits)."""
        return self.sharpness and self.sharpen_prior

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def shift(self) -> int:
        """Key index that the first query is aligned with: queries end where the keys end."""
        return self.keys - self.queries

    @property
    def padded_queries(self) -> int:
        return -(-self.queries // 384) * 384

    @property
    def padded_keys(self) -> int:
        return -(-self.keys // 384) * 384

    @property
    def padded_stored(self) -> int:
        """Places in the array of keys, padded."""
        return self.padded_keys

    @property
    def origin(self) -> int:
        """Table index of distance 0 (query index − key index), chosen so that every slice starts on 16 bytes."""
        back = 768 if self.causal else self.padded_keys + 768 + max(-self.shift, 0)
        return -(-back // 4) * 4 - self.shift % 4

    @property
    def table_length(self) -> int:
        return -(-(self.origin + max(self.shift, 0) + self.padded_queries + 768) // 128) * 128

    def key_range(self, first: Array, tiles: Tiles) -> tuple[Array, Array, Array, Array]:
        """Tiles of keys for the block of queries at `first`: start, first and last unmasked, end."""
        q, last = first + self.shift, first + self.shift + tiles.rows - 1
        reach = None if self.window is None else self.window - 1
        ahead = 0 if self.causal else reach
        return self._range(
            first * 0,
            None if reach is None else q - reach,
            None if reach is None else last - reach,
            None if ahead is None else q + ahead,
            None if ahead is None else last + ahead,
            tiles.step,
            self.keys,
            ragged=True,
        )

    def query_range(self, first: Array, tiles: Tiles) -> tuple[Array, Array, Array, Array]:
        """Tiles of queries that see the block of keys at `first`: start, first and last unmasked, end."""
        k, last = first - self.shift, first - self.shift + tiles.rows - 1
        reach = None if self.window is None else self.window - 1
        behind = 0 if self.causal else reach
        return self._range(
            first * 0,
            None if behind is None else k - behind,
            None if behind is None else last - behind,
            None if reach is None else k + reach,
            None if reach is None else last + reach,
            tiles.step,
            self.queries,
            ragged=False,
        )

    def key_offset(self, first: Array) -> Array | int:
        """Rows between a key's index and its place in the array of keys, for the block of queries at `first`."""
        return 0

    def key_blocks(self, tiles: Tiles) -> int:
        """Blocks of the array of keys."""
        return -(-self.keys // tiles.rows)

    def key_block(self, block: Array, tiles: Tiles) -> tuple[Array, Array, tuple[Array, Array, Array, Array]]:
        """A block of keys: index of its first key, the place of that key in the array, tiles of queries that see it."""
        first = block * tiles.rows
        return first, first, self.query_range(first, tiles)

    def _range(
        self, zero: Array, low: Any, low_full: Any, high_full: Any, high: Any, step: int, length: int, ragged: bool
    ) -> tuple[Array, Array, Array, Array]:
        """Tiles between inclusive index bounds (None: open), and those inside for every row of the block.

        zero: 0, but not a literal, which kernel loops over accumulators cannot capture. ragged: the tile that the end
        of the sequence cuts needs a mask.
        """
        end = zero + -(-length // step)
        stop = end if high is None else _clip(self._floor(high, step) + 1, zero, end)
        start = zero if low is None else _clip(self._floor(low, step), zero, stop)
        full_stop = stop if high_full is None else _clip(self._floor(high_full + 1, step), start, stop)
        if ragged and length % step:
            full_stop = _clip(full_stop, start, lax.max(start, jnp.int32(length // step)))
        full_start = start if low_full is None else _clip(self._floor(low_full + step - 1, step), start, full_stop)
        return start, full_start, full_stop, stop

    def within(self, bounds: Any, batch: Array, head: Array, block: Array, walk: tuple[Array, ...]) -> Any:
        """A walk over tiles narrowed to the block's bounds, and its tiles without a mask to those of one segment.

        bounds: int32 [B, heads or 1, blocks, 2 or 4] in global memory, see `segment_bounds` and `keep_bounds`.
        """
        if not self.segments and not self.skip:
            return walk
        start, full_start, full_stop, stop = walk
        row = head if self.skip else head * 0
        start = _clip(bounds[batch, row, block, 0], start, stop)
        stop = _clip(bounds[batch, row, block, 1], start, stop)
        if self.segments:
            full_start = lax.max(full_start, bounds[batch, row, block, 2])
            full_stop = lax.min(full_stop, bounds[batch, row, block, 3])
        full_start = _clip(full_start, start, stop)
        return start, full_start, _clip(full_stop, full_start, stop), stop

    def _floor(self, x: Array, step: int) -> Array:
        """x // step, also for negative x."""
        lift = 2 * (self.queries + self.keys) // step + 8
        return lax.div(x + lift * step, jnp.int32(step)) - lift


def segment_bounds(ids: Array, others: Array, rows: int, step: int) -> Array:
    """Tiles of `step` others for each block of `rows` ids, int32 [B, 1, blocks, 4]: the first, and one past the last,
    that may share a segment with it; the same of a run of tiles that are of one segment with all of it (empty: none).

    ids [B, n], others [B, m] int32, negative: padding. Tiles are compared by their least and greatest id, so nothing
    that is shared is missed, and little else is kept where ids grow along the row.
    """

    def ends(x: Array, size: int) -> tuple[Array, Array, Array]:
        tiles = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-1).reshape(x.shape[0], -1, size)
        least, greatest = jnp.where(tiles < 0, jnp.iinfo(jnp.int32).max, tiles).min(-1), tiles.max(-1)
        return least, greatest, jnp.where(tiles.min(-1) == greatest, greatest, -1)

    (low, high, only), (other_low, other_high, other_only) = ends(ids, rows), ends(others, step)
    shared = (low[:, :, None] <= other_high[:, None, :]) & (other_low[:, None, :] <= high[:, :, None])
    last = shared.shape[2] - jnp.argmax(shared[:, :, ::-1], axis=2)
    some = shared.any(axis=2)
    one = (only[:, :, None] == other_only[:, None, :]) & (only >= 0)[:, :, None]
    begin = jnp.argmax(one, axis=2)
    broken = ~one & (jnp.arange(one.shape[2])[None, None, :] > begin[:, :, None])
    end = jnp.where(broken.any(axis=2), jnp.argmax(broken, axis=2), one.shape[2])
    inside = one.any(axis=2)
    pairs = ((some, jnp.argmax(shared, axis=2)), (some, last), (inside, begin), (inside, end))
    return jnp.stack([jnp.where(on, place, 0) for on, place in pairs], -1).astype(jnp.int32)[:, None]


def _clip(x: Array, low: Array, high: Array) -> Array:
    return lax.min(lax.max(x, low), high)


def matrix(spec: Spec, *shape: int) -> Any:
    """A shared-memory buffer of matrix tiles, laid out for wgmma."""
    return plgpu.SMEM(
        (*shape, spec.columns), spec.dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )


def rows_of(spec: Spec, source: Any, batch: Array, where: Any, head: Array) -> Any:
    """A stretch of a [B, length, heads, D] array as wide as the tiles: what the copy engine reads past D is 0, and what
    it writes there is dropped."""
    start = batch * 0 if spec.head_dim < spec.columns else 0  # a number that JAX knows may not lead past the end
    return source.at[batch, where, head, pl.ds(start, spec.columns)]


def vector(name: str, *shape: int) -> Any:
    """A shared-memory buffer for rows of a [B, H, length] (or, for segments, [B, length]) array."""
    return plgpu.SMEM(shape, jnp.int32 if name.endswith("segments") else jnp.float32)


def table(tiles: Tiles) -> Any:
    """A shared-memory buffer for a tile's slice of the prior's table, one per stage."""
    return plgpu.SMEM((tiles.stages, table_buffer(tiles.slice, tiles.pairs)), jnp.float32)


def read(ref: Any, layout: Any) -> Array:
    """The contents of a shared buffer as an array in a register layout."""
    load: Any = plgpu.load  # its signature differs between versions of JAX
    return load(ref, layout=layout)


def spread(line: Array, shape: tuple[int, int], axis: int = 0) -> Array:
    """A row statistic (axis 0) or a column statistic (axis 1) as a whole tile."""
    return lax.broadcast_in_dim(line, shape, (axis,))


def zeros(*shape: int) -> Array:
    """Float32 zeros where a product accumulates (two dimensions), or one per row of it."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else ROW
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def copy_vector(source: Any, name: str, batch: Array, head: Array, where: Any, target: Any, barrier: Any) -> None:
    """Start the copy of a stretch of a [B, H, length] (segments: [B, length]) array to shared memory."""
    at = source.at[batch, where] if name.endswith("segments") else source.at[batch, head, where]
    plgpu.copy_gmem_to_smem(at, target, barrier)


def copy_table(source: Any, first: Array, target: Any, barrier: Any, tiles: Tiles) -> None:
    """Start the copies of table entries [first, first + slice); source [copies, L], first a multiple of 4."""
    for copy, offset, place, size in table_chunks(tiles.slice, tiles.pairs):
        at = pl.multiple_of(first + offset, 4)
        plgpu.copy_gmem_to_smem(source.at[copy, pl.ds(at, size)], target.at[pl.ds(place, size)], barrier)


def copies_of_table(tiles: Tiles) -> int:
    """How many copies `copy_table` starts, for whoever waits for them."""
    return len(table_chunks(tiles.slice, tiles.pairs))


def offset_tile(
    spec: Spec,
    tiles: Tiles,
    table_ref: Any,
    base: Array,
    gates: Array | None,
    gain: tuple[Array, int] | None,
    sign: int,
) -> Array:
    """Prior plus gates [64, step] of a tile, in units of the content scale: where the score accumulator starts.

    sign −1: rows are queries; +1: rows are keys. gain: a factor along axis 0 or 1.
    """
    total = gates
    if spec.prior:
        prior = toeplitz_tile(table_ref, base, tiles.step, sign, tiles.slice, tiles.pairs)
        total = prior if gates is None else prior + gates
    assert total is not None
    return total if gain is None else total * spread(gain[0], (64, tiles.step), gain[1])


def gate_tile(spec: Spec, tiles: Tiles, rows: tuple[Array, Array], columns: tuple[Array, Array], sign: int) -> Array:
    """What gates add to a tile of scores, from the sums (hi, lo) of its rows and columns. sign as in `offset_tile`.

    The differences come first: the sums are long, and scaling them would round it away.
    """
    shape = (64, tiles.step)
    high, low = (spread(r, shape) - spread(c, shape, 1) for r, c in zip(rows, columns, strict=True))
    return (high + low) * (-sign / spec.scale)


def near_gates(spec: Spec, tiles: Tiles, arrays: dict[str, Array], name: str, place: int) -> Array | None:
    """Gate sums less that at `place` (0 or −1) of their tile, over the scale: [B, H, padded length].

    Only for tiles without a mask: every query comes after every key there, in one document, so a sum between theirs,
    that of the tile's last key or first query, splits the difference into two of one sign: neither rounds more than the
    whole may, and each needs only one number per row or column. None without gates.
    """
    if not spec.gates:
        return None
    high, low = (arrays[f"{name}_gate_{part}"] for part in ("hi", "lo"))
    chunks = lambda x: x.reshape(*x.shape[:2], -1, tiles.step)
    from_place = lambda x: chunks(x) - chunks(x)[..., place][..., None]
    return ((from_place(high) + from_place(low)) * (1 / spec.scale)).reshape(high.shape)


def lift(spec: Spec, sums: tuple[Array, Array], refs: tuple[Any, Any], slot: Array, place: int) -> Array:
    """The other part of the difference: sums (hi, lo) of rows less that at `place` of the tile in `slot` of `refs`."""
    high, low = (mine - ref[slot, place] for mine, ref in zip(sums, refs, strict=True))
    return (high + low) * (1 / spec.scale)


def visible(
    spec: Spec,
    first_query: Array,
    first_key: Array,
    shape: tuple[int, int],
    segments: tuple[Array, Array] | None,
    queries_are_rows: bool = True,
) -> Array:
    """Which scores of a tile count: causal order, window, segments (of rows, of columns) and the end of the keys."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, a, layout=plgpu.Layout.WGMMA) for a in (0, 1))
    q, k = (row, column) if queries_are_rows else (column, row)
    ahead = (q - k) + (first_query + spec.shift - first_key)
    seen = ahead >= 0 if spec.causal else k < spec.keys - first_key
    if spec.window is not None:
        seen = seen & (ahead < spec.window)
        if not spec.causal:
            seen = seen & (ahead > -spec.window)
    if segments is not None:
        seen = seen & (spread(segments[0], shape) == spread(segments[1], shape, 1))
    return seen
