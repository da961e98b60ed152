"""The Flax side of a scheme: one module per layer that fills the slots, one for the input."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bampath.positions.projections import project_together
from bampath.positions.registry import Composition, Scheme
from bampath.positions.slots import Carry, Geometry, Part, Slots, Tokens

Array = jax.Array


class PositionalEncoding(nn.Module):
    """Fills the slots of one layer, part by part. Parameters: {part name: {parameter: float32 array}}.

    `shared` holds, by part name, the modules of parts that keep one set of parameters for all layers (see
    `shared_modules`); without it this layer owns them too.
    """

    composition: Composition
    geometry: Geometry
    shared: dict[str, nn.Module] | None = None

    @nn.compact
    def __call__(
        self, q_BTHD: Array, k_BTHD: Array, tokens: Tokens, carry: Carry | None = None
    ) -> tuple[Slots, Carry | None]:
        """q, k as projected. carry: None in training; in decode what `Composition.init_carry` or the last call gave."""
        window = self.composition.window
        if window is not None:  # a query sees no more keys than its window holds
            tokens = replace(tokens, counts=jnp.minimum(tokens.counts, window))
        modules: dict[str, Any] = {}
        for part in self.composition.layer_parts:
            shared = (self.shared or {}).get(part.NAME) if part.shared else None
            modules[part.NAME] = part.module(self.geometry, name=part.NAME) if shared is None else shared
        having = [part.NAME for part in self.composition.layer_parts if type(part).narrow is not Part.narrow]
        narrow = {name: modules[name].narrow() for name in having}
        tokens = replace(tokens, made=project_together(tokens.x, narrow))
        slots, after = Slots(q_BTHD, k_BTHD), {}
        for name, module in modules.items():
            slots, state = module(slots, tokens, None if carry is None else carry.get(name))
            if state is not None:
                after[name] = state
        return slots, None if carry is None else after


class InputEmbedding(nn.Module):
    """What a scheme adds to the token embeddings. Parameters: {part name: {parameter: float32 array}}."""

    scheme: Scheme
    geometry: Geometry

    @nn.compact
    def __call__(self, positions: Array) -> Array | None:
        """positions [B, T] int32 -> [B, T, dim] float32, or None when the scheme adds nothing."""
        added = [part.module(self.geometry, name=part.NAME)(positions) for part in self.scheme.input_parts]
        return sum(added[1:], added[0]) if added else None


def shared_modules(scheme: Scheme, geometry: Geometry) -> dict[str, nn.Module] | None:
    """The modules of parts that all layers share, for a model to own and hand to each layer; None if there are none."""
    return {part.NAME: part.module(geometry) for part in scheme.shared_parts} or None
