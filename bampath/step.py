"""One optimiser step as a pure function: state and batch in, state and report out.

The gradient of a step is that of (sum of weighted losses) / (sum of weights) over the whole batch; working it off in
several parts adds the sums and divides once, so it is the gradient of one big batch. A step whose loss, gradient or
update is not finite leaves the state as it was, and so do all after it: what a checkpoint may hold is always sound.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from bampath import params as tags
from bampath import sharding
from bampath.config import Config
from bampath.metrics import Mean
from bampath.model import LM, head_kernel
from bampath.optim import learning_rate, make_optimizer

Array = jax.Array
Batch = dict[str, Array]


@struct.dataclass
class TrainState:
    """step: int32, optimiser steps done; params: float32 masters, untagged; key: uint32 [2]; sound: bool, see above."""

    step: Array
    params: Any
    opt_state: Any
    key: Array
    sound: Array


@struct.dataclass
class Report:
    """What one step tells: loss (weighted sum and weight), norms before clipping and of the update, the learning rate,
    squares [parameters]: sum of squares of each gradient, in the order of the leaves; ranges: {positional parameter:
    float32 [2], least and largest over all layers}; sound: whether the update was applied."""

    loss: Mean
    grad_norm: Array
    update_norm: Array
    lr: Array
    squares: Array
    ranges: dict[str, Array]
    sound: Array


@dataclass(frozen=True)
class Declared:
    """Parameters as declared: abstract arrays, roles and logical axes, three trees of one structure."""

    shapes: Any
    roles: Any
    axes: Any

    @property
    def count(self) -> int:
        """Number of parameters in all."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes))


def declare(model: nn.Module) -> Declared:
    """The parameters of a model, by tracing its initialisation: nothing is computed or allocated."""
    boxed = jax.eval_shape(lambda: _init(model, jax.random.key(0)))
    return Declared(tags.unbox(boxed), tags.roles(boxed), tags.axes(boxed))


def optimizer_of(config: Config, declared: Declared) -> optax.GradientTransformation:
    """The optimiser of a configuration, with the rates and decays of the parameters' roles."""
    return make_optimizer(config.optim, config.train.steps, declared.roles, declared.axes)


def init_state(config: Config, model: nn.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, a pure function of train.seed, on the devices of the run's mesh."""
    return make_init(config, model, optimizer)()


def make_init(config: Config, model: nn.Module, optimizer: optax.GradientTransformation) -> Any:
    """The jitted () -> state behind `init_state`, which may be compiled before the memory is wanted."""
    build = lambda: state_of(config, optimizer, first_params(config, model))
    return jax.jit(build, out_shardings=_shardings(config, model, optimizer, sharding.mesh_of(config)))


def first_params(config: Config, model: nn.Module) -> Any:
    """Fresh parameters, a pure function of train.seed. What a jitted caller does not return is not drawn either."""
    return tags.unbox(_init(model, jax.random.split(jax.random.key(config.train.seed))[0]))


def state_of(config: Config, optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step of a run that begins with `params`."""
    key = jax.random.key_data(jax.random.split(jax.random.key(config.train.seed))[1])
    return TrainState(jnp.int32(0), params, optimizer.init(params), key, jnp.bool_(True))


def abstract_state(
    config: Config, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> TrainState:
    """Shapes, types and placements of the state on a mesh (None: one device), without making any of it."""
    declared = declare(model)
    shapes = jax.eval_shape(lambda params: state_of(config, optimizer, params), declared.shapes)
    placed = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return jax.tree.map(placed, shapes, sharding.state_shardings(shapes, declared.axes, declared.roles, mesh))


def _shardings(config: Config, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh | None) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, model, optimizer, mesh))


def batch_loss(config: Config, model: nn.Module, params: Any, batch: Batch, key: Array | None = None) -> Mean:
    """Weighted sum of the cross-entropies of a batch, and its weight; see `bampath.loss.cross_entropy`."""
    rngs = {} if key is None else {"sample": key}
    ids = batch.get("segment_ids")
    hidden: Any = model.apply({"params": params}, batch["tokens"], ids, method="features", rngs=rngs)
    kernel = head_kernel(params)
    targets, weights = batch["targets"], batch["weights"]
    return Mean(*sharding.cross_entropy(hidden, kernel, targets, weights, chunk=config.train.loss_chunk))


def gradients(config: Config, model: nn.Module, params: Any, batch: Batch, key: Array) -> tuple[Mean, Any]:
    """Loss of a batch and the gradient of its mean, worked off in train.accumulate parts of equal size."""
    parts = config.train.accumulate

    def one(part: Batch, key: Array) -> tuple[Mean, Any]:
        def loss(params: Any) -> tuple[Array, Mean]:
            mean = batch_loss(config, model, params, part, key)
            return mean.total, mean

        (_, mean), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return mean, grads

    if parts == 1:
        mean, grads = one(batch, key)
    else:  # part p has rows p, p + parts, …: cutting the minor axis keeps every part spread over all devices
        split = {name: jnp.moveaxis(a.reshape(-1, parts, *a.shape[1:]), 1, 0) for name, a in batch.items()}

        def add(carry: tuple[Mean, Any], part: tuple[Batch, Array]) -> tuple[tuple[Mean, Any], None]:
            mean, grads = one(*part)
            return (carry[0].merge(mean), jax.tree.map(jnp.add, carry[1], grads)), None

        start = (Mean.zero(), jax.tree.map(jnp.zeros_like, params))
        (mean, grads), _ = jax.lax.scan(add, start, (split, jax.random.split(key, parts)))
    weight = jnp.maximum(mean.weight, jnp.finfo(jnp.float32).tiny)  # a batch without targets has gradient 0
    return mean, jax.tree.map(lambda g: g / weight, grads)


def make_train_step(
    config: Config,
    model: nn.Module,
    declared: Declared,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
) -> Any:
    """The jitted step (state, batch) -> (state, report); the state that goes in is donated.

    batch: what `device_batch` gives, all [B, T]. mesh: another one than that of `config.mesh` on this machine's devices
    (to compile for devices that are elsewhere).
    """
    schedule = learning_rate(config.optim, config.train.steps)
    mesh = mesh or sharding.mesh_of(config)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        with sharding.use(mesh):
            loss, grads = gradients(config, model, state.params, batch, key)
        return updated(state, loss, grads, declared, optimizer, schedule(state.step))

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    placed = _shardings(config, model, optimizer, mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=(placed, sharding.replicated(mesh)))


def updated(
    state: TrainState, loss: Mean, grads: Any, declared: Declared, optimizer: optax.GradientTransformation, rate: Array
) -> tuple[TrainState, Report]:
    """The state after the optimiser's step with `grads`, and what it tells; rate: the learning rate, to be told.

    Where loss, gradient or update is not finite, and after such a step, everything but `sound` stays as it was.
    """
    squares = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)])
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    grad_norm, update_norm = jnp.sqrt(jnp.sum(squares)), optax.tree.norm(updates)
    sound = state.sound & jnp.isfinite(loss.total) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
    after = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, state.key, sound)
    kept = jax.tree.map(lambda new, old: jnp.where(sound, new, old), after, state)
    ranges = positional_ranges(kept.params, declared.roles)
    return replace(kept, sound=sound), Report(loss, grad_norm, update_norm, rate, squares, ranges, sound)


def make_eval_step(config: Config, model: nn.Module) -> Callable[[Any, Batch], Mean]:
    """The jitted loss of a batch, without gradients."""

    def evaluate(params: Any, batch: Batch) -> Mean:
        with sharding.use(sharding.mesh_of(config)):
            return batch_loss(config, model, params, batch)

    return jax.jit(evaluate)


def positional_ranges(params: Any, roles: Any) -> dict[str, Array]:
    """{part/parameter: [least, largest] over layers and heads} of priors and sharpnesses, to see them drift."""
    found: dict[str, list[Array]] = {}
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(roles), strict=True)
    for (path, leaf), role in pairs:
        if role in ("prior", "sharpness"):
            found.setdefault("/".join(str(key.key) for key in path[-2:]), []).append(leaf)
    joined = {name: jnp.concatenate([leaf.reshape(-1) for leaf in leaves]) for name, leaves in found.items()}
    return {name: jnp.stack([jnp.min(values), jnp.max(values)]) for name, values in joined.items()}


def device_batch(config: Config, batch: dict[str, Any]) -> Batch:
    """The arrays of a loader's batch that a step reads, on the devices of the run's mesh.

    Positions are left out: the model derives the same ones from the segments. Without document masks the segments only
    mark padding behind the text, which causality hides, so they are left out as well and kernels need not look at them.
    """
    names = ["tokens", "targets", "weights"] + (["segment_ids"] if config.data.document_mask else [])
    return sharding.place_batch({name: batch[name] for name in names}, sharding.mesh_of(config), config.data.batch_size)


def _init(model: nn.Module, key: Array) -> Any:
    return model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]


def build_model(config: Config) -> LM:
    """The model of a configuration, without parameters."""
    return LM(config.model)
