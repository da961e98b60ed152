"""A Llama-style decoder whose only notion of order is its positional scheme.

Pre-RMSNorm, SwiGLU, no biases, grouped keys; embedding and head are untied unless the configuration ties them
(BAM's models: arXiv 2505.22842, section 4 of the authors' code; PaTH's: arXiv 2505.16381, section 4).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bampath import cache as caches
from bampath.attention import Attention, RMSNorm, RowTokens, weight_init
from bampath.cache import Cache, LayerCache, View
from bampath.config import ModelConfig
from bampath.params import tagged
from bampath.positions.module import InputEmbedding, shared_modules
from bampath.positions.registry import Scheme, parse
from bampath.positions.slots import Geometry
from bampath.sharding import constrain, lookup, weight

Array = jax.Array

REMAT_POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse"),
}


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        c = self.config
        gate = self._matrix("gate", (c.dim, c.mlp_dim), ("embed", "mlp"), x_BTD.dtype)
        up = self._matrix("up", (c.dim, c.mlp_dim), ("embed", "mlp"), x_BTD.dtype)
        down = self._matrix("down", (c.mlp_dim, c.dim), ("mlp", "embed"), x_BTD.dtype)
        return (nn.silu(x_BTD @ gate) * (x_BTD @ up)) @ down

    def _matrix(self, name: str, shape: tuple[int, int], axes: tuple[str, str], dtype: Any) -> Array:
        value = self.param(name, tagged(weight_init(self.config, shape[0]), axes, "matrix"), shape)
        return weight(value.astype(dtype), axes)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the stream."""

    config: ModelConfig
    scheme: Scheme
    index: int
    shared: dict[str, nn.Module] | None = None

    def setup(self) -> None:
        c = self.config
        self.attention_norm = RMSNorm(c.norm_eps)
        self.attention = Attention(c, self.scheme.at(self.index), geometry_of(c, self.index), self.shared)
        self.mlp_norm = RMSNorm(c.norm_eps)
        self.mlp = MLP(c)

    def __call__(
        self, x_BTD: Array, tokens: RowTokens, cache: LayerCache | None = None, view: View | None = None
    ) -> tuple[Array, LayerCache | None]:
        y_BTD, cache = self.attention(self.attention_norm(x_BTD), tokens, cache, view)
        x_BTD = constrain(x_BTD + y_BTD, "batch", "length", None)
        return constrain(x_BTD + self.mlp(self.mlp_norm(x_BTD)), "batch", "length", None), cache


class LM(nn.Module):
    """Decoder language model of a `ModelConfig` (or of a whole `Config`, whose `model` is taken).

    __call__(tokens [B, T] int32, segment_ids [B, T] | None, positions [B, T] | None) -> logits [B, T, V] float32.
    `segment_ids` isolate packed documents (negative: padding) and restart positions at their borders. Explicit
    `positions` replace the row order in every prior, rotation and mask.
    """

    config: Any

    def setup(self) -> None:
        c = model_config(self.config)
        self.scheme = parse(c.position)
        if c.scan:
            scan_period(c)  # refuses what cannot run as a loop while nothing has been allocated
        embedding_init = nn.initializers.normal(1.0 if c.init == "torch" else c.init_std)
        self.embedding = self.param(
            "embedding", tagged(embedding_init, ("vocab", "embed"), "embedding"), (c.vocab_size, c.dim)
        )
        self.input_position = InputEmbedding(self.scheme, geometry_of(c, 0))
        self.shared_position = shared_modules(self.scheme, geometry_of(c, 0))
        block = Block if c.remat == "none" else rematerialised(c.remat, prevent_cse=True)
        self.layer = [block(c, self.scheme, i, self.shared_position) for i in range(c.layers)]
        self.final_norm = RMSNorm(c.norm_eps)
        if not c.tie_embeddings:
            self.head = self.param(
                "head", tagged(weight_init(c, c.dim), ("embed", "vocab"), "embedding"), (c.dim, c.vocab_size)
            )

    def __call__(self, tokens: Array, segment_ids: Array | None = None, positions: Array | None = None) -> Array:
        return self.logits(self.features(tokens, segment_ids, positions))

    def features(self, tokens: Array, segment_ids: Array | None = None, positions: Array | None = None) -> Array:
        """Final normed hidden states [B, T, dim] in the compute dtype: what the chunked loss multiplies by the head."""
        row = row_tokens(tokens, segment_ids, positions)
        x_BTD = self._embed(tokens, row.positions)
        if model_config(self.config).scan and not self.is_initializing():
            return self.final_norm(self._scan(x_BTD, row))
        for layer in self.layer:
            x_BTD, _ = layer(x_BTD, row)
        return self.final_norm(x_BTD)

    def _scan(self, x_BTD: Array, row: RowTokens) -> Array:
        """All layers as one loop: its body is one period of the pattern of schemes, its weights are stacked here."""
        c = model_config(self.config)
        params, period = self.variables["params"], scan_period(c)
        block = Block if c.remat == "none" else rematerialised(c.remat, prevent_cse=False)  # a loop hides it from CSE
        layers = [block(c, self.scheme, i, parent=None) for i in range(period)]

        def body(x: Array, weights: list[Any]) -> tuple[Array, None]:
            for layer, own in zip(layers, weights, strict=True):
                x, _ = layer.apply({"params": own}, x, row)
            return x, None

        stack = lambda *leaves: jnp.stack(leaves)
        turns = [[params[f"layer_{i}"] for i in range(first, c.layers, period)] for first in range(period)]
        return jax.lax.scan(body, x_BTD, [jax.tree.map(stack, *layers) for layers in turns])[0]

    def extend(
        self, tokens: Array, cache: Cache, mask: Array, order: caches.Order = "any", padded: bool = True
    ) -> tuple[Array, Cache]:
        """Hidden states [B, T, dim] of new tokens after those in `cache`, and the cache with them in it.

        mask [B, T] bool marks real tokens; padding may stand on either side. A prompt may come in several calls. order,
        padded: what is known of the mask and the cache beforehand, see `bampath.cache`.
        """
        view = caches.look(cache, mask, order, padded)
        row = RowTokens(positions=view.positions, ids=view.ids, packed=True, custom=False)
        x_BTD = self._embed(tokens, view.positions)
        layers: list[LayerCache] = []
        for layer, memory in zip(self.layer, cache.layers, strict=True):
            x_BTD, after = layer(x_BTD, row, memory, view)
            layers.append(after)  # type: ignore[arg-type]  # a layer with a cache gives one back
        return self.final_norm(x_BTD), caches.advance(cache, view, tuple(layers))

    def logits(self, hidden: Array) -> Array:
        """[..., dim] -> [..., V] float32."""
        head = self.embedding.T if model_config(self.config).tie_embeddings else self.head
        return jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def _embed(self, tokens: Array, positions: Array) -> Array:
        x_BTD = lookup(self.embedding, tokens)
        added = self.input_position(positions)
        x_BTD = x_BTD if added is None else x_BTD + added
        return constrain(x_BTD.astype(model_config(self.config).dtype), "batch", "length", None)


def rematerialised(policy: str, prevent_cse: bool) -> Any:
    """Block with the forward pass repeated in the backward pass, but for what `policy` keeps."""
    return nn.remat(Block, policy=REMAT_POLICIES[policy], prevent_cse=prevent_cse)


def scan_period(config: ModelConfig) -> int:
    """How many layers one turn of `model.scan`'s loop has. ValueError if the layers cannot run as a loop."""
    scheme = parse(config.position)
    if scheme.shared_parts:
        names = ", ".join(part.spec for part in scheme.shared_parts)
        raise ValueError(
            f"model.scan=true needs layers with their own parameters, but all layers share those of {names}"
        )
    drawing = [part.spec for composition in scheme.layers for part in composition.parts if part.DRAWS]
    if drawing:
        raise ValueError(
            f"model.scan=true runs layers as one program, but {drawing[0]} draws differently in each layer"
        )
    period = len(scheme.layers)
    if config.layers % period:
        raise ValueError(f"model.layers={config.layers} is not divisible by {scheme.name}'s pattern of {period} layers")
    return period


def model_config(config: Any) -> ModelConfig:
    """The ModelConfig of a whole Config, or the ModelConfig itself."""
    return config if isinstance(config, ModelConfig) else config.model


def geometry_of(config: ModelConfig, layer: int) -> Geometry:
    """What the positional scheme may know of a layer."""
    return Geometry(
        dim=config.dim,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layer=layer,
        layers=config.layers,
        train_length=config.train_length,
    )


def head_kernel(params: Any) -> Array:
    """The output matrix [dim, V] of an LM's plain parameters, tied or not."""
    return params["head"] if "head" in params else params["embedding"].T


def row_tokens(tokens: Array, segment_ids: Array | None, positions: Array | None) -> RowTokens:
    """Positions and segment ids of a batch of rows, with everything that was not given derived from what was."""
    if tokens.ndim != 2:
        raise ValueError(f"tokens has shape {tokens.shape}; it must be [batch, length]")
    for name, given in (("segment_ids", segment_ids), ("positions", positions)):
        if given is not None and given.shape != tokens.shape:
            raise ValueError(f"{name} has shape {given.shape}; it must be tokens' {tokens.shape}")
        if given is not None and not jnp.issubdtype(given.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {given.dtype}; it must be int32")
    ids = jnp.zeros(tokens.shape, jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    custom = positions is not None
    if positions is None:
        positions = positions_in_segments(ids)
    return RowTokens(positions.astype(jnp.int32), ids, packed=segment_ids is not None, custom=custom)


def positions_in_segments(ids: Array) -> Array:
    """Position of each token within its segment [B, T] int32; a segment is a run of equal ids."""
    index = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :], ids.shape)
    previous = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=jnp.iinfo(jnp.int32).min)
    starts = jnp.where(ids != previous, index, 0)
    return index - jax.lax.cummax(starts, axis=1)


def check_length(config: Any, length: int) -> None:
    """ValueError if a row of `length` tokens is longer than the scheme of LM(config) is defined for."""
    c = model_config(config)
    scheme = parse(c.position)
    for layer in range(c.layers):
        for part in scheme.at(layer).parts:
            limit = part.max_positions(geometry_of(c, layer))
            if limit is not None and length > limit:
                raise ValueError(
                    f"{length} tokens are asked for, but {part.spec} is defined for {limit} positions only"
                )


def init_cache(config: Any, batch: int, capacity: int) -> Cache:
    """An empty cache of `capacity` slots for `batch` rows of LM(config)."""
    c = model_config(config)
    if batch < 1 or capacity < 1:
        raise ValueError(f"batch={batch} and capacity={capacity} must be at least 1")
    scheme, dtype = parse(c.position), jnp.dtype(c.dtype)
    layers = []
    for index in range(c.layers):
        composition, geometry = scheme.at(index), geometry_of(c, index)
        layers.append(
            caches.empty_layer(
                geometry,
                batch,
                capacity,
                dtype,
                carried_keys=composition.carries_keys,
                gates=composition.has_gates,
                carry=composition.init_carry(geometry, batch, dtype),
                reach=composition.reach(geometry),
            )
        )
    return caches.empty(tuple(layers), batch, capacity)
