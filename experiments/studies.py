"""What the studies that are made of cells share: where one goes, what is kept of a cell, and how results come to lie
beside the code."""

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bampath.config import from_json, to_json
from bampath.lock import RunLock


def folder_of(options: argparse.Namespace, runs: Path) -> Path:
    """Where a study goes: options.out, or a new folder of `runs`.

    ValueError if another study is there that is not to be continued (options.resume), or none is named to continue.
    """
    if options.resume and options.out is None:
        raise ValueError("--resume needs --out, the folder of the study")
    out = options.out or runs / time.strftime("%Y%m%d-%H%M%S")
    if not options.resume and (out / "cells").exists():
        raise ValueError(f"{out} holds a study already: continue it with --resume, or choose another --out")
    if not options.resume and (out / "checkpoints").exists():
        raise ValueError(f"{out} holds a run of experiments.train, not a study: choose another --out")
    return Path(out).absolute()


def read_kept(path: Path) -> Any:
    """What a JSON file of a study holds. ValueError that names the file if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or delete it to have it made again") from None


def calls_of(file: dict[str, Any], part: str, taken: Sequence[str]) -> list[dict[str, Any]]:
    """The environments that wrote what is `taken` of a results file, each with its share under `part`: the file's own,
    or those of the calls merged in it."""
    every = file.get("runs") or [file["env"]]
    found = [{**env, part: [name for name in taken if name in env.get(part, taken)]} for env in every]
    return [run for run in found if run[part]]


def rows_of_cell(path: Path, identity: Any) -> list[dict[str, Any]] | None:
    """The rows of a cell that is done; None if it is not. ValueError if the file is damaged or has other options.

    identity: everything that decides the rows, as plain values. An option of its "config" that the file does not know,
    because there was none when it was written, had its default.
    """
    if not path.exists():
        return None
    found = read_kept(path)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise ValueError(f"{path} is damaged (it has no rows): restore it, or delete it to have it made again")
    if _with_defaults(found.get("identity")) != _with_defaults(identity):
        raise ValueError(f"{path.parent} is a cell with other options; choose another --out")
    return list(found["rows"])


def _with_defaults(identity: Any) -> Any:
    if not isinstance(identity, dict) or not isinstance(identity.get("config"), dict):
        return identity
    try:
        config = from_json(json.dumps(identity["config"]))
    except (ValueError, TypeError):  # of another version, or no configuration
        return identity
    return {**identity, "config": json.loads(to_json(config))}


def refuse_counts(options: argparse.Namespace, *names: str) -> None:
    """ValueError for options that are no numbers of things, and for minutes that are no time. None is not given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    minutes = getattr(options, "minutes", 0.0)
    if not minutes >= 0:
        raise ValueError(f"--minutes {minutes:g} must be at least 0")


def refuse_alike(cells: Iterable[tuple[str, str]]) -> None:
    """ValueError if two cells, (what it is, its folder) each, would share a folder: the second could not be kept."""
    seen: dict[str, str] = {}
    for name, folder in cells:
        if folder in seen:
            what = "is given twice" if seen[folder] == name else f"and {seen[folder]} would share the folder {folder}"
            raise ValueError(f"{name} {what}: leave one of them out")
        seen[folder] = name


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Make the folder of a study and keep it to this process. InUseError if another one is working there."""
    out.mkdir(parents=True, exist_ok=True)
    with RunLock(out, "--out") as lock:
        lock.take()
        yield


def publish(out: Path, here: Path, results: dict[str, Any]) -> None:
    """Copy results.json, report.md and figures into `here`, under names with the study's size."""
    size = results["study"]["name"]
    shutil.copy(out / "results.json", here / f"results-{size}.json")
    for figure in sorted((out / "figures").glob("*.png")):
        (here / "figures").mkdir(exist_ok=True)
        shutil.copy(figure, here / "figures" / f"{size}-{figure.name}")
    text = (out / "report.md").read_text(encoding="utf-8").replace("(figures/", f"(figures/{size}-")
    (here / f"report-{size}.md").write_text(text, encoding="utf-8")
