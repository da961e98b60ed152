"""What the studies that are made of cells share: where one goes, and how its results come to lie beside its code."""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any


def folder_of(options: argparse.Namespace, runs: Path) -> Path:
    """Where a study goes: options.out, or a new folder of `runs`.

    ValueError if another study is there that is not to be continued (options.resume), or none is named to continue.
    """
    if options.resume and options.out is None:
        raise ValueError("--resume needs --out, the folder of the study")
    out = options.out or runs / time.strftime("%Y%m%d-%H%M%S")
    if not options.resume and (out / "cells").exists():
        raise ValueError(f"{out} holds a study already: continue it with --resume, or choose another --out")
    return Path(out).absolute()


def publish(out: Path, here: Path, results: dict[str, Any]) -> None:
    """Copy results.json, report.md and figures into `here`, under names with the study's size."""
    size = results["study"]["name"]
    shutil.copy(out / "results.json", here / f"results-{size}.json")
    for figure in sorted((out / "figures").glob("*.png")):
        (here / "figures").mkdir(exist_ok=True)
        shutil.copy(figure, here / "figures" / f"{size}-{figure.name}")
    text = (out / "report.md").read_text(encoding="utf-8").replace("(figures/", f"(figures/{size}-")
    (here / f"report-{size}.md").write_text(text, encoding="utf-8")
