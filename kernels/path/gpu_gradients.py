"""Gradients as operands of products inside the GPU kernels.

Every product is one of a gradient with a value of the forward pass, both float16: the gradient is scaled by a power of
two per tile, so that its size does not matter. bfloat16 operands would be eight times coarser, which repeated tokens
with beta near 2 amplify.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.path.gpu_blocks import F16, F32, Split, dot, dot3
from kernels.path.gpu_keys import over_chunks

Array = jax.Array


def power(most: Array) -> Array:
    """The power of two from `most` on, within 2⁻¹⁰⁰ … 2¹²⁰, where it has a reciprocal: gradients behind gates that have
    shut are subnormal numbers."""
    return jnp.exp2(jnp.clip(jnp.ceil(jnp.log2(most)), -100, 120))


class Scaled(NamedTuple):
    """A gradient as float16 of at most 1 in size, times a power of two."""

    part: Array
    size: Array

    @classmethod
    def of(cls, x: Array) -> "Scaled":
        return cls.by(x, power(jnp.max(jnp.abs(x))))

    @classmethod
    def by(cls, x: Array, size: Array) -> "Scaled":
        """With a scale that is known."""
        return cls((x * (1 / size)).astype(F16), size)

    def times(self, value: Array, ta: bool = False, tb: bool = False) -> Array:
        """gradient · value (float16), the gradient transposed with ta, the value with tb."""
        return dot(self.part, value, ta, tb) * self.size

    def under(self, value: Array, ta: bool = True, tb: bool = False) -> Array:
        """valueᵀ · gradient; without ta value · gradient."""
        return dot(value, self.part, ta, tb) * self.size


class Exact(NamedTuple):
    """A gradient as two float16 parts, times a power of two: for sums in which large terms cancel."""

    high: Array
    low: Array
    size: Array

    @classmethod
    def of(cls, x: Array) -> "Exact":
        return cls.by(x, Scaled.of(x).size)

    @classmethod
    def by(cls, x: Array, size: Array) -> "Exact":
        """With a scale that is known."""
        high = Scaled.by(x, size).part
        return cls(high, (x * (1 / size) - high.astype(F32)).astype(F16), size)

    def under(self, value: Split, ta: bool = True) -> Array:
        """valueᵀ · gradient, without ta value · gradient, the value in two parts as well."""
        return dot3(value, (self.high, self.low), ta) * self.size

    def times(self, value: Split, tb: bool = False) -> Array:
        return dot3((self.high, self.low), value, tb=tb) * self.size


def scale_of(refs: dict[str, Any], name: str, s: Any) -> tuple[Array, Callable[[Any, Any], Array]]:
    """(a power of two, values of a gradient as float16 of at most 1 in size) for all of refs[name][s]."""
    most = lambda c, so_far: jnp.maximum(so_far, jnp.max(jnp.abs(refs[name][s, c].astype(F32))))
    size = power(over_chunks(refs[name].shape[1], most, F32(0)))
    return size, scaled_by(refs, name, size)


def scaled_by(refs: dict[str, Any], name: str, size: Array) -> Callable[[Any, Any], Array]:
    """Values of refs[name] at (rows, columns) over a scale that is known, float16."""
    return lambda rows, c: (refs[name][rows, c].astype(F32) * (1 / size)).astype(F16)
