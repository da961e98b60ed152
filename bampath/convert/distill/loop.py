"""The loop of a stage with a teacher: resumed from its own last checkpoint, saved as an ordinary run."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import jax
import jax.numpy as jnp

from bampath import checkpoint, runs, sharding
from bampath.checkpoint import Saver
from bampath.command import heedless
from bampath.convert.distill.options import Stage
from bampath.convert.distill.step import Teacher, Told, make_step, values_of
from bampath.data import Loader, make_loader
from bampath.flops import train_flops_per_token
from bampath.lock import RunLock
from bampath.metrics import Writer
from bampath.overrides import to_dict
from bampath.progress import Progress, Speed
from bampath.step import Declared, TrainState, build_model, declare, device_batch, optimizer_of
from bampath.train import NonFiniteError


def run_stage(
    stage: Stage,
    folder: Path,
    before: Path,
    teacher: Teacher,
    should_stop: Callable[[], bool] = lambda: False,
    log: TextIO | None = None,
) -> bool:
    """Run one stage in `folder`, or the rest of it; returns whether it was stopped before its end.

    before: the run whose last checkpoint the student begins with. NonFiniteError if a loss, gradient or update is not
    finite; CheckpointError, InUseError and SaveError as in training.
    """
    config, declared = stage.config, declare(build_model(stage.config))
    with ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(RunLock(folder)).take()
        found = runs.open_run(config, folder, declared, resume=True, say=lambda text: None)
        loader = stack.enter_context(make_loader(config.data))
        if found.data is not None:
            loader.restore(found.data)
        state = _first_state(stage, declared, before, found)
        runs.write_config(config, folder)
        loop = _Loop(
            stage,
            folder,
            loader,
            stack.enter_context(Saver(folder, config.train.keep, config.train.keep_every)),
            stack.enter_context(Writer(folder, found.step, config.train.tensorboard)),
            stack.enter_context(Progress(config.train.steps, heedless(log or sys.stdout))),
            _speed(stage, declared),
            time.monotonic() - found.elapsed,
        )
        return loop.run(state, found.step, teacher, declared, should_stop)


def _first_state(stage: Stage, declared: Declared, before: Path, found: runs.Start) -> TrainState:
    """The state that a stage begins or continues with, on this machine's first device."""
    config, place = stage.config, sharding.replicated(None)
    optimizer = optimizer_of(config, declared)
    placed = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    like = jax.tree.map(placed, declared.shapes)
    step, sound = jax.device_put((jnp.int32(found.step), jnp.bool_(True)), place)
    if found.path is None:
        params = checkpoint.read_params(before, like=like)
        key = jax.random.key_data(jax.random.key(config.train.seed))
        state = jax.jit(optimizer.init, out_shardings=place)(params)
        return TrainState(step, params, state, jax.device_put(key, place), sound)
    kept = {"optimizer": jax.eval_shape(optimizer.init, declared.shapes), "key": jax.ShapeDtypeStruct((2,), jnp.uint32)}
    params, rest = checkpoint.restore(found.path, like, jax.tree.map(placed, kept))
    return TrainState(step, params, rest["optimizer"], rest["key"], sound)


def _speed(stage: Stage, declared: Declared) -> Speed:
    data = stage.config.data
    flops = train_flops_per_token(stage.config.model, declared.count, data.sequence_length)
    return Speed(data.batch_size * data.sequence_length, flops, None)  # no MFU: the teacher works as well


@dataclass
class _Loop:
    """What the loop of a stage holds, and the loop."""

    stage: Stage
    folder: Path
    loader: Loader
    saver: Saver
    writer: Writer
    progress: Progress
    speed: Speed
    started: float

    def run(
        self, state: TrainState, start: int, teacher: Teacher, declared: Declared, should_stop: Callable[[], bool]
    ) -> bool:
        """Steps `start` … train.steps - 1; returns whether it was stopped before the last."""
        config, train = self.stage.config, self.stage.config.train
        student, optimizer = build_model(config), optimizer_of(config, declared)
        step = make_step(self.stage, student, teacher.model, declared, optimizer)
        for done in range(start + 1, train.steps + 1):
            state, told = step(state, teacher.params, device_batch(config, next(self.loader)))
            stop, last = should_stop(), done == train.steps
            save = stop or last or _due(done, train.save_every)
            if save or _due(done, train.log_every):
                self.record(done, told)
            if save:
                self.save(done, state)
            if stop and not last:
                self.progress.say(f"stopped after step {done}; continue with --resume")
                return True
        return False

    def record(self, done: int, told: Told) -> None:
        """Write and show what a step told. NonFiniteError if it, or one before it, was not sound."""
        self.saver.check()
        if not bool(told.report.sound):
            raise NonFiniteError(self.complaint(done, told))
        data = self.stage.config.data
        values = values_of(told) | {"tokens": done * data.batch_size * data.sequence_length}
        values |= {"elapsed": time.monotonic() - self.started, **self.speed.at(done)}
        self.writer.write("train", done, values)
        self.progress.show(done, values, self.speed.seconds_per_step)

    def save(self, done: int, state: TrainState) -> None:
        """Start saving the state after `done` steps."""
        tokenizer = self.loader.source.tokenizer
        facts = {
            "config": to_dict(self.stage.config),
            "data": {**self.loader.state(), "step": done},
            "tokenizer": tokenizer.fingerprint,
            "elapsed": time.monotonic() - self.started,
        }
        files = dict([tokenizer.file]) if tokenizer.file else {}
        self.saver.save(done, state.params, runs.saved_state(state), facts, files)

    def complaint(self, done: int, told: Told) -> str:
        """What was not finite, and what is left."""
        self.saver.wait()
        last, name = checkpoint.latest(self.folder, lambda _: None), self.stage.name
        kept = f"the last checkpoint is {last}" if last else "no checkpoint had been saved before"
        return (
            f"{name}, at step {done} or since the last record: the loss is {told.report.loss.value():.4g}, the "
            f"gradient norm {float(told.report.grad_norm):.4g}; {kept}. Lower {name}.lr"
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
