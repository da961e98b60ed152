"""One step of a stage as a pure function: state, teacher's parameters and batch in, state and report out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from bampath.config import Config, Dtype, ModelConfig
from bampath.convert.distill.losses import attention_errors, kl_divergence
from bampath.convert.distill.options import Stage
from bampath.metrics import Mean
from bampath.model import LM, head_kernel
from bampath.optim import learning_rate
from bampath.step import Batch, Declared, Report, TrainState, updated
from bampath.warm import positional

Array = jax.Array
Found = tuple[Mean, dict[str, Array], Any]  # loss, further sums over tokens, gradient of the loss's total


@dataclass(frozen=True)
class Teacher:
    """The model that is copied: its function, and its parameters on the device."""

    model: LM
    params: Any


@struct.dataclass
class Told:
    """What a step tells. report: as in training; sums: weighted sums over the batch's tokens, of all or per layer [L];
    norms [L]: of the gradient of each layer's parameters."""

    report: Report
    sums: dict[str, Array]
    norms: Array


def teacher_of(config: ModelConfig, params: Any, student: ModelConfig, dtype: Dtype | None = None) -> Teacher:
    """A teacher that runs as its student does (loop, kernels), in `dtype` (default: the student's).

    Matrices outside the positional scheme are kept in that type, which every layer would cast them to.
    """
    own = replace(
        config, dtype=dtype or student.dtype, remat="none", scan=student.scan, attention_impl=student.attention_impl
    )

    def kept(path: Any, leaf: Any) -> Any:
        names = [str(key.key) for key in path]
        matrix = leaf.ndim > 1 and names[-1] != "scale" and not positional("/".join(names))
        return jnp.asarray(leaf, own.dtype if matrix else None)

    return Teacher(LM(own), jax.tree_util.tree_map_with_path(kept, params))


def in_attention(name: str) -> bool:
    """Whether a parameter belongs to an attention layer or to the positional scheme: what stage 1 trains."""
    return "attention" in name.split("/") or positional(name)


def rates(stage: Stage, declared: Declared) -> Any:
    """The factor on the learning rate of every parameter, 0 where it stays as it is."""
    rest = 0.0 if stage.kind == "attention" else stage.rest

    def factor(path: Any, leaf: Any) -> float:
        return 1.0 if in_attention("/".join(str(key.key) for key in path)) else rest

    return jax.tree_util.tree_map_with_path(factor, declared.shapes)


def objective(stage: Stage, student: LM, teacher: LM) -> Callable[..., tuple[Mean, dict[str, Array]]]:
    """(params, teacher_params, batch, key) -> (loss, sums) of a stage, summed over the batch's tokens."""

    def attention(params: Any, teacher_params: Any, batch: Batch, key: Array) -> tuple[Mean, dict[str, Array]]:
        errors, powers = attention_errors(student, teacher, params, teacher_params, batch, key, stage.error)
        sums = {"error": jax.lax.stop_gradient(errors), "power": powers}
        return Mean(jnp.mean(errors), jnp.sum(batch["weights"])), sums

    def logits(params: Any, teacher_params: Any, batch: Batch, key: Array) -> tuple[Mean, dict[str, Array]]:
        ids = batch.get("segment_ids")
        wanted: Any = teacher.apply({"params": teacher_params}, batch["tokens"], ids, method="features")
        rngs = {"sample": key}
        given: Any = student.apply({"params": params}, batch["tokens"], ids, method="features", rngs=rngs)
        kl, agreed = kl_divergence(
            given,
            head_kernel(params),
            jax.lax.stop_gradient(wanted),
            head_kernel(teacher_params),
            batch["weights"],
            temperature=stage.temperature,
            chunk=stage.config.train.loss_chunk,
        )
        return Mean(kl, jnp.sum(batch["weights"])), {"agreement": agreed}

    return {"attention": attention, "logits": logits}[stage.kind]


def gradients(
    stage: Stage, student: LM, teacher: LM, params: Any, teacher_params: Any, batch: Batch, key: Any
) -> Found:
    """Loss, sums and the gradient of the loss's mean, worked off in train.accumulate parts as in training."""
    loss_of, parts = objective(stage, student, teacher), stage.config.train.accumulate
    teacher_params = jax.lax.stop_gradient(teacher_params)

    def one(part: Batch, key: Array) -> Found:
        def loss(params: Any) -> tuple[Array, Any]:
            mean, sums = loss_of(params, teacher_params, part, key)
            return mean.total, (mean, sums)

        (_, (mean, sums)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return mean, sums, grads

    if parts == 1:
        mean, sums, grads = one(batch, key)
    else:
        split = {name: jnp.moveaxis(a.reshape(-1, parts, *a.shape[1:]), 1, 0) for name, a in batch.items()}
        first = jax.eval_shape(one, {name: a[0] for name, a in split.items()}, key)
        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)
        add = lambda carry, part: (jax.tree.map(jnp.add, carry, one(*part)), None)
        (mean, sums, grads), _ = jax.lax.scan(add, start, (split, jax.random.split(key, parts)))
    weight = jnp.maximum(mean.weight, jnp.finfo(jnp.float32).tiny)
    return mean, sums, jax.tree.map(lambda g: g / weight, grads)


def make_step(
    stage: Stage, student: LM, teacher: LM, declared: Declared, optimizer: optax.GradientTransformation
) -> Any:
    """The jitted step (state, teacher's parameters, batch) -> (state, Told); the state that goes in is donated.

    A step whose loss, gradient or update is not finite leaves the state as it was, as in training.
    """
    schedule, factors = learning_rate(stage.config.optim, stage.config.train.steps), rates(stage, declared)

    def update(grads: Any, opt_state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return jax.tree.map(lambda u, rate: u * rate if rate else jnp.zeros_like(u), updates, factors), opt_state

    scaled = optax.GradientTransformation(optimizer.init, update)

    def step(state: TrainState, teacher_params: Any, batch: Batch) -> tuple[TrainState, Told]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        loss, sums, grads = gradients(stage, student, teacher, state.params, teacher_params, batch, key)
        grads = jax.tree.map(lambda g, rate: g if rate else jnp.zeros_like(g), grads, factors)
        after, report = updated(state, loss, grads, declared, scaled, schedule(state.step))
        return after, Told(report, sums, layer_norms(stage.config, declared, report.squares))

    return jax.jit(step, donate_argnums=0)


def layer_norms(config: Config, declared: Declared, squares: Array) -> Array:
    """Norm of the gradient of each layer's parameters [L]."""
    names = [str(path[0].key) for path, _ in jax.tree_util.tree_leaves_with_path(declared.shapes)]
    own = [[i for i, name in enumerate(names) if name == f"layer_{n}"] for n in range(config.model.layers)]
    return jnp.stack([jnp.sqrt(jnp.sum(squares[jnp.asarray(places)])) for places in own])


def values_of(told: Told) -> dict[str, float]:
    """The numbers of a step for its record: the loss, per layer the error (absolute, and relative to the mean square
    of the teacher's output) and the norm of the gradient, and the agreement of the most likely tokens."""
    told = jax.device_get(told)
    weight = max(float(told.report.loss.weight), 1e-30)
    values = {
        "loss": told.report.loss.value(),
        "grad_norm": float(told.report.grad_norm),
        "update_norm": float(told.report.update_norm),
        "lr": float(told.report.lr),
        "targets": float(told.report.loss.weight),
    }
    if "agreement" in told.sums:
        values["agreement"] = float(told.sums["agreement"]) / weight
    for layer, norm in enumerate(told.norms):
        name = f"layer_{layer:02d}"
        values[f"{name}/grad_norm"] = float(norm)
        if "error" in told.sums:
            error, power = float(told.sums["error"][layer]), float(told.sums["power"][layer])
            values |= {f"{name}/error": error / weight, f"{name}/relative": error / max(power, 1e-30)}
    for name, (low, high) in told.report.ranges.items():
        values |= {f"{name}/min": float(low), f"{name}/max": float(high)}
    return values
