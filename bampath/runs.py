"""The folder of a run: opening it, refusing to overwrite it, and finding where to continue."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from bampath import checkpoint
from bampath.checkpoint import CheckpointError, SaveError
from bampath.config import Config, read, to_json
from bampath.data import Loader
from bampath.lock import NAME as lock_name
from bampath.lock import RunLock
from bampath.overrides import flat
from bampath.sharding import mesh_of, replicated
from bampath.step import (
    Declared,
    TrainState,
    abstract_state,
    first_params,
    init_state,
    optimizer_of,
    state_of,
)
from bampath.warm import Plan, take_over

CONFIG_NAME = "config.json"

# What may differ between a run and its continuation. The loader itself refuses data options that would change the
# stream; a model's shapes are compared with the checkpoint; the others change speed and memory, not the function.
_FREE = ("train.", "optim.", "data.", "mesh.", "model.remat", "model.scan", "model.attention_impl")


@dataclass(frozen=True)
class Start:
    """Where a run begins: step 0 without a checkpoint, or after the steps of `path`."""

    step: int = 0
    path: Path | None = None
    data: dict[str, Any] | None = None
    elapsed: float = 0.0


def open_run(
    config: Config, run_dir: Path, declared: Declared, resume: bool, say: Callable[[str], None] = print
) -> Start:
    """Look at the folder of a run, which need not exist; nothing is made or changed yet.

    FileExistsError if the folder has something in it and `resume` is false; OSError if nothing can be written there.
    CheckpointError if its checkpoint is of a
    model with other arrays, ValueError if the configuration differs in what cannot change.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise NotADirectoryError(f"{run_dir} is a file, not the folder of a run: choose another --run-dir")
    used = run_dir.exists() and any(path.name != lock_name for path in run_dir.iterdir())
    if used and not resume:
        raise _not_empty(run_dir)
    _refuse_read_only(run_dir)
    start = Start()
    if used:
        start = _last(run_dir, say)
        _refuse_changes(config, saved_config(run_dir), declared, start, say)
    if resume:
        say(f"continuing after step {start.step}" if start.path else "no checkpoint to continue from: starting anew")
    return start


def _refuse_read_only(run_dir: Path) -> None:
    """OSError if the folder, or the nearest one above it that exists, cannot be written."""
    folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        what = "has no permission to be written" if folder.is_dir() else "is not a folder"
        raise OSError(f"{folder} {what}, so {run_dir} cannot be the folder of a run: choose another --run-dir")


def _not_empty(run_dir: Path) -> FileExistsError:
    return FileExistsError(
        f"{run_dir} is not empty; continue that run with --resume (in Python resume=True), or choose another --run-dir"
    )


def saved_config(run_dir: Path) -> Config | None:
    """The configuration in a run's folder; None if there is none yet."""
    path = run_dir / CONFIG_NAME
    return read(path) if path.exists() else None


def claim(run_dir: Path, lock: RunLock, resume: bool) -> None:
    """Make the folder of a run and lock it, if it is not locked yet.

    InUseError if another process writes there, FileExistsError if one has done so since the folder was looked at,
    OSError if it cannot be made.
    """
    if lock.held:
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{run_dir} cannot be made ({error.strerror}): choose another --run-dir") from None
    lock.take()
    if not resume and any(path.name != lock_name for path in run_dir.iterdir()):
        raise _not_empty(run_dir)


def write_config(config: Config, run_dir: Path) -> None:
    """Write config.json into the folder of a run so that a crash leaves the old or the new one; else SaveError."""
    temporary = run_dir / f"{CONFIG_NAME}.partial"
    try:
        temporary.write_text(to_json(config) + "\n", encoding="utf-8")
        os.replace(temporary, run_dir / CONFIG_NAME)
    except OSError as error:
        raise SaveError(f"{run_dir / CONFIG_NAME} could not be written: {error.strerror}") from error


def saved_state(state: TrainState) -> dict[str, Any]:
    """What a checkpoint keeps of a state beside its step and parameters."""
    return {"optimizer": state.opt_state, "key": state.key}


def first_state(
    config: Config, model: nn.Module, declared: Declared, loader: Loader, start: Start, warm: Plan | None = None
) -> TrainState:
    """The state to begin with, and the loader moved to the same step; warm: whose weights a new run takes over."""
    optimizer = optimizer_of(config, declared)
    if start.path is None and warm is None:
        return init_state(config, model, optimizer)
    like = abstract_state(config, model, optimizer, mesh_of(config))
    if start.path is None:
        assert warm is not None
        return _warm_state(config, model, optimizer, like, warm)
    params, rest = checkpoint.restore(start.path, like.params, saved_state(like))
    assert start.data is not None
    loader.restore(start.data)
    step, sound = jax.device_put((jnp.int32(start.step), jnp.bool_(True)), replicated(mesh_of(config)))
    return TrainState(step, params, rest["optimizer"], rest["key"], sound)


def _warm_state(
    config: Config, model: nn.Module, optimizer: optax.GradientTransformation, like: TrainState, plan: Plan
) -> TrainState:
    """The first state with the weights of a checkpoint. like: abstract, with placements."""
    params = take_over(plan, like.params, lambda: first_params(config, model))
    rest = lambda params: replace(state_of(config, optimizer, params), params=None)
    where = jax.tree.map(lambda leaf: leaf.sharding, replace(like, params=None))
    return replace(jax.jit(rest, out_shardings=where)(params), params=params)


def _last(run_dir: Path, say: Callable[[str], None]) -> Start:
    path = checkpoint.latest(run_dir, say)
    if path is None:
        return Start()
    info = checkpoint.describe(path)
    return Start(info.step, path, info.data, info.elapsed)


def _refuse_changes(
    config: Config, saved: Config | None, declared: Declared, start: Start, say: Callable[[str], None]
) -> None:
    if saved is None:
        return
    before, now = flat(saved), flat(config)
    changed = [f"{key}: saved {before[key]!r}, now {now[key]!r}" for key in now if before[key] != now[key]]
    fixed = [line for line in changed if not line.startswith(_FREE)]
    if start.path is not None:
        try:
            checkpoint.refuse_differences(checkpoint.describe(start.path), declared.shapes)
        except CheckpointError as error:
            raise CheckpointError("\n  ".join([str(error), "the configurations differ in", *fixed])) from None
        for key in ("train.seed", "train.init_from", "train.init_positional"):
            if before[key] != now[key]:
                raise ValueError(
                    f"{key}={now[key]}, but the run started with {before[key]}: its parameters and random keys come "
                    "from its checkpoint, so this would change nothing"
                )
        if before["optim.name"] != now["optim.name"]:
            raise ValueError(
                f"optim.name={now['optim.name']}, but the run started with {before['optim.name']}, and no optimiser "
                "goes on from another's state; begin a new run with these weights: --init-from"
            )
        if config.train.steps < start.step:
            raise ValueError(f"train.steps={config.train.steps}, but the run has done {start.step} steps already")
    if fixed:
        raise ValueError("\n  ".join(["a run cannot continue as another model; the configurations differ in", *fixed]))
    for line in changed:
        say(f"changed when resuming: {line}")
