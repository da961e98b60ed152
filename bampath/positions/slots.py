"""The four slots of attention that a positional scheme can fill, and what a part of a scheme looks like.

    p_ij ∝ exp( r_i · ( s · ⟨q_i, Φ_{i←j} k_j⟩ + Σ_a log π_a(i, j) ) ),   j visible from i

| slot      | what it is                                        | examples                         |
|-----------|---------------------------------------------------|----------------------------------|
| input     | a vector added to the token embedding             | sinusoidal, learned absolute     |
| transport | Φ: how a key is carried to the query's position   | RoPE, PaTH                       |
| prior     | log π: added to the logit, never stored as T × T  | ALiBi, GGD-BAM, KERPLE, T5, FoX  |
| sharpness | r: one factor per query and head                  | SSMax, log-n, temperature        |

A fifth name, `visibility`, limits which keys a query may see (a sliding window).
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
from flax import linen as nn
from flax import struct

from kernels.attention.api import DistancePrior

Array = jax.Array
SlotName = Literal["input", "transport", "prior", "sharpness", "visibility"]


@dataclass(frozen=True)
class Geometry:
    """What a scheme may know about the attention layer that it serves. `train_length` is the context in training."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    layer: int = 0
    layers: int = 1
    train_length: int = 512


@struct.dataclass
class Tokens:
    """The tokens that one call of a layer sees (in training the whole row, in decode the new tokens only).

    x [B, T, dim] normed input of the layer; positions [B, T] int32, restarting per document; counts [B, T] int32, number
    of keys visible to each query, itself included; segment_ids [B, T] int32, one id per document, negative for padding.
    """

    x: Array
    positions: Array
    counts: Array
    segment_ids: Array


@struct.dataclass
class Slots:
    """What the parts of a scheme have filled in for one layer; attention reads it and knows no scheme by name.

    q [B, T, H, D], k [B, T, Hkv, D] already rotated; log_gates [B, T, H] float32 ≤ 0; sharpness [B, T, H] float32;
    householder = (w [B, T, Hkv, D] unit vectors, beta [B, T, Hkv]), both float32.
    """

    q: Array
    k: Array
    prior: DistancePrior | None = None
    log_gates: Array | None = None
    sharpness: Array | None = None
    householder: tuple[Array, Array] | None = None
    sharpen_prior: bool = struct.field(pytree_node=False, default=True)
    scale_gates: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)


Carry = dict[str, Any]  # per-part state between calls in decode (for example the last inputs of a short convolution)


@dataclass(frozen=True)
class Part:
    """One term of a scheme, such as `bam` in `bam+ssmax`: an immutable description; its options are its fields.

    `module(geometry)` gives the Flax module that owns the part's parameters and fills its slot:

        slots, carry = module(slots, tokens, carry)

    where `carry` is None in training, and in decode a pytree of arrays with leading axis [B] (or None when the part
    keeps no state). Parts of the `input` slot give a module `module(positions [B, T]) -> [B, T, dim]` instead.
    """

    NAME: ClassVar[str] = ""
    SLOT: ClassVar[SlotName] = "prior"
    shared: bool = field(default=False, init=False, repr=False)  # True: one set of parameters for all layers

    def module(self, geometry: Geometry) -> nn.Module:
        raise NotImplementedError

    def init_carry(self, geometry: Geometry, batch: int, dtype: Any) -> Any:
        """State before the first token; None for a part without state."""
        return None

    def distance_prior(self, params: Any) -> DistancePrior | None:
        """The part's prior as a function of distance, from its own parameters; None if it has none."""
        return None
