"""What the parts that fill the sharpness slot share."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from bampath.positions.slots import Geometry, Part, Slots

Array = jax.Array


def sharpen(slots: Slots, factor: Array, geometry: Geometry, inside: bool) -> Slots:
    """Slots with sharpness r set to `factor` ([B, T, 1] for all heads, or [B, T, H]), float32.

    inside: r multiplies content and prior, r(z + log π); otherwise content only, r z + log π.
    """
    shape = (*factor.shape[:2], geometry.heads)
    return replace(slots, sharpness=jnp.broadcast_to(factor, shape), sharpen_prior=inside)


def refuse_idle_inside(part: Part, others: tuple[Part, ...]) -> None:
    """ValueError if `inside` was changed on a part that has no prior beside it: both values are the same function."""
    changed = getattr(part, "inside") != type(part).__dataclass_fields__["inside"].default  # noqa: B009
    if changed and not any(other.SLOT == "prior" for other in others):
        raise ValueError(
            f"{part.spec}: option inside says whether a prior is scaled, and has no effect without one; drop it, or "
            "add a prior such as alibi, bam or fox"
        )
