"""Checkpoints: written in the background, complete or not there at all, inspected without reading an array.

    RUN/checkpoints/00000100/checkpoint.json     what it holds: step, config, data state, arrays, files and their sizes
                             params/             the parameters alone, for whoever only evaluates
                             state/              optimiser moments and the random key
                             tokenizer.json      or .model: the tokenizer's file, if it has one
Only this file knows orbax. A checkpoint is written under another name; its `checkpoint.json` comes last, then the
folder gets its name. One whose files are missing or cut short is passed over with a message; reading never deletes.
"""

import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from bampath import distributed
from bampath.arrays import ArrayInfo, differences, index

logger = logging.getLogger(__name__)
FOLDER = "checkpoints"
INFO_NAME = "checkpoint.json"
FORMAT = 1
_UNFINISHED = ".orbax-checkpoint-tmp"
_PLAIN = ("step", "config", "data", "tokenizer", "elapsed", "created", "versions", "files")
_DIFFERENCES_SHOWN = 5


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, or of another model."""


class SaveError(OSError):
    """A file of a run that could not be written. The message says which and why, and which checkpoint is left."""


@dataclass(frozen=True)
class Info:
    """What `checkpoint.json` says. config is the resolved configuration, data the loader's state, tokenizer its
    fingerprint, elapsed the seconds of training so far; params and state list the arrays."""

    path: Path
    step: int
    config: dict[str, Any]
    data: dict[str, Any]
    tokenizer: str
    elapsed: float
    created: str
    versions: dict[str, str]
    params: tuple[ArrayInfo, ...]
    state: tuple[ArrayInfo, ...]
    files: dict[str, int]


class Saver:
    """Saves checkpoints of one run in the background.

    `keep`: how many of the latest complete ones stay; `keep_every`: checkpoints of these steps stay for ever (0: none).
    An older one is removed only when `keep` newer complete ones exist. A save that fails in the background is raised as
    SaveError by the next call. Use as a context manager, or call `close`, so that the last save is waited for. In a run
    of several processes all of them make the same calls; process 0 does what needs one. What a killed run left half
    written is removed here: nobody else may be writing (`bampath.lock`).
    """

    def __init__(self, run_dir: Path | str, keep: int = 2, keep_every: int = 0) -> None:
        import orbax.checkpoint as ocp

        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the last complete checkpoint always stays")
        self.folder = Path(run_dir).absolute() / FOLDER
        self._keep, self._keep_every = keep, keep_every
        self._next: tuple[Path, dict[str, Any], Mapping[str, bytes]] | None = None
        options = ocp.options.AsyncOptions(post_finalization_callback=self._describe_files)
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)
        self._failed = False
        if distributed.lead():
            self._remove_leftovers()

    def save(
        self,
        step: int,
        params: Any,
        state: Any,
        facts: Mapping[str, Any],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Path:
        """Start saving; returns the checkpoint's folder once the arrays may be overwritten.

        params: nested dict of arrays; state: any pytree of arrays, an empty one where there is none; facts: config,
        data, tokenizer, elapsed (see Info); files: names and contents of small files to put beside them.
        A folder of this step that is not complete is replaced; a complete one raises CheckpointError.
        """
        self.wait()
        target = self.folder / f"{step:08d}"
        if distributed.decided_by_lead(lambda: target.exists() and problem(target) is None):
            raise CheckpointError(f"{target} is there already and complete")
        info = {
            "format": FORMAT,
            "step": step,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            **facts,
            "params": _index_json(params),
            "state": _index_json(state),
        }
        self._next = (target, info, files)
        with self._failures():
            if distributed.lead() and target.exists():
                shutil.rmtree(target)
            self._start(target, params, state)
        return target

    def _start(self, target: Path, params: Any, state: Any) -> None:
        import orbax.checkpoint as ocp

        numbered = {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        arguments = {"params": ocp.args.PyTreeSave(params)}
        if numbered:
            arguments["state"] = ocp.args.PyTreeSave(numbered)
        self._writer.save(target, args=ocp.args.Composite(**arguments))

    def check(self) -> None:
        """Raise the error of a background save that failed, if there is one."""
        with self._failures():
            self._writer.check_for_errors()

    def wait(self) -> None:
        """Wait for the save that is under way, then remove what need not be kept."""
        with self._failures():
            self._writer.wait_until_finished()
        if distributed.lead():
            self._prune()

    def close(self) -> None:
        if not self._failed:
            self.wait()
        self._writer.close()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and distributed.several():
            return  # a save that is under way waits for the others, which may wait for this one
        try:
            self.close()
        except SaveError as second:
            if error is None:
                raise
            logger.error("%s", second)  # what ended the run comes first

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Errors of orbax and of the file system as SaveError, those of a process that is gone as LostError."""
        try:
            with distributed.losses_in_words():
                yield
        except distributed.LostError:
            raise
        except Exception as error:
            self._failed = True
            last = latest(self.folder.parent, lambda _: None)
            left = f"the last complete checkpoint is {last}" if last else "there is no complete checkpoint yet"
            place = self._next[0] if self._next else self.folder
            raise SaveError(f"{place} could not be written: {_reason(error)}; {left}") from error

    def _describe_files(self) -> None:
        """Called by orbax when all arrays are written, just before the folder gets its final name."""
        if self._next is None or not distributed.lead():
            return
        target, info, files = self._next
        work = target.with_name(target.name + _UNFINISHED)
        for name, content in files.items():
            (work / name).write_bytes(content)
        found = [path for item in ("params", "state") for path in (work / item).rglob("*") if path.is_file()]
        found += [work / name for name in files]
        info["files"] = {str(path.relative_to(work)): path.stat().st_size for path in sorted(found)}
        (work / INFO_NAME).write_text(json.dumps(info, indent=1), encoding="utf-8")

    def _prune(self) -> None:
        complete = [path for path in steps(self.folder) if problem(path) is None]
        for path in complete[: -self._keep]:
            if not (self._keep_every and int(path.name) % self._keep_every == 0):
                doomed = path.with_name(path.name + _UNFINISHED)  # so that a half-removed one is never taken for one
                path.rename(doomed)
                shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        for path in self.folder.glob(f"*{_UNFINISHED}") if self.folder.is_dir() else ():
            if path.name.removesuffix(_UNFINISHED).isdigit():
                logger.warning("removing %s, which was never finished", path)
                shutil.rmtree(path)


def _reason(error: BaseException) -> str:
    """What the system said: the end of the innermost error's first line, without the way through the layers to it."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    line = (str(error).splitlines() or [type(error).__name__])[0]
    system = re.search(r"([^:]+) \[os_error_code", line)
    return system.group(1).strip() if system else line


def steps(folder: Path) -> list[Path]:
    """Checkpoint folders in order of their steps, complete or not."""
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if path.name.isdigit() and path.is_dir()), key=lambda p: int(p.name)
    )


def problem(path: Path) -> str | None:
    """Why a checkpoint folder is not complete, or None if it is. Looks at names and sizes only."""
    try:
        info = json.loads((path / INFO_NAME).read_text(encoding="utf-8"))
        files = dict(info["files"])
        if info["format"] == FORMAT:
            [info[name] for name in (*_PLAIN, "params", "state")]
    except OSError:
        return f"it has no {INFO_NAME}, so its saving was not finished"
    except (ValueError, KeyError, TypeError):
        return f"its {INFO_NAME} is damaged"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        if file.stat().st_size != size:
            return f"its file {name} has {file.stat().st_size} bytes of {size}"
    return None


def latest(run_dir: Path | str, say: Callable[[str], None] = logger.warning) -> Path | None:
    """The newest complete checkpoint of a run, None if it has none; `say` hears of each one that is passed over."""
    for path in reversed(steps(Path(run_dir) / FOLDER)):
        why = problem(path)
        if why is None:
            return path
        say(f"passing over the checkpoint {path}: {why}")
    return None


def find(path: Path | str) -> Path:
    """The checkpoint that a user means by a run's folder (its latest) or a checkpoint's. CheckpointError if none."""
    path = Path(path).expanduser().absolute()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    run = path.parent if path.name == FOLDER else path
    if not (run / FOLDER).is_dir():
        why = problem(path)
        if why is not None:
            below = (*path.glob(f"*/{FOLDER}"), *path.glob(f"*/*/{FOLDER}"))  # a sweep's, a distillation's
            inside = sorted(str(found.parent.relative_to(path)) for found in below)[:3]
            why = f"it holds runs, so name one of them, such as {', '.join(inside)}" if inside else why
            raise CheckpointError(f"{path} is neither a run nor a complete checkpoint: {why}")
        return path
    found = latest(run)
    if found is None:
        raise CheckpointError(f"{run} holds no complete checkpoint")
    return found


def describe(path: Path | str) -> Info:
    """What the checkpoint `find(path)` holds; no array is read, no device is touched."""
    path = find(path)
    found = json.loads((path / INFO_NAME).read_text(encoding="utf-8"))
    if found["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {found['format']}; this code reads format {FORMAT}")
    arrays: dict[str, Any] = {
        item: tuple(ArrayInfo(a["name"], tuple(a["shape"]), a["dtype"], a["placement"]) for a in found[item])
        for item in ("params", "state")
    }
    return Info(path=path, **{name: found[name] for name in _PLAIN}, **arrays)


def restore(path: Path | str, params: Any, state: Any) -> tuple[Any, Any]:
    """(params, state) of a checkpoint, with the structure, shapes and sharding of the given (abstract) trees.

    The sharding comes from the target, never from the file. CheckpointError names the first arrays that differ.
    """
    info = describe(path)
    refuse_differences(info, params, state)
    leaves, treedef = jax.tree.flatten(state)
    numbered = {f"{i:05d}": leaf for i, leaf in enumerate(leaves)}
    read = _read(info.path, {"params": params, "state": numbered})
    return read["params"], jax.tree.unflatten(treedef, [read["state"][name] for name in numbered])


def read_params(path: Path | str, like: Any = None, only: Callable[[str], bool] | None = None) -> Any:
    """The parameters of a checkpoint alone.

    like: (abstract) parameters whose structure must match and whose sharding is taken; None reads numpy arrays, on any
    machine. only: keeps the arrays whose name it accepts, such as "layer_0/attention/query"; the others are not read.
    """
    info = describe(path)
    if like is not None:
        refuse_differences(info, like)
        return _read(info.path, {"params": like})["params"]
    wanted: dict[str, Any] = {}
    for array in info.params:
        if only is None or only(array.name):
            *parents, last = array.name.split("/")
            node = wanted
            for name in parents:
                node = node.setdefault(name, {})
            node[last] = np.zeros((0,), array.dtype)
    return _read(info.path, {"params": wanted})["params"] if wanted else {}


def read_some(path: Path | str, like: Any) -> Any:
    """The parameters of a checkpoint that `like` names, a nested dict of (abstract) arrays, placed as they are there.

    Nothing is compared: that is for the caller to do (`describe` lists names and shapes).
    """
    return _read(find(path), {"params": like})["params"]


def refuse_differences(info: Info, params: Any, state: Any = None) -> None:
    """CheckpointError if a checkpoint's arrays are not those of the given trees, with the first that differ."""
    what, found = "this model", differences(info.params, index(params), "the checkpoint", "this model")
    if not found and state is not None:
        what = "this optimiser"
        found = differences(info.state, index(state), "the checkpoint", what)
    if found:
        more = f"\n  … and {len(found) - _DIFFERENCES_SHOWN} more" if len(found) > _DIFFERENCES_SHOWN else ""
        lines = "".join(f"\n  {line}" for line in found[:_DIFFERENCES_SHOWN])
        raise CheckpointError(f"{info.path} does not fit {what}; the first differences are{lines}{more}")


def versions() -> dict[str, str]:
    """Versions of what a result may depend on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")}


def _read(path: Path, trees: dict[str, Any]) -> dict[str, Any]:
    """Items of a checkpoint onto trees: numpy leaves come back as numpy arrays, others with the leaf's sharding."""
    import orbax.checkpoint as ocp

    arguments = {}
    for item, tree in trees.items():
        how = jax.tree.map(_restore_args, tree)
        arguments[item] = ocp.args.PyTreeRestore(item=tree, restore_args=how, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            restored = reader.restore(path, args=ocp.args.Composite(**arguments))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {_reason(error)}. Restore its files, or move it away to use the one before it"
        ) from error
    return {item: restored[item] for item in trees}


def _restore_args(leaf: Any) -> Any:
    import orbax.checkpoint as ocp

    if isinstance(leaf, np.ndarray):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _index_json(tree: Any) -> list[dict[str, Any]]:
    return [{"name": a.name, "shape": a.shape, "dtype": a.dtype, "placement": a.placement} for a in index(tree)]
