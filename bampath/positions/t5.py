"""T5's relative bias: one learned number per head and bucket of distances."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from bampath.positions.options import option
from bampath.positions.slots import Geometry, Param, Part

Array = jax.Array


def bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """The first distance of each bucket: half of the buckets hold one distance each, the others grow geometrically
    up to max_distance, and the last takes everything beyond."""
    exact = buckets // 2
    ratio = max_distance / exact
    grown = [exact * ratio ** (k / (buckets - exact)) for k in range(buckets - exact)]
    return [*range(exact), *(math.ceil(start - 1e-9) for start in grown)]


@dataclass(frozen=True)
class T5(Part):
    """log π_h(d) = table[h, bucket(d)], d = j - i (T5, arXiv 1910.10683, section 2.1).

    Distances |d| < buckets/2 have a bucket each; the others are spaced logarithmically up to max_distance.
    bidirectional: half of the buckets for keys behind the query, half for those ahead; otherwise all for those behind.
    `table` [H, buckets] has variance 1/dim at the start, and as in T5 one serves all layers unless scope=layer. The
    bucket is found by comparing integers with the buckets' first distances, so no logarithm can be rounded across a
    border, and the gradient is a masked sum without scatter.
    """

    NAME: ClassVar[str] = "t5"

    buckets: int = option(32, doc="number of buckets", examples=("buckets=8",))
    max_distance: int = option(128, doc="distances from here on share the last bucket", examples=("max_distance=64",))
    bidirectional: bool = option(False, doc="separate buckets for keys ahead of the query")
    scope: Literal["global", "layer"] = option("global", doc="one table for all layers, or one per layer")

    @property
    def shared(self) -> bool:
        return self.scope == "global"

    @property
    def _per_side(self) -> int:
        return self.buckets // 2 if self.bidirectional else self.buckets

    def validate(self) -> None:
        smallest = 4 if self.bidirectional else 2
        if self.buckets < smallest or (self.bidirectional and self.buckets % 2):
            wanted = "an even number, at least 4 (bidirectional)" if self.bidirectional else "at least 2"
            raise ValueError(f"t5: buckets is {self.buckets} but must be {wanted}")
        if self.max_distance <= self._per_side // 2:
            raise ValueError(
                f"t5: max_distance is {self.max_distance} but must be greater than {self._per_side // 2}, the number "
                "of distances with a bucket of their own"
            )

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        start = nn.initializers.normal(geometry.dim**-0.5)
        return {"table": Param((geometry.heads, self.buckets), start, ("heads", None), "prior")}

    def prior_params(self, params: Any, heads: int | None) -> Any:
        table = params["table"]
        if table.ndim != 2 or table.shape[1] != self.buckets:
            raise ValueError(f"t5: table has shape {table.shape}; it must be [heads, {self.buckets}]")
        return {"table": table}

    def log_prior(self, params: Any, d: Array) -> Array:
        table = params["table"]
        if not self.bidirectional:
            return _look_up(table, self._starts, jnp.maximum(-d, 0))
        half = self._per_side
        behind, ahead = table[:half], table[half:]
        return jnp.where(d > 0, _look_up(ahead, self._starts, d), _look_up(behind, self._starts, -d))

    @property
    def _starts(self) -> list[int]:
        return bucket_starts(self._per_side, self.max_distance)


def _look_up(row: Array, starts: list[int], distance: Array) -> Array:
    """row[b] of the last bucket b that starts at or before each distance (distances < 0 count as bucket 0)."""
    value = jnp.broadcast_to(row[0], distance.shape)
    for bucket, start in enumerate(starts[1:], start=1):
        value = jnp.where(distance >= start, row[bucket], value)
    return value
