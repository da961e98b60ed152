"""FoX: a forget gate per head and token; what was forgotten on the way from j to i makes j less likely."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from bampath.positions.options import option
from bampath.positions.slots import Geometry, Param, Part, Slots, Tokens

Array = jax.Array


@dataclass(frozen=True)
class FoX(Part):
    """log π(i, j) = Σ_{l = j+1..i} log f_l,  f_t = sigmoid(w_h · x_t + b_h).

    The forget gate of the Forgetting Transformer (arXiv 2503.02130; code zhixuan-lin/forgetting-transformer), one per
    query head, from the layer's input; `kernel` [dim, H] is N(0, 0.02), `bias` [H] starts at `bias`. Two forms need no
    data: bias_only learns b_h alone, fixed learns nothing; both start from decay times T_h spaced evenly in log from
    decay_min to decay_max, with log f = -1/T, so that fixed is ALiBi with slopes 1/T. Needs causal attention.
    """

    NAME: ClassVar[str] = "fox"
    MAIN: ClassVar[str | None] = "gate"
    GATES: ClassVar[bool] = True

    gate: Literal["data", "bias_only", "fixed"] = option("data", doc="what decides the gate: the token, or nothing")
    bias: float = option(0.0, doc="gate=data: start of the bias; 0 means f = 1/2", examples=("bias=3",))
    decay_min: float = option(
        2.0,
        doc="bias_only, fixed: tokens until the first head has forgotten a factor e",
        examples=("bias_only,decay_min=4",),
    )
    decay_max: float | None = option(
        None, doc="the same for the last head; none: the training length", examples=("fixed,decay_max=99",)
    )

    def validate(self) -> None:
        default = type(self).__dataclass_fields__
        useless = ["decay_min", "decay_max"] if self.gate == "data" else ["bias"]
        for name in useless:
            if getattr(self, name) != default[name].default:
                raise ValueError(f"fox: option {name} has no effect with gate={self.gate}")
        if self.decay_min <= 0 or (self.decay_max is not None and self.decay_max < self.decay_min):
            raise ValueError(f"fox: 0 < decay_min <= decay_max is needed, got {self.decay_min} and {self.decay_max}")

    def decay_times(self, geometry: Geometry) -> list[float]:
        """T_h in tokens, for the gates without data."""
        last = max(geometry.train_length, self.decay_min) if self.decay_max is None else self.decay_max
        steps = max(geometry.heads - 1, 1)
        return [self.decay_min * (last / self.decay_min) ** (h / steps) for h in range(geometry.heads)]

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        heads = (geometry.heads,)
        if self.gate == "data":
            kernel = Param((geometry.dim, *heads), nn.initializers.normal(0.02), ("embed", "heads"), "matrix")
            return {"kernel": kernel, "bias": Param(heads, nn.initializers.constant(self.bias), ("heads",), "bias")}
        if self.gate == "bias_only":
            start = [-math.log(math.expm1(1 / t)) for t in self.decay_times(geometry)]  # sigmoid gives exp(-1/T)
            return {"bias": Param(heads, lambda key, shape, dtype: jnp.asarray(start, dtype), ("heads",), "prior")}
        return {}

    def narrow(self, params: dict[str, Array]) -> dict[str, Array]:
        return {"kernel": params["kernel"]} if self.gate == "data" else {}

    def fill(
        self, params: dict[str, Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        if self.gate == "fixed":
            log_f = jnp.asarray([-1 / t for t in self.decay_times(geometry)], jnp.float32)[None, None, :]
        else:
            logits = params["bias"][None, None, :]
            if self.gate == "data":
                logits = tokens.products(self, params)["kernel"] + logits
            log_f = jax.nn.log_sigmoid(logits)
        real = (tokens.segment_ids >= 0)[:, :, None]  # padding forgets nothing
        return replace(slots, log_gates=jnp.where(real, log_f, 0)), carry
