"""PaTH: keys are carried to the query by a product of data-dependent Householder-like reflections."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from bampath.positions.conv import empty_conv
from bampath.positions.directions import directions
from bampath.positions.options import option
from bampath.positions.projections import project
from bampath.positions.slots import Geometry, Param, Part, SlotName, Slots, Tokens

Array = jax.Array


@dataclass(frozen=True)
class PaTH(Part):
    """logit_ij = s · q_iᵀ H_i H_{i-1} … H_{j+1} k_j,  H_t = I - beta_t w_t w_tᵀ,  one (w, beta) per key head and token.

    (arXiv 2505.16381, section 3; parameterisation of the authors' code in flash-linear-attention.)
    w_t: x_t → low-rank projection (`w_down` [dim, rank], `w_up` [rank, Hkv, D]; rank=full: `w` [dim, Hkv, D]) →
    depthwise causal convolution over the document (`conv` [width, Hkv, D]) and SiLU → float32 L2 norm w / √(Σ w² + eps)
    per head. beta_t = min(2 sigmoid(u · x_t + b), beta_max), `beta_kernel` [dim, Hkv], `beta_bias` [Hkv] from `bias`:
    at 0 every transition starts as a projection (beta = 1), and a key has faded after about head_dim tokens. Matrices
    and convolution start from N(0, 0.02). `path+fox` multiplies in FoX's gates; scale_gates puts them inside the scale
    s, as the released code does (the paper reads as outside, the default). Takes neither a window nor explicit
    positions: keys travel along the row.
    """

    NAME: ClassVar[str] = "path"
    SLOT: ClassVar[SlotName] = "transport"
    CARRIES_KEYS: ClassVar[bool] = True

    rank: int | Literal["full"] = option(32, doc="rank of w's projection", examples=("rank=4",))
    conv: int = option(3, doc="width of the convolution; 0 leaves it and its SiLU out", examples=("conv=0", "conv=2"))
    silu: bool = option(True, doc="SiLU after the convolution")
    beta_max: float = option(
        2.0,
        doc="upper clip of beta; 1.9921875 (2 - 2⁻⁷) is safe when 16-bit arithmetic touches it",
        examples=("beta_max=1.9",),
    )
    bias: float = option(0.0, doc="start of beta's bias; negative: keys start almost unmoved", examples=("bias=-3",))
    eps: float = option(1e-6, doc="added under the root of the norm", examples=("eps=1e-5",))
    scale_gates: bool = option(False, doc="with fox: gates inside the scale s")

    def validate(self) -> None:
        if self.rank != "full" and self.rank < 1:
            raise ValueError(f"path: rank is {self.rank} but must be at least 1, or full")
        if self.conv < 0:
            raise ValueError(f"path: conv is {self.conv} but must be 0 (off) or a width")
        if not self.silu and self.conv == 0:
            raise ValueError("path: option silu has no effect with conv=0, which leaves out the SiLU as well")
        if not 0 < self.beta_max <= 2:
            raise ValueError(f"path: beta_max is {self.beta_max} but must be in (0, 2]")
        if self.eps <= 0:
            raise ValueError(f"path: eps is {self.eps} but must be positive")

    def check(self, others: tuple[Part, ...]) -> None:
        window = [part.spec for part in others if part.SLOT == "visibility"]
        if window:
            raise ValueError(f"path and {window[0]} cannot be combined: a product of reflections has no window")
        if self.scale_gates and not any(part.GATES for part in others):
            raise ValueError("path(scale_gates=true) scales gates, but the spec has none: add fox, or drop the option")

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        heads, normal = (geometry.kv_heads, geometry.head_dim), nn.initializers.normal(0.02)
        names = ("kv_heads", None)
        if self.rank == "full":
            found = {"w": Param((geometry.dim, *heads), normal, ("embed", *names), "matrix")}
        else:
            found = {
                "w_down": Param((geometry.dim, self.rank), normal, ("embed", None), "matrix"),
                "w_up": Param((self.rank, *heads), normal, (None, *names), "matrix"),
            }
        if self.conv:
            found["conv"] = Param((self.conv, *heads), normal, (None, *names), "conv")
        found["beta_kernel"] = Param((geometry.dim, geometry.kv_heads), normal, ("embed", "kv_heads"), "matrix")
        found["beta_bias"] = Param((geometry.kv_heads,), nn.initializers.constant(self.bias), ("kv_heads",), "bias")
        return found

    def narrow(self, params: dict[str, Array]) -> dict[str, Array]:
        return {name: params[name] for name in ("w_down", "beta_kernel") if name in params}

    def init_carry(self, geometry: Geometry, batch: int, dtype: Any) -> Any:
        if self.conv < 2:
            return None
        return empty_conv(self.conv, geometry.kv_heads * geometry.head_dim, batch)

    def fill(
        self, params: dict[str, Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        x, narrow = tokens.x, tokens.products(self, params)
        if self.rank == "full":
            w = project(x, params["w"], rounded=True)
        else:
            w = project(narrow["w_down"].astype(x.dtype), params["w_up"], rounded=True)
        w, carry = directions(w, params.get("conv"), tokens, carry, self.silu, self.eps)
        beta = 2 * jax.nn.sigmoid(narrow["beta_kernel"] + params["beta_bias"][None, None, :])
        real = (tokens.segment_ids >= 0)[:, :, None]  # padding moves nothing
        beta = jnp.where(real, jnp.minimum(beta, self.beta_max), 0)
        return replace(slots, householder=(w, beta), scale_gates=self.scale_gates), carry
