"""The training of one cell: many steps are one call, batches come from memory."""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bampath.config import Config, override
from bampath.params import unbox
from bampath.step import Batch, TrainState, build_model, declare, make_train_step
from experiments.bam_h200.optimizer import optimizer_of
from experiments.bam_h200.rows import read_rows

BLOCK = 50  # steps of one call
Watch = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Trained:
    """params; curve: [{"step", "loss", "grad_norm", "seconds"}], a mean per block of steps; seconds: of training."""

    params: Any
    curve: list[dict[str, float]]
    seconds: float
    steps: int


class Trainer:
    """The compiled run of a configuration, for several seeds.

    pool: where programs are compiled while this goes on; least_exponent: theta_beta is put back to at least this after
    every step (None: it is free).
    """

    def __init__(self, config: Config, pool: Executor, least_exponent: float | None = None) -> None:
        self.config = config
        # The formula of a loop over layers, which would write down and read again what a layer hands on.
        self.model = build_model(override(config, "model.scan=false"))
        self.declared = declare(self.model)
        self._optimizer = optimizer_of(config, self.declared)
        if config.train.steps % BLOCK:
            raise ValueError(f"train.steps={config.train.steps} must be a multiple of {BLOCK}, the steps of one call")
        step = make_train_step(config, self.model, self.declared, self._optimizer)

        def several(state: TrainState, batches: Batch) -> tuple[TrainState, Any]:
            def one(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
                state, report = step(state, batch)
                if least_exponent is not None:
                    state = replace(state, params=clamped(state.params, least_exponent))
                return state, (report.loss.total / report.loss.weight, report.grad_norm)

            return jax.lax.scan(one, state, batches)

        shape = (BLOCK, config.data.batch_size, config.data.sequence_length)
        kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32, "segment_ids": jnp.int32}
        batches = {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}
        state = jax.eval_shape(self._first, jax.random.key(0))
        self._several = pool.submit(jax.jit(several, donate_argnums=0).lower(state, batches).compile)
        self._start = pool.submit(jax.jit(self._first).lower(jax.random.key(0)).compile)

    def _first(self, key: jax.Array) -> TrainState:
        """What bampath.step.init_state makes of a seed, as a function of its key."""
        start, rest = jax.random.split(key)
        params = unbox(self.model.init(start, jnp.zeros((1, 2), jnp.int32))["params"])
        return TrainState(
            jnp.int32(0), params, self._optimizer.init(params), jax.random.key_data(rest), jnp.bool_(True)
        )

    def wait(self) -> None:
        """Until everything is compiled."""
        self._several.result(), self._start.result()

    def train(self, seed: int, rows: Path, watch: Watch) -> Trained:
        """All steps of the configuration on batches of `rows`. FloatingPointError if one was not finite."""
        several: Any = self._several.result()
        state: TrainState = self._start.result()(jax.random.key(seed))
        jax.block_until_ready(state)
        begin, running, curve = time.monotonic(), None, list[dict[str, float]]()
        for done, batches in read_rows(rows, 0, self.config.train.steps, BLOCK):
            state, told = several(state, jax.device_put(batches))
            if running is not None:  # the block before this one: reading it waits for nothing that was just started
                _note(curve, *running, begin, watch)
            running = (done, told)
        if running is not None:
            _note(curve, *running, begin, watch)
        if not bool(state.sound):
            raise FloatingPointError(f"{self.config.model.position}: a loss, gradient or update was not finite")
        return Trained(state.params, curve, time.monotonic() - begin, self.config.train.steps)


def _note(
    curve: list[dict[str, float]], done: int, told: tuple[jax.Array, jax.Array], begin: float, watch: Watch
) -> None:
    losses, norms = (float(values.mean()) for values in told)
    passed = round(time.monotonic() - begin, 2)
    curve.append({"step": done, "loss": round(losses, 5), "grad_norm": round(norms, 5), "seconds": passed})
    watch(done, curve[-1])


def clamped(params: Any, least: float) -> Any:
    """Parameters with every theta_beta at least `least`."""
    is_exponent = lambda path: getattr(path[-1], "key", None) == "theta_beta"
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.maximum(leaf, least) if is_exponent(path) else leaf, params
    )
