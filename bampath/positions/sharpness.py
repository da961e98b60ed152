"""What the parts that fill the sharpness slot share."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from bampath.positions.slots import Geometry, Slots

Array = jax.Array


def sharpen(slots: Slots, factor: Array, geometry: Geometry, inside: bool) -> Slots:
    """Slots with sharpness r set to `factor` ([B, T, 1] for all heads, or [B, T, H]), float32.

    inside: r multiplies content and prior, r(z + log π); otherwise content only, r z + log π.
    """
    shape = (*factor.shape[:2], geometry.heads)
    return replace(slots, sharpness=jnp.broadcast_to(factor, shape), sharpen_prior=inside)
