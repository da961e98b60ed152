"""Learned absolute position vectors, added to the token embeddings."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from bampath.positions.options import option
from bampath.positions.slots import Geometry, Param, Part, SlotName

Array = jax.Array


@dataclass(frozen=True)
class Learned(Part):
    """e_p = row p of a learned table with one row per position (BERT, arXiv 1810.04805; GPT-2).

    Added once, before the first layer; `embedding` [rows, dim], N(0, 0.02). There is nothing to look up beyond the
    table: a call on more than `rows` tokens raises when it is traced. A position beyond the table that is only known at
    run time (decode) gives NaN, which cannot be mistaken for a prediction; it is never clamped to the last row.
    """

    NAME: ClassVar[str] = "learned"
    SLOT: ClassVar[SlotName] = "input"
    MAIN: ClassVar[str | None] = "rows"

    rows: int | None = option(None, doc="rows of the table; none: the training length", examples=("400",))

    def validate(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"learned: rows is {self.rows} but must be at least 1")

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        rows = self.rows or geometry.train_length
        return {"embedding": Param((rows, geometry.dim), nn.initializers.normal(0.02), (None, "embed"), "position")}

    def max_positions(self, geometry: Geometry) -> int | None:
        return self.rows or geometry.train_length

    def embed(self, params: dict[str, Array], geometry: Geometry, positions: Array) -> Array:
        table = params["embedding"]
        if positions.shape[-1] > table.shape[0]:
            raise ValueError(
                f"learned: {positions.shape[-1]} positions, but the table has {table.shape[0]} rows (the training "
                "length unless learned(rows) says otherwise); learned positions do not extend"
            )
        return jnp.take(table, jnp.maximum(positions, 0), axis=0, mode="fill", fill_value=jnp.nan)
