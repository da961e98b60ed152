"""The members of one program of a sweep: trained together, saved together, each left behind as a run of its own."""

import json
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bampath import checkpoint, sweep
from bampath.checkpoint import Saver
from bampath.command import Stop
from bampath.config import Config
from bampath.data import Tokenizer, load_corpus, tokenizer_of, validation_batches
from bampath.data.loader import STATE_VERSION, BatchSource, identity
from bampath.evaluation.results import write_json
from bampath.metrics import Mean, Writer, read
from bampath.overrides import to_dict
from bampath.runs import saved_state, write_config
from bampath.startup import check_vocabulary
from bampath.step import Report, TrainState, build_model, declare
from experiments.sweep.plan import Group, Member

Row = dict[str, Any]


def run_group(group: Group, out: Path, stop: Stop) -> list[Row]:
    """Train a group in OUT/groups/SLUG, or continue it, or read what it gave; one row of results per member.

    No rows if it was stopped by a signal, after saving. ValueError for text or a model that do not go together.
    """
    folder = out / "groups" / group.slug
    finished = folder / "rows.json"
    if finished.exists():
        return _read_rows(finished, group)
    run = _Run(group, out, folder)
    if not run.train(stop):
        return []
    rows = run.finish()
    write_json(finished, {"rows": rows})
    return rows


def _read_rows(path: Path, group: Group) -> list[Row]:
    """What a finished group gave. ValueError if the file is damaged or tells of other members."""
    try:
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        values = [row["values"] for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: delete it, and the group is evaluated again") from error
    if values != [member.values for member in group.members]:
        raise ValueError(f"{path} holds the results of other members: choose another --out")
    return rows


class _Run:
    """What a group's training holds."""

    def __init__(self, group: Group, out: Path, folder: Path) -> None:
        self.group, self.folder = group, folder
        self.members = group.members
        self.config: Config = self.members[0].config
        self.folders = [out / "members" / member.slug for member in self.members]
        self.mesh = sweep.spread(len(self.members), jax.devices())
        self.tokenizer = tokenizer_of(self.config.data)
        for member in self.members:
            check_vocabulary(member.config, self.tokenizer)
        self.sources = _sources(self.members, self.tokenizer)
        self.rates = sweep.place(np.stack([sweep.rates_of(member.config) for member in self.members]), self.mesh)
        self.started = time.monotonic()
        self.state, self.start, self.elapsed = self._first()

    def _first(self) -> tuple[TrainState, int, float]:
        """The states to begin with, the steps done, the seconds that they took."""
        configs = [member.config for member in self.members]
        fresh = sweep.first_states(configs, [member.starts for member in self.members])
        last = checkpoint.latest(self.folder, print)
        if last is None:
            return sweep.place(fresh, self.mesh), 0, 0.0
        info = checkpoint.describe(last)
        print(f"{self.group.slug}: continuing after step {info.step}")
        params, rest = checkpoint.restore(last, fresh.params, _stacked_state(fresh))
        state = TrainState(rest["step"], params, rest["optimizer"], rest["key"], rest["sound"])
        return sweep.place(state, self.mesh), info.step, info.elapsed

    def batch(self, step: int) -> Any:
        """The members' batches of a step, stacked, on their devices."""
        batches = [source[step] for source in self.sources]
        return sweep.place(_stack(self.config, batches), self.mesh)

    def train(self, stop: Stop) -> bool:
        """All steps from where the group is; whether it came to the end."""
        train, step = self.config.train, sweep.make_step(self.config, self.mesh)
        for folder, member in zip(self.folders, self.members, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            write_config(member.config, folder)
        with ExitStack() as stack:
            boards = train.tensorboard
            writers = [stack.enter_context(Writer(folder, self.start, boards)) for folder in self.folders]
            saver = stack.enter_context(Saver(self.folder))
            pending: tuple[int, Report] | None = None
            self.compiled, first = 0.0, time.monotonic()
            batch = self.batch(self.start) if self.start < train.steps else None
            for done in range(self.start + 1, train.steps + 1):
                self.state, report = step(self.state, batch, self.rates)
                if done == self.start + 1:
                    self.compiled = time.monotonic() - first
                batch = self.batch(done) if done < train.steps else None
                if pending is not None:
                    self.read(*pending, writers)
                pending = (done, report) if _due(done, train.log_every) or done == train.steps else None
                save = stop.by != 0 or done == train.steps or _due(done, train.save_every)
                if save and pending is not None:
                    self.read(*pending, writers)
                    pending = None
                if save:
                    self.save(saver, done)
                if stop.by and done < train.steps:
                    return False
        return True

    def read(self, done: int, report: Report, writers: list[Writer]) -> None:
        """Write what a step reported into the members' metrics; a member that is not sound has ended."""
        host = jax.device_get(report)
        elapsed = self.elapsed + time.monotonic() - self.started
        losses = []
        for index, writer in enumerate(writers):
            own = sweep.member(host, index)
            if own.sound:
                losses.append(own.loss.value())
                writer.write("train", done, self.values(own, done, elapsed))
        shown = f"loss {min(losses):.4f} to {max(losses):.4f}" if losses else "no member is finite any more"
        ended = len(writers) - len(losses)
        lost = f", {ended} ended by a loss that is not finite" if ended else ""
        print(f"{self.group.slug}: step {done}/{self.config.train.steps}  {shown}{lost}", flush=True)

    def values(self, own: Report, done: int, elapsed: float) -> dict[str, float]:
        """A record of metrics.jsonl, as `bampath.train` writes it, but for the speed."""
        data = self.config.data
        values = {
            "loss": own.loss.value(),
            "grad_norm": float(own.grad_norm),
            "update_norm": float(own.update_norm),
            "lr": float(own.lr),
            "targets": float(own.loss.weight),
            "tokens": done * data.batch_size * data.sequence_length,
            "elapsed": elapsed,
        }
        for name, (low, high) in own.ranges.items():
            values |= {f"{name}/min": float(low), f"{name}/max": float(high)}
        return values

    def save(self, saver: Saver, done: int) -> None:
        """Start saving all members' states."""
        if checkpoint.problem(saver.folder / f"{done:08d}") is not None:
            saver.save(done, self.state.params, _stacked_state(self.state), self.facts(self.config, done, 0))

    def facts(self, config: Config, done: int, index: int) -> dict[str, Any]:
        return {
            "config": to_dict(config),
            "data": {"version": STATE_VERSION, "step": done, "identity": identity(self.sources[index])},
            "tokenizer": self.tokenizer.fingerprint,
            "elapsed": self.elapsed + time.monotonic() - self.started,
        }

    def finish(self) -> list[Row]:
        """Evaluate, leave every member behind as a run, and say what came out."""
        validation = _validation(self)
        host = jax.device_get(self.state)
        declared = declare(build_model(self.config))
        rows = []
        for index, (member, folder) in enumerate(zip(self.members, self.folders, strict=True)):
            state = sweep.member(host, index)
            done = int(state.step)
            self._export(folder, member, state, done, index)
            losses = [record["loss"] for record in read(folder / "metrics.jsonl") if record["kind"] == "train"]
            rows.append(
                {
                    "case": member.slug,
                    "group": self.group.slug,
                    "values": member.values,
                    "steps": done,
                    "finite": bool(state.sound),
                    "loss": statistics.fmean(losses[-max(1, len(losses) // 10) :]) if losses else None,
                    "validation_loss": validation[index],
                    "parameters": declared.count,
                    "run": str(folder.relative_to(self.folder.parents[1])),
                }
            )
        return rows

    def _export(self, folder: Path, member: Member, state: TrainState, done: int, index: int) -> None:
        target = folder / checkpoint.FOLDER / f"{done:08d}"
        if done == 0 or checkpoint.problem(target) is None:
            return
        file = self.tokenizer.file
        with Saver(folder) as saver:
            facts = self.facts(member.config, done, index)
            saver.save(done, state.params, saved_state(state), facts, dict([file] if file else []))


def _sources(members: tuple[Member, ...], tokenizer: Tokenizer) -> list[BatchSource]:
    """One source of batches per member; members that read alike share it."""
    found: dict[Any, BatchSource] = {}
    for member in members:
        if member.config.data not in found:
            corpus = load_corpus(member.config.data, "train", tokenizer)
            found[member.config.data] = BatchSource(member.config.data, corpus, tokenizer)
    return [found[member.config.data] for member in members]


def _stack(config: Config, batches: list[Any]) -> Any:
    return {name: np.stack([batch[name] for batch in batches]) for name in sweep.abstract_batch(config)}


def _stacked_state(state: TrainState) -> dict[str, Any]:
    return saved_state(state) | {"step": state.step, "sound": state.sound}


def _validation(run: _Run) -> list[float | None]:
    """Mean loss of every member on train.eval_batches batches of its held-out text; None if nothing is held out."""
    config, count = run.config, run.config.train.eval_batches
    if config.data.split == "none" and not config.data.validation_source:
        return [None] * len(run.members)
    evaluate = sweep.make_evaluation(config, run.mesh)
    totals = weights = np.zeros(len(run.members))
    for batches in zip(*(_held_out(member.config, run.tokenizer, count) for member in run.members), strict=True):
        mean: Mean = jax.device_get(evaluate(run.state.params, sweep.place(_stack(config, list(batches)), run.mesh)))
        totals, weights = totals + mean.total, weights + mean.weight
    return [
        float(total / weight) if math.isfinite(total) else None for total, weight in zip(totals, weights, strict=True)
    ]


def _held_out(config: Config, tokenizer: Tokenizer, batches: int) -> Iterator[Any]:
    return validation_batches(config.data, batches=batches, tokenizer=tokenizer)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
