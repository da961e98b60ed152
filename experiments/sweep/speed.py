"""What a sweep saves: the same small models one by one, and as one program.

    python -m experiments.sweep.speed                 about 15 minutes on 2 CPU cores
    python -m experiments.sweep.speed --case tiny --way "spread over devices"        4 minutes; other rows stay

Each case is a configuration with 8 seeds. Alone means 8 times the ordinary training command, one after the other, each
with its own start and compilation; then the same again with --compile-cache, so that only the first one compiles. The
sweep is one command, timed before and after them, from start to table. Tokens are cached before. Then every member is
compared with the run alone: losses of all steps, and all parameters. Writes experiments/sweep/results.json and the
table in its README. The machine's load when a case begins is recorded: what else it does costs both sides.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bampath import checkpoint
from bampath.evaluation.results import environment, write_results
from bampath.metrics import read
from experiments.tables import replace_between

HERE = Path(__file__).parent
SEEDS = 8
COMMON = ("--config", "tiny", "train.steps=200", "train.log_every=1", "train.save_every=100", "train.tensorboard=false")
CASES: dict[str, tuple[str, ...]] = {
    "tiny": (),
    "tiny, 100 steps": ("train.steps=100",),
    "dim 32, rows of 64": ("data.sequence_length=64", "data.batch_size=4", "model.dim=32", "model.heads=2"),
}
WAYS = {"spread over devices": (), "vmapped on one device": ("--devices", "1")}
BEGIN, END = "<!-- speed: written by experiments.sweep.speed -->", "<!-- end of speed -->"


def timed(module: str, *arguments: str) -> dict[str, float]:
    """Wall and CPU seconds of a command in a process of its own. RuntimeError, with its output, if it fails."""
    environ = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environ, capture_output=True, text=True, check=False
    )
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2)}


def measure(case: str, ways: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """The rows of a case: one per way of running the sweep."""
    keys = [*(key for key in COMMON if key.partition("=")[0] not in _keys(CASES[case])), *CASES[case]]
    load = os.getloadavg()[0]

    def sweep(way: str, number: int) -> dict[str, float]:
        members = ("--vary", f"seed=0..{SEEDS - 1}", *WAYS[way], "--out", str(folder / f"{way}-{number}"))
        return timed("experiments.sweep", *keys, *members)

    def alone(name: str, *more: str) -> list[dict[str, float]]:
        seeds = [(f"train.seed={n}", f"data.seed={n}", "--run-dir", str(folder / f"{name}-{n}")) for n in range(SEEDS)]
        return [timed("experiments.train", *keys, *seed, *more) for seed in seeds]

    sweeps = {way: [sweep(way, 0)] for way in ways}
    runs = {"alone": alone("alone"), "cached": alone("cached", "--compile-cache", str(folder / "programs"))}
    for way in ways:
        sweeps[way].append(sweep(way, 1))
    facts = {"case": case, "overrides": keys[2:], "seeds": SEEDS, "load_before": round(load, 2), "env": environment()}
    for name, times in runs.items():
        facts[f"{name}_s"] = round(sum(one["wall_s"] for one in times), 2)
        facts[f"{name}_each_s"] = [one["wall_s"] for one in times]
        facts[f"{name}_cpu_s"] = round(sum(one["cpu_s"] for one in times), 2)
    return [
        {**facts, "way": way, **ratios(facts, times), **compare(folder, folder / f"{way}-0" / "members")}
        for way, times in sweeps.items()
    ]


def ratios(facts: dict[str, Any], sweeps: list[dict[str, float]]) -> dict[str, Any]:
    """How many times as long the runs took as the sweep (mean of its times); least: as its slower time."""
    walls = [one["wall_s"] for one in sweeps]
    mean = sum(walls) / len(walls)
    return {
        "sweep_s": walls,
        "sweep_cpu_s": [one["cpu_s"] for one in sweeps],
        "ratio": round(facts["alone_s"] / mean, 2),
        "ratio_least": round(facts["alone_s"] / max(walls), 2),
        "ratio_cached": round(facts["cached_s"] / mean, 2),
    }


def compare(alone: Path, members: Path) -> dict[str, Any]:
    """How far members are from the runs alone: over all seeds and steps, over all parameters."""
    losses, parameters, same = [], [], []
    for seed in range(SEEDS):
        a, b = alone / f"alone-{seed}", members / f"seed-{seed}"
        curves = [
            np.array([r["loss"] for r in read(path / "metrics.jsonl") if r["kind"] == "train"]) for path in (a, b)
        ]
        losses.append(float(np.max(np.abs(curves[1] / curves[0] - 1))))
        left, right = (_flat(checkpoint.read_params(path)) for path in (a, b))
        parameters.append(float(np.max(np.abs(left - right))))
        same.append(bool((curves[0] == curves[1]).all() and (left == right).all()))
    return {
        "bitwise_equal": sum(same),
        "loss_relative_error": max(losses),
        "parameter_absolute_error": max(parameters),
    }


def _flat(params: Any) -> np.ndarray:
    import jax

    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(params)])


def _keys(overrides: Sequence[str]) -> set[str]:
    return {entry.partition("=")[0] for entry in overrides}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for the README; a dash for what was not measured."""
    shown = lambda number, digits: "–" if number is None else f"{number:.{digits}f}"
    lines = [
        f"{rows[0]['env']['platform']}, JAX {rows[0]['env']['jax']}, {SEEDS} seeds.",
        "",
        "| case | members | load before | alone, s | with cached programs, s | sweep, s (before, after) | ratio "
        "| to cached | of CPU times | bitwise equal | losses differ by | parameters differ by |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cpu = row["alone_cpu_s"] * len(row["sweep_cpu_s"]) / sum(row["sweep_cpu_s"])
        cells = [
            row["case"],
            row["way"],
            shown(row["load_before"], 1),
            shown(row["alone_s"], 0),
            shown(row["cached_s"], 0),
            ", ".join(f"{wall:.1f}" for wall in row["sweep_s"]),
            f"**{row['ratio']:.1f}**",
            shown(row["ratio_cached"], 1),
            f"{cpu:.1f}",
            f"{row['bitwise_equal']} of {SEEDS}",
            f"{row['loss_relative_error']:.1e}",
            f"{row['parameter_absolute_error']:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows in the order of cases and ways, new ones in place of old ones."""
    rows = {(row["case"], row["way"]): row for row in (*old, *new)}
    return [rows[case, way] for case in CASES for way in WAYS if (case, way) in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sweep.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--way", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    from bampath.data import DataConfig, load_corpus

    load_corpus(DataConfig())
    results = HERE / "results.json"
    for case in options.case:
        with tempfile.TemporaryDirectory() as folder:
            new = measure(case, options.way, Path(folder))
        print(table(new), flush=True)
        old = json.loads(results.read_text(encoding="utf-8"))["rows"] if results.exists() else []
        rows = merged(old, new)
        write_results(results, environment(), rows)
        replace_between(HERE / "README.md", BEGIN, END, f"\n{table(rows)}\n")


if __name__ == "__main__":
    main()
