"""Attention with log-priors, gates and sharpness: the public entry point."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

Array = jax.Array
LogPrior = Callable[[Any, Array], Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DistancePrior:
    """A log-prior over distance, one set of parameters per head; never stored as a T × S array.

    params: any pytree of float32 arrays with leading axis H.
    log_prior(params of one head, d) -> float32 of d's shape, elementwise, where d = key position − query position is an
    int32 array of any shape. Plain JAX, traced inside the kernels; finite for every distance that a query may see.
    It is static: a hashable value that compares equal between calls (a module-level function or a frozen dataclass with
    `__call__`; a fresh lambda or closure per call would recompile every time).
    """

    params: Any
    log_prior: LogPrior = field(metadata={"static": True})


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    prior: DistancePrior | None = None,
    log_gates: Array | tuple[Array, Array] | None = None,
    sharpness: Array | None = None,
    sharpen_prior: bool = True,
    segment_ids: Array | tuple[Array, Array] | None = None,
    positions: Array | None = None,
    kv_positions: Array | None = None,
    window: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention with a distance prior, forget gates and sharpness."""
    raise NotImplementedError
