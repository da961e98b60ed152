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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from bampath.params import Role, tagged
from bampath.positions import options
from bampath.positions.priors import PartPrior, combine
from bampath.positions.projections import project_together
from bampath.sharding import weight
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

    x [B, T, dim] normed input of the layer; positions [B, T] int32, restarting per document; counts [B, T] int32,
    number of keys visible to each query, itself included (a window may lower it further); segment_ids [B, T] int32, one
    id per document, negative for padding; made: what `products` gives, by part name, where it has been made already;
    implementation: of attention (`attention_impl`), if one is asked for by name."""

    x: Array
    positions: Array
    counts: Array
    segment_ids: Array
    made: dict[str, dict[str, Array]] = struct.field(default_factory=dict)
    implementation: str | None = struct.field(pytree_node=False, default=None)

    def products(self, part: "Part", params: dict[str, Array]) -> dict[str, Array]:
        """x times the matrices of `part.narrow`, [B, T, n] float32 or wider: made before for all parts, or now."""
        return self.made[part.NAME] if part.NAME in self.made else project_together(self.x, part.narrow(params))


@struct.dataclass
class Slots:
    """What the parts of a scheme have filled in for one layer; attention reads it and knows no scheme by name.

    q [B, T, H, D], k [B, T, Hkv, D] already rotated; log_gates [B, T, H] float32 ≤ 0; sharpness [B, T, H] float32;
    householder = (w [B, T, Hkv, D] unit vectors, beta [B, T, Hkv]), both float32; grids = (widths, offsets) of
    random blocks, [H, samples] each (`kernels.lsh`), combined as `combine` says.
    """

    q: Array
    k: Array
    prior: DistancePrior | None = None
    log_gates: Array | None = None
    sharpness: Array | None = None
    householder: tuple[Array, Array] | None = None
    grids: tuple[Array, Array] | None = None
    combine: Literal["shared", "mean"] = struct.field(pytree_node=False, default="shared")
    sharpen_prior: bool = struct.field(pytree_node=False, default=True)
    scale_gates: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)


Carry = dict[str, Any]  # per-part state between calls in decode (for example the last inputs of a short convolution)


@dataclass(frozen=True)
class Param:
    """How one parameter is made: `init(key, shape, dtype)`, logical axes (one name or None per dimension), its role."""

    shape: tuple[int, ...]
    init: Callable[..., Array]
    axes: tuple[str | None, ...]
    role: Role


@dataclass(frozen=True)
class Part:
    """One term of a scheme, such as `bam` in `bam+ssmax`: an immutable description; its options are its fields.

    A part describes its parameters (`parameters`) and gives pure functions of them: `fill` for a slot of attention (a
    part with a distance prior only writes `log_prior` and, if need be, `prior_params`), `embed` for the input slot.
    `module` wraps them in the one Flax module that owns the parameters:

        slots, carry = module(slots, tokens, carry)

    where `carry` is None in training, and in decode a pytree of arrays with leading axis [B] (or None when the part
    keeps no state). Parts of the `input` slot give a module `module(positions [B, T]) -> [B, T, dim]` instead.
    """

    NAME: ClassVar[str] = ""
    SLOT: ClassVar[SlotName] = "prior"
    MAIN: ClassVar[str | None] = None  # the option that a spec may give without its name, as in window(512)
    GATES: ClassVar[bool] = False  # fills log_gates
    CARRIES_KEYS: ClassVar[bool] = False  # a cache must keep its keys carried to the newest token, in float32
    DRAWS: ClassVar[bool] = False  # draws random numbers, in training from the rng "sample", differently in every layer
    BY_HAND: ClassVar[tuple[str, ...]] = ()  # what `distance_prior` takes beside the parameters, if it is given

    def __post_init__(self) -> None:
        options.check(self)
        self.validate()

    def validate(self) -> None:
        """Raise ValueError for option values that make no sense, alone or together."""

    def check(self, others: "tuple[Part, ...]") -> None:
        """Raise ValueError if this part cannot stand beside `others` in one composition."""

    @property
    def spec(self) -> str:
        """Canonical text of the part; default options are left out."""
        return options.canonical(self)

    @property
    def shared(self) -> bool:
        """True: one set of parameters for all layers."""
        return False

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        """Name -> description of each learned parameter; all are float32."""
        return {}

    def module(self, geometry: Geometry, name: str | None = None) -> nn.Module:
        """The module that owns the part's parameters and fills its slot."""
        return InputModule(self, geometry, name=name) if self.SLOT == "input" else PartModule(self, geometry, name=name)

    def reach(self, geometry: Geometry) -> int | None:
        """How many keys a query outside training looks back at, itself included, if that is bounded; None: all.

        A cache keeps a ring of so many keys per row for a part that has `grids`.
        """
        return None

    def max_positions(self, geometry: Geometry) -> int | None:
        """How many positions the part is defined for; None: any number."""
        return None

    def narrow(self, params: dict[str, Array]) -> dict[str, Array]:
        """Matrices [dim, n] that multiply the layer's input, for which `fill` asks `tokens.products`: those of all
        parts of a layer are one product."""
        return {}

    def init_carry(self, geometry: Geometry, batch: int, dtype: Any) -> Any:
        """State before the first token; None for a part without state."""
        return None

    def fill(
        self, params: dict[str, Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        """Slots with this part's slot filled, and the part's state after `tokens`. Default: add the distance prior."""
        prior = self.distance_prior(params, geometry.heads)
        return (slots if prior is None else replace(slots, prior=combine([slots.prior, prior]))), carry

    def embed(self, params: dict[str, Array], geometry: Geometry, positions: Array) -> Array:
        """What an input part adds to the token embeddings: [B, T, dim] float32."""
        raise NotImplementedError(f"{self.NAME} does not fill the input slot")

    def distance_prior(self, params: Any, heads: int | None = None) -> DistancePrior | None:
        """The part's prior as a function of distance, from its own parameters; None if it has none.

        `heads` is needed only by priors that learn nothing (their constants depend on it).
        """
        if type(self).log_prior is Part.log_prior:
            return None
        return DistancePrior(self.prior_params(params, heads), PartPrior(self))

    def prior_params(self, params: Any, heads: int | None) -> Any:
        """What the kernel gets, from the learned parameters: a pytree of float32 arrays with leading axis H."""
        return params

    def log_prior(self, params: Any, d: Array) -> Array:
        """Elementwise log π(d) of one head, d = key position - query position (int32, any shape) -> float32."""
        raise NotImplementedError(f"{self.NAME} has no distance prior")


def _declare(module: nn.Module, part: Part, geometry: Geometry) -> dict[str, Array]:
    """Declare a part's parameters on a module: float32 whatever the compute dtype, tagged with axes and role."""
    return {
        name: weight(module.param(name, tagged(p.init, p.axes, p.role), p.shape, jnp.float32), p.axes, p.role)
        for name, p in part.parameters(geometry).items()
    }


class PartModule(nn.Module):
    """Owns the parameters of a part that fills a slot of attention."""

    part: Part
    geometry: Geometry

    def setup(self) -> None:
        self.own = _declare(self, self.part, self.geometry)

    def narrow(self) -> dict[str, Array]:
        """See `Part.narrow`."""
        return self.part.narrow(dict(self.own))

    def __call__(self, slots: Slots, tokens: Tokens, carry: Any = None) -> tuple[Slots, Any]:
        return self.part.fill(dict(self.own), self.geometry, slots, tokens, carry)


class InputModule(nn.Module):
    """Owns the parameters of a part that is added to the token embeddings."""

    part: Part
    geometry: Geometry

    @nn.compact
    def __call__(self, positions: Array) -> Array:
        return self.part.embed(_declare(self, self.part, self.geometry), self.geometry, positions)
