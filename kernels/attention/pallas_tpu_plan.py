"""What a TPU attention kernel is specialised for: padded sizes, blocks, and which tiles a block meets.

Arrays reach the kernels transposed, [batch, heads, head_dim, length]. A TPU tiles the last two dimensions by (8, 128)
((16, 128) for bfloat16): head_dim 64 as the last one would be stored, and moved, as 128; as the second to last, head
dimensions that are multiples of 16 cost nothing. A tile of scores is [keys, queries], so maxima and sums over keys run
down the sublanes, and everything that belongs to a query is one row.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from kernels.attention.call import Call

LANES = 128
MAX_DIM = 256
VMEM_LIMIT = 48 * 2**20  # of 64 MiB (v5p) or 128 MiB (v5e, v6e)
RESIDENT_DQ = 16 * 2**20  # bytes of dq that may stay in VMEM, which lets one kernel compute every gradient


def _pad(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def block_size(length: int, dim: int, itemsize: int, backward: bool) -> int:
    """Rows of a block: 512, halved while the tiles of wide heads or of float32 would not fit comfortably."""
    block = 512
    if dim * itemsize > 256:
        block //= 2
    if backward and dim * itemsize > 512:
        block //= 2
    return min(block, _pad(length, LANES))


@dataclass(frozen=True)
class Plan:
    """Static; hashable. Sizes are the real ones unless they are called padded."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    queries: int
    keys: int
    dtype: Any
    causal: bool
    window: int | None
    positions: bool  # explicit ones
    segments: bool
    prior: Any  # log_prior or None
    table: bool  # the prior comes as a table over distance, and is not computed in the tile
    gates: bool
    sharpness: bool
    sharpen_prior: bool
    scale: float
    unseen_keys: bool  # nothing proves that every key is seen by some query
    block_q: int
    block_k: int
    fused_backward: bool  # dq of a whole row stays in VMEM

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def sublanes(self) -> int:
        return 8 * 4 // self.dtype.itemsize

    @property
    def padded_dim(self) -> int:
        return _pad(self.dim, self.sublanes)

    @property
    def padded_v_dim(self) -> int:
        return _pad(self.v_dim, self.sublanes)

    @property
    def q_blocks(self) -> int:
        return -(-self.queries // self.block_q)

    @property
    def k_blocks(self) -> int:
        return -(-self.keys // self.block_k)

    @property
    def padded_queries(self) -> int:
        return self.q_blocks * self.block_q

    @property
    def padded_keys(self) -> int:
        return self.k_blocks * self.block_k

    @property
    def shift(self) -> int:
        """Default position of the first query."""
        return self.keys - self.queries

    @property
    def bounded(self) -> bool:
        """Blocks carry the extents of their positions and segments."""
        return self.positions or self.segments

    @property
    def ragged(self) -> bool:
        """The last block of keys has padding that no other mask hides."""
        hidden = self.segments or (self.causal and not self.positions)
        return self.padded_keys != self.keys and not hidden

    @property
    def masked(self) -> bool:
        """Some tile needs a mask."""
        return self.causal or self.window is not None or self.segments or self.ragged

    @property
    def dead_queries(self) -> bool:
        """Some query may see no key."""
        return self.positions or self.segments or self.queries > self.keys

    @property
    def exact_scale(self) -> bool:
        """The scale is a power of two, so that q · scale is exact in any float type."""
        return abs(math.frexp(self.scale)[0]) == 0.5

    # ---- Tiles that a block meets under default positions (every tile otherwise) ----

    def keys_of(self, i: Any) -> tuple[Any, Any]:
        """First and last block of keys that queries of block i may see; last < first when there is none."""
        first, last = 0, self.k_blocks - 1
        if self.positions:
            return first, last
        low = i * self.block_q + self.shift
        high = low + self.block_q - 1
        reach = 0 if self.window is None else self.window - 1
        if self.causal or self.window is not None:
            last = _least(last, _floor(high + (0 if self.causal else reach), self.block_k))
        if self.window is not None:
            first = _floor(_most(low - reach, 0), self.block_k)
        return first, last

    def queries_of(self, j: Any) -> tuple[Any, Any]:
        """First and last block of queries that may see keys of block j."""
        first, last = 0, self.q_blocks - 1
        if self.positions:
            return first, last
        low = j * self.block_k - self.shift
        high = low + self.block_k - 1
        reach = 0 if self.window is None else self.window - 1
        if self.causal or self.window is not None:
            first = _floor(_most(low - (0 if self.causal else reach), 0), self.block_q)
        if self.window is not None:
            last = _least(last, _floor(high + reach, self.block_q))
        return first, last

    @property
    def key_steps(self) -> int:
        """Most blocks of keys that a block of queries meets, at least 1."""
        return max(1, *(last - first + 1 for first, last in map(self.keys_of, range(self.q_blocks))))

    @property
    def query_steps(self) -> int:
        return max(1, *(last - first + 1 for first, last in map(self.queries_of, range(self.k_blocks))))

    def key_block(self, i: Any, step: Any) -> Any:
        """Block to hold in VMEM at a step of query block i; past the last one it stays, so nothing is copied."""
        first, last = self.keys_of(i)
        return _most(_least(first + step, last), 0)

    def query_block(self, j: Any, step: Any) -> Any:
        first, last = self.queries_of(j)
        return _most(_least(_least(first + step, last), self.q_blocks - 1), 0)


def _floor(x: Any, size: int) -> Any:
    """x // size for |x| < 2**30, Python's rule for negative x; int or traced."""
    if isinstance(x, int):
        return x // size
    lift = 2**30 // size + 1  # the hardware's division rounds towards zero
    return lax.div(x + lift * size, jnp.int32(size)) - lift


def _least(x: Any, y: Any) -> Any:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def _most(x: Any, y: Any) -> Any:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


def make_plan(call: Call, backward: bool) -> Plan:
    """The plan of a call for one pass; the prior is computed in the tile."""
    batch, queries, heads, dim = call.q.shape
    _, keys, kv_heads, v_dim = call.v.shape
    size = lambda length: block_size(length, max(dim, v_dim), call.q.dtype.itemsize, backward)
    row_of_dq = 4 * (heads // kv_heads) * _pad(queries, size(queries)) * _pad(dim, 16)
    return Plan(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        v_dim=v_dim,
        queries=queries,
        keys=keys,
        dtype=jnp.dtype(call.q.dtype),
        causal=call.causal,
        window=call.window,
        positions=call.q_positions is not None,
        segments=call.q_segments is not None,
        prior=None if call.prior is None else call.prior.log_prior,
        table=False,
        gates=call.gates is not None,
        sharpness=call.sharpness is not None,
        sharpen_prior=call.sharpen_prior,
        scale=call.scale,
        unseen_keys=not call.every_key_is_seen(),
        block_q=size(queries),
        block_k=size(keys),
        fused_backward=row_of_dq <= RESIDENT_DQ // 2,  # Pallas holds two buffers of it
    )
