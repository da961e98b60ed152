"""Train one model per seed side by side: the seeds are an axis of every array of one program.

Small models leave a device idle, so the seeds together cost little more than one. Rows are drawn on the host while the
device works, and many steps are one call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath.config import Config
from bampath.evaluation.state.tasks import StateTask
from bampath.params import unbox
from bampath.step import Batch, TrainState, build_model, declare, make_train_step, optimizer_of

STEPS = 50  # per call


@dataclass(frozen=True)
class Trained:
    """params: of all seeds, each leaf with a leading axis [S, …]; curve: [(step, mean loss of the last steps [S])]."""

    params: Any
    curve: list[tuple[int, list[float]]]


def train(config: Config, task: StateTask, seeds: Sequence[int], watch: Callable[[int, Any], None]) -> Trained:
    """Train config.train.steps steps from each of `seeds`.

    FloatingPointError, soon after the step, that names the seeds of which a loss, gradient or update was not finite.
    """
    model = build_model(config)
    step = make_train_step(config, model, declare(model), optimizer_of(config, declare(model)))

    def several(state: TrainState, batches: Batch) -> tuple[TrainState, Any]:
        def one(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
            state, report = step(state, batch)
            return state, jnp.where(state.sound, report.loss.total / report.loss.weight, jnp.nan)

        return jax.lax.scan(one, state, batches)

    together = jax.jit(jax.vmap(several), donate_argnums=0)
    state, curve = _first_states(config, model, seeds), list[tuple[int, list[float]]]()
    note = partial(_note, f"{config.model.position}, {config.model.layers} layer(s)", seeds, curve, watch)
    running: tuple[int, jax.Array] | None = None
    for done, batches in _batches(config, task, seeds):
        state, losses = together(state, batches)
        if running is not None:  # the block before this one: reading it waits for nothing that was just started
            note(*running)
        running = (done, losses)
    if running is not None:
        note(*running)
    return Trained(state.params, curve)


def _note(
    name: str, seeds: Sequence[int], curve: list[Any], watch: Callable[[int, Any], None], done: int, losses: jax.Array
) -> None:
    """Put the mean over the steps of losses [S, steps] into the curve, and show it. NaN stands for an unsound step."""
    means = np.asarray(losses).mean(axis=1)
    bad = [seed for seed, mean in zip(seeds, means, strict=True) if not np.isfinite(mean)]
    if bad:
        first = 1 + done - losses.shape[1]
        raise FloatingPointError(
            f"{name}: a loss, gradient or update of seeds {bad} was not finite in the steps {first} to {done}"
        )
    curve.append((done, means.tolist()))
    watch(done, curve[-1][1])


def _first_states(config: Config, model: Any, seeds: Sequence[int]) -> TrainState:
    optimizer = optimizer_of(config, declare(model))

    def start(key: jax.Array) -> TrainState:
        own, rest = jax.random.split(key)
        params = unbox(model.init(own, jnp.zeros((1, 2), jnp.int32))["params"])
        return TrainState(jnp.int32(0), params, optimizer.init(params), jax.random.key_data(rest), jnp.bool_(True))

    return jax.jit(jax.vmap(start))(jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32)))


def _batches(config: Config, task: StateTask, seeds: Sequence[int]) -> Iterator[tuple[int, Batch]]:
    """(steps done after it, {name: [S, steps, B, T]}) per block, which is a pure function of seed and first step."""
    size = config.data.batch_size
    for first in range(0, config.train.steps, STEPS):
        count = min(STEPS, config.train.steps - first)
        drawn = [task.draw(np.random.default_rng([1, seed, first]), count * size) for seed in seeds]
        cut = lambda name, drawn=drawn, count=count: np.stack(
            [getattr(rows, name).reshape(count, size, -1) for rows in drawn]
        )
        batches = jax.device_put({name: cut(name) for name in ("tokens", "targets", "weights")})
        yield first + count, batches


def seed_of(params: Any, index: int) -> Any:
    """The parameters of one seed."""
    return jax.tree.map(lambda leaf: leaf[index], params)
