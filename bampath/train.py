"""The training loop: one readable function around one jitted step.

Order of things: the configuration is resolved, the model traced (shapes, divisibility and schemes fail here, before
anything is allocated), a checkpoint restored or fresh parameters drawn, the loader moved to the step, then the loop.
The numbers of step n − 1 are read while step n runs. A checkpoint is saved only after its step was found sound.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from flax import linen as nn

from bampath import distributed, runs, sharding, startup
from bampath.checkpoint import Saver, problem
from bampath.command import heedless
from bampath.config import Config
from bampath.data import Loader, load_corpus, make_loader, tokenizer_of, validation_batches
from bampath.data.loader import identity
from bampath.diagnose import explain
from bampath.flops import peak_flops, train_flops_per_token
from bampath.lock import RunLock
from bampath.metrics import Mean, Writer
from bampath.overrides import to_dict
from bampath.profiling import Profiler, Window
from bampath.progress import Progress, Speed
from bampath.step import (
    Batch,
    Declared,
    Report,
    TrainState,
    build_model,
    declare,
    device_batch,
    make_eval_step,
    make_train_step,
    optimizer_of,
)
from bampath.warm import plan as warm_plan


class NonFiniteError(FloatingPointError):
    """A loss, gradient or update that is not finite. The message names the step and the first bad parameter group."""


@dataclass(frozen=True)
class Snapshot:
    """What an evaluation hook gets: the steps done, the model and the parameters after the last of them."""

    step: int
    config: Config
    model: nn.Module
    params: Any


@dataclass(frozen=True)
class Result:
    """How a run ended: steps done, parameters, the last numbers of training and of evaluation, and whether it was
    stopped before its last step."""

    step: int
    params: Any
    train: dict[str, Any]
    evaluation: dict[str, Any]
    stopped: bool = False


Evaluate = Callable[[Snapshot], Mapping[str, float]]


def fit(
    config: Config,
    run_dir: Path | str,
    *,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    profile: Window | None = None,
    out: TextIO | None = None,
) -> Result:
    """Train `config` in `run_dir` (config.json, metrics.jsonl, tensorboard/, checkpoints/) and return how it ended.

    resume: continue the run that is there from its last complete checkpoint, or from the start if it has none; without
        it a folder with anything in it is refused.
    evaluate: called every train.eval_every steps and at the end, by default `validation_loss` (if eval_every is set);
        its numbers are written as kind "eval".
    should_stop: asked after each step; true saves and ends. In a run of several processes (`bampath.distributed.join`)
        it is enough that one of them wishes so, and it takes one step more.
    profile: steps whose trace is written to `run_dir`/profile (of process 0, if there are several).
    out: where progress is shown; default: standard output. Process 0 shows it, and writes all but arrays.

    Raises NonFiniteError, after saving the last sound state; FileExistsError; InUseError if another process writes to
    `run_dir`; CheckpointError if the run is of another model; ValueError for keys that cannot change when resuming;
    DisagreementError if the processes of a run were started differently; SaveError if a file cannot be written;
    LostError if another process of the run is gone: then end with `bampath.distributed.leave`.
    """
    if not isinstance(config, Config):
        raise TypeError(f"config={config!r} is no Config; bampath.config.get('tiny', 'train.steps=100') makes one")
    if not isinstance(run_dir, str | os.PathLike):
        raise TypeError(f"run_dir={run_dir!r} is no path; give the folder that the run is to be in, 'runs/first' say")
    distributed.check_joined()
    run_dir, out = Path(run_dir).absolute(), out or sys.stdout
    model, rows = build_model(config), sharding.local_rows(sharding.mesh_of(config), config.data.batch_size)
    declared = declare(model)
    with ExitStack() as stack, distributed.losses_in_words():
        if out is None or not distributed.lead():  # one process speaks and writes for all
            out = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        out = heedless(out)
        lock = stack.enter_context(RunLock(run_dir))
        if resume and distributed.lead() and run_dir.is_dir():
            lock.take()
        found = runs.open_run(config, run_dir, declared, resume, say=lambda text: print(text, file=out))
        if profile is not None:
            profile.check(found.step, config.train.steps)
        tokenizer = tokenizer_of(config.data)
        startup.check_vocabulary(config, tokenizer)  # before the text is made into tokens
        loader = stack.enter_context(make_loader(config.data, rows=rows, tokenizer=tokenizer))
        warm = warm_plan(config, declared.shapes, tokenizer) if config.train.init_from and not found.path else None
        facts = {"the configuration": to_dict(config), "the text": identity(loader.source)}
        distributed.agree(facts | {"where to begin": str(warm.path) if warm else found.step})
        print(startup.banner(config, declared, tokenizer), file=out, flush=True)
        if warm:
            print(warm, file=out, flush=True)
        if evaluate is None and config.train.eval_every:
            evaluate = validation_loss(config, model, loader)
        state = runs.first_state(config, model, declared, loader, found, warm)
        print(startup.first_rows(loader, found.step), file=out, flush=True)
        if distributed.lead():  # only now: whatever is refused, is refused before
            runs.claim(run_dir, lock, resume)
            runs.write_config(config, run_dir)
        progress = stack.enter_context(Progress(config.train.steps, out))
        saver = stack.enter_context(Saver(run_dir, config.train.keep, config.train.keep_every))
        writer = stack.enter_context(Writer(run_dir, found.step, config.train.tensorboard, active=distributed.lead()))
        profiler = stack.enter_context(Profiler(profile if distributed.lead() else None, run_dir))
        run = _Run(config, model, declared, loader, saver, writer, progress, profiler, evaluate, found.elapsed)
        return run.loop(state, found.step, should_stop)


def validation_loss(config: Config, model: nn.Module, loader: Loader) -> Evaluate:
    """The default hook: mean loss per target token over train.eval_batches batches of the held-out text."""
    tokenizer = loader.source.tokenizer
    corpus = load_corpus(config.data, "validation", tokenizer)
    eval_step = make_eval_step(config, model)
    rows = sharding.local_rows(sharding.mesh_of(config), config.data.batch_size)

    def evaluate(now: Snapshot) -> dict[str, float]:
        mean = Mean.zero()
        held_out = validation_batches(
            config.data, batches=config.train.eval_batches, rows=rows, corpus=corpus, tokenizer=tokenizer
        )
        for batch in held_out:
            mean = mean.merge(eval_step(now.params, device_batch(config, batch)))
        loss = mean.value()
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "targets": float(mean.weight)}

    return evaluate


class _Run:
    """The things that a loop holds, and the loop."""

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        declared: Declared,
        loader: Loader,
        saver: Saver,
        writer: Writer,
        progress: Progress,
        profiler: Profiler,
        evaluate: Evaluate | None,
        elapsed: float,
    ) -> None:
        self.config, self.model, self.declared, self.loader = config, model, declared, loader
        self.saver, self.writer, self.progress, self.evaluate = saver, writer, progress, evaluate
        self.profiler = profiler
        self.started = time.monotonic() - elapsed
        tokens = config.data.batch_size * config.data.sequence_length
        flops = train_flops_per_token(config.model, declared.count, config.data.sequence_length)
        peak = peak_flops(jax.devices()[0].device_kind)
        self.speed = Speed(tokens, flops, None if peak is None else peak * config.mesh.size)
        self.last: dict[str, dict[str, Any]] = {"train": {}, "eval": {}}

    def loop(self, state: TrainState, start: int, should_stop: Callable[[], bool]) -> Result:
        """Steps `start` … train.steps − 1."""
        train = self.config.train
        step = make_train_step(self.config, self.model, self.declared, optimizer_of(self.config, self.declared))
        pending: tuple[int, Report, Batch] | None = None
        vote = distributed.Vote(sharding.mesh_of(self.config))
        done = start
        for done in range(start + 1, train.steps + 1):
            with self.profiler.step(done, before=state):
                batch = device_batch(self.config, next(self.loader))
                state, report = step(state, batch)
            if self.profiler.ends_with(done):
                jax.block_until_ready(state)
                with self.speed.paused():
                    self.profiler.stop()
                self.progress.say(f"profile of the steps up to {done} in {self.profiler.folder}")
            if pending is not None:
                self.read(*pending, state)
            pending = (done, report, batch)
            stop = vote.ask(should_stop())
            save = stop or done == train.steps or _due(done, train.save_every)
            evaluate = self.evaluate is not None and (done == train.steps or _due(done, train.eval_every))
            if save or evaluate:
                self.read(*pending, state)
                pending = None
            if save:
                self.save(done, state)
            if evaluate:
                self.run_evaluation(done, state)
            if stop and done < train.steps:
                self.progress.say(f"stopped after step {done}; continue with --resume (in Python resume=True)")
                return Result(done, state.params, self.last["train"], self.last["eval"], stopped=True)
        return Result(done, state.params, self.last["train"], self.last["eval"])

    def read(self, done: int, report: Report, batch: Batch, state: TrainState) -> None:
        """Look at what step number `done` reported, while the next one runs; log it when it is due."""
        self.saver.check()
        if not bool(report.sound):
            self.fail(done, report, batch, state)
        if not _due(done, self.config.train.log_every) and done != self.config.train.steps:
            return
        values = {
            "loss": report.loss.value(),
            "grad_norm": float(report.grad_norm),
            "update_norm": float(report.update_norm),
            "lr": float(report.lr),
            "targets": float(report.loss.weight),
            "tokens": done * self.config.data.batch_size * self.config.data.sequence_length,
            "elapsed": time.monotonic() - self.started,
            **self.speed.at(done),
        }
        for name, (low, high) in jax.tree.map(np.asarray, report.ranges).items():
            values |= {f"{name}/min": float(low), f"{name}/max": float(high)}
        self.last["train"] = values
        self.writer.write("train", done, values)
        self.progress.show(done, values, self.speed.seconds_per_step)

    def save(self, done: int, state: TrainState) -> Path:
        """Start saving the state after `done` steps, which must be sound."""
        facts = {
            "config": to_dict(self.config),
            "data": {**self.loader.state(), "step": done},
            "tokenizer": self.loader.source.tokenizer.fingerprint,
            "elapsed": time.monotonic() - self.started,
        }
        file = self.loader.source.tokenizer.file
        return self.saver.save(done, state.params, runs.saved_state(state), facts, dict([file] if file else []))

    def run_evaluation(self, done: int, state: TrainState) -> None:
        assert self.evaluate is not None
        with self.speed.paused():
            values = _numbers(self.evaluate(Snapshot(done, self.config, self.model, state.params)))
        self.last["eval"] = values
        self.writer.write("eval", done, values)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.progress.say(f"step {done}  evaluation  {shown}")

    def fail(self, done: int, report: Report, batch: Batch, state: TrainState) -> None:
        """Keep the last sound state, then raise NonFiniteError. `state` was left as it was before step `done`."""
        good = done - 1
        target = self.saver.folder / f"{good:08d}"
        self.saver.wait()
        if good > 0 and problem(target) is not None:
            self.save(good, state)
            self.saver.wait()
        kept = f"the state after step {good} is kept in {target}" if good > 0 else "no step had been done before it"
        raise NonFiniteError(f"step {done}: {explain(self.config, self.declared, report, batch, state)}; {kept}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _numbers(values: Any) -> dict[str, float]:
    """What an `evaluate` gave. TypeError if it is no dict of numbers."""
    try:
        return {str(name): float(value) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise TypeError(f"evaluate gave {values!r}; it must be a dict of numbers, such as {{'loss': 2.5}}") from None
