"""The distance priors of every head of a trained model, as beliefs over the keys that a query sees."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath.config import ModelConfig
from bampath.model import geometry_of
from bampath.positions.registry import Composition, parse
from bampath.positions.slots import Geometry, Part, Slots, Tokens
from bampath.positions.theory import Regime, belief, regimes


@dataclass(frozen=True)
class Head:
    """One head's prior for a query that sees `keys` keys, itself included.

    p: float64 [keys] (or [window], if the scheme has a smaller one), normalised, by distance: p[0] is the query's own
    place. The sharpness of that query is in it where it multiplies the prior. entropy in nats, mean_distance in tokens;
    regime as in `positions.theory`.
    parameters: the head's own learned numbers, such as "bam/theta_beta" and "ssmax/scale".
    """

    layer: int
    head: int
    keys: int
    p: np.ndarray
    entropy: float
    mean_distance: float
    regime: Regime
    parameters: dict[str, float]

    def row(self, points: int = 64, **more: Any) -> dict[str, Any]:
        """Plain values, `more` first; the curve at about `points` distances, evenly spread on a logarithmic axis."""
        names = ("layer", "head", "keys", "entropy", "mean_distance", "regime", "parameters")
        shown = np.unique(np.geomspace(1, len(self.p), points).astype(int)) - 1
        curve = {"distance": shown.tolist(), "p": [float(f"{value:.5g}") for value in self.p[shown]]}
        return {**more, "benchmark": "prior", **{name: getattr(self, name) for name in names}, "curve": curve}


def read_heads(config: ModelConfig, params: Any, keys: int) -> list[Head]:
    """Every head of every layer whose scheme has a distance prior, for a query that sees `keys` (at least 6) keys.

    params: an LM's plain parameters. Gates (FoX) and transports (RoPE, PaTH) are no functions of distance and not seen.
    """
    scheme, found = parse(config.position), []
    for layer in range(config.layers):
        composition = scheme.at(layer)
        if any(type(part).log_prior is not Part.log_prior for part in composition.layer_parts):
            own = jax.tree.map(np.asarray, position_params(params, layer))
            found += heads_of_layer(composition, own, geometry_of(config, layer), keys)
    return found


def position_params(params: Any, layer: int) -> dict[str, Any]:
    """{part name: parameters} of a layer, with those that all layers share."""
    shared = {name.removeprefix("shared_position_"): tree for name, tree in params.items() if "shared_position" in name}
    return {**shared, **params[f"layer_{layer}"]["attention"].get("position", {})}


def sharpness_of(composition: Composition, own: dict[str, Any], geometry: Geometry, keys: int) -> np.ndarray:
    """The factor [H] on the prior of a query that sees `keys` keys: 1 where sharpness leaves the prior alone."""
    index = jnp.arange(keys, dtype=jnp.int32)[None, :]
    tokens = Tokens(jnp.zeros((1, keys, geometry.dim)), index, index + 1, jnp.zeros_like(index))
    row = jnp.zeros((1, keys, geometry.heads, 1))
    slots = Slots(row, row[:, :, : geometry.kv_heads])
    for part in composition.layer_parts:
        if part.SLOT == "sharpness":
            slots, _ = part.fill(own.get(part.NAME, {}), geometry, slots, tokens, None)
    if slots.sharpness is None or not slots.sharpen_prior:
        return np.ones(geometry.heads)
    return np.asarray(slots.sharpness[0, -1], np.float64)


def heads_of_layer(composition: Composition, own: dict[str, Any], geometry: Geometry, keys: int) -> list[Head]:
    """The heads of a layer, from its parameters {part name: {name: array}}: those of other parts may be left out."""
    sharpness = sharpness_of(composition, own, geometry, keys)
    seen = belief(composition, own, keys, heads=geometry.heads, sharpness=sharpness)
    kinds = regimes(composition, own, keys, heads=geometry.heads)
    return [
        Head(
            layer=geometry.layer,
            head=head,
            keys=keys,
            p=seen.p[head, ::-1],
            entropy=float(seen.entropy[head]),
            mean_distance=float(seen.mean_distance[head]),
            regime=kinds[head],
            parameters={
                f"{part}/{name}": float(values[head])
                for part, tree in own.items()
                for name, values in tree.items()
                if values.shape == (geometry.heads,)
            },
        )
        for head in range(geometry.heads)
    ]
