"""Distance priors of parts as static, hashable functions, so that equal schemes compile once."""

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.attention.api import DistancePrior

Array = jax.Array
LogPrior = Callable[[Any, Array], Array]


@dataclass(frozen=True)
class PartPrior:
    """`part.log_prior` as a value that is equal for equal parts (a bound method is equal only for the same object)."""

    part: Any

    def __call__(self, params: Any, d: Array) -> Array:
        return self.part.log_prior(params, d)


@dataclass(frozen=True)
class SumPrior:
    """log Π π_a = Σ log π_a; params is the tuple of the terms' params."""

    terms: tuple[LogPrior, ...]

    def __call__(self, params: Any, d: Array) -> Array:
        return functools.reduce(operator.add, (term(p, d) for term, p in zip(self.terms, params, strict=True)))


def combine(priors: Iterable[DistancePrior | None]) -> DistancePrior | None:
    """One prior whose logarithm is the sum of those given; None when there is none. Sums of sums are flattened."""
    terms: list[LogPrior] = []
    params: list[Any] = []
    for prior in priors:
        if prior is None:
            continue
        nested = isinstance(prior.log_prior, SumPrior)
        terms += prior.log_prior.terms if isinstance(prior.log_prior, SumPrior) else (prior.log_prior,)
        params += prior.params if nested else (prior.params,)
    if len(terms) < 2:
        return DistancePrior(params[0], terms[0]) if terms else None
    return DistancePrior(tuple(params), SumPrior(tuple(terms)))


def evaluate(prior: DistancePrior, q_positions: Array, k_positions: Array) -> Array:
    """log π_h(j - i) for every head: [H, T, S] float32, from positions [T] and [S] of any integer type.

    The dense form, for figures and tests; attention never builds it.
    """
    for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
        if positions.ndim != 1:
            raise ValueError(f"{name} has shape {positions.shape}; it must be one-dimensional")
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {positions.dtype}; positions are integers")
    return _evaluate(prior, k_positions.astype(jnp.int32)[None, :] - q_positions.astype(jnp.int32)[:, None])


@jax.jit
def _evaluate(prior: DistancePrior, d_TS: Array) -> Array:
    return jax.vmap(prior.log_prior, in_axes=(0, None))(prior.params, d_TS)


def as_float(d: Array, like: Any) -> Array:
    """Integer distances in the dtype of the prior's parameters (float32 in a model, float64 in an oracle)."""
    dtype = jnp.result_type(like)
    return d.astype(dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32)
