"""Scalable softmax: logits grow with the logarithm of the number of visible keys."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from bampath.positions.options import option
from bampath.positions.sharpness import refuse_idle_inside, sharpen
from bampath.positions.slots import Geometry, Param, Part, SlotName, Slots, Tokens

Array = jax.Array


def mean_log(length: int) -> float:
    """Mean of ln n over n = 1..length."""
    return math.lgamma(length + 1) / length


@dataclass(frozen=True)
class SSMax(Part):
    """r_i = s_h ln n_i, n_i the number of keys that query i sees, itself included (natural logarithm).

    softmax(s ln n · z) = n^(s z) / Σ n^(s z): attention keeps its focus as n grows (SSMax, arXiv 2501.19399).
    In BAM-SSMax the prior is scaled as well (inside=true, the default); BAM's code scales only the content logits of
    its ALiBi baseline (inside=false). s_h is `scale` [H] per layer; bias=true adds a learned b_h, `bias` [H] from 0.
    """

    NAME: ClassVar[str] = "ssmax"
    SLOT: ClassVar[SlotName] = "sharpness"

    inside: bool = option(True, doc="scale content and prior together, or content only")
    init: float | Literal["mean_log"] = option(
        1.0,
        doc="start of s: a number, or mean_log = 1 / (mean of ln n over the training length)",
        examples=("init=0.43",),
    )
    frozen: bool = option(False, doc="keep s at its start; then it is no parameter")
    bias: bool = option(False, doc="add a learned b per head to s ln n")
    count: Literal["document", "absolute"] = option(
        "document",
        doc="n counts the visible keys of the document, or every token of the row so far (BAM's code at inference)",
    )

    def check(self, others: tuple[Part, ...]) -> None:
        refuse_idle_inside(self, others)

    def start(self, geometry: Geometry) -> float:
        """The initial s."""
        if self.init != "mean_log":
            return float(self.init)
        if geometry.train_length < 2:
            raise ValueError(f"ssmax(init=mean_log) needs train_length >= 2, got {geometry.train_length}")
        return 1 / mean_log(geometry.train_length)

    def parameters(self, geometry: Geometry) -> dict[str, Param]:
        heads = (geometry.heads,)
        start = nn.initializers.constant(self.start(geometry))
        found = {} if self.frozen else {"scale": Param(heads, start, ("heads",), "sharpness")}
        if self.bias:
            found["bias"] = Param(heads, nn.initializers.zeros, ("heads",), "sharpness")
        return found

    def init_carry(self, geometry: Geometry, batch: int, dtype: Any) -> Any:
        return {"seen": jnp.zeros((batch,), jnp.int32)} if self.count == "absolute" else None

    def fill(
        self, params: dict[str, Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        counts = tokens.counts
        if self.count == "absolute":
            counts = jnp.cumsum(tokens.segment_ids >= 0, axis=1, dtype=jnp.int32)
            if carry is not None:
                counts = counts + carry["seen"][:, None]
                carry = {"seen": counts[:, -1]}
        log_n = jnp.log(jnp.maximum(counts, 1).astype(jnp.float32))[:, :, None]
        scale = params.get("scale", jnp.full((geometry.heads,), self.start(geometry), jnp.float32))
        factor = log_n * scale[None, None, :]
        if self.bias:
            factor = factor + params["bias"][None, None, :]
        return sharpen(slots, factor, geometry, self.inside), carry
