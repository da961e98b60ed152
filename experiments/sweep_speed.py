"""What a sweep saves: the same small models one by one, and as one program.

    python -m experiments.sweep_speed                 about 10 minutes on 2 CPU cores

Each case is a configuration with 8 seeds. Alone means 8 times the ordinary training command, one after the other, each
with its own start and compilation; the sweep is one command, timed before and after them, from start to table. Tokens
are cached before. Then every member is compared with the run alone: losses of all steps, and all parameters. Writes
experiments/sweep/results.json and the table in its README.
"""

import argparse
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

HERE = Path(__file__).with_name("sweep")
SEEDS = 8
COMMON = ("--config", "tiny", "train.steps=200", "train.log_every=1", "train.save_every=100", "train.tensorboard=false")
CASES: dict[str, tuple[str, ...]] = {
    "tiny": (),
    "tiny, 100 steps": ("train.steps=100",),
    "dim 32, rows of 64": ("data.sequence_length=64", "data.batch_size=4", "model.dim=32", "model.heads=2"),
}
WAYS = {"spread over devices": (), "vmapped on one device": ("--devices", "1")}
BEGIN, END = "<!-- speed: written by experiments.sweep_speed -->", "<!-- end of speed -->"


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


def measure(case: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a case: one per way of running the sweep."""
    keys = [*(key for key in COMMON if key.partition("=")[0] not in _keys(CASES[case])), *CASES[case]]
    sweeps: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    sweep = lambda way, n: timed(
        "experiments.sweep", *keys, "--vary", f"seed=0..{SEEDS - 1}", *WAYS[way], "--out", str(folder / f"{way}-{n}")
    )
    for way in WAYS:
        sweeps[way].append(sweep(way, 0))
    alone = []
    for seed in range(SEEDS):
        run = str(folder / f"alone-{seed}")
        alone.append(timed("experiments.train", *keys, f"train.seed={seed}", f"data.seed={seed}", "--run-dir", run))
    for way in WAYS:
        sweeps[way].append(sweep(way, 1))
    total = {name: round(sum(one[name] for one in alone), 2) for name in ("wall_s", "cpu_s")}
    rows = []
    for way, times in sweeps.items():
        walls = [one["wall_s"] for one in times]
        mean = sum(walls) / len(walls)
        rows.append(
            {
                "case": case,
                "way": way,
                "overrides": keys[2:],
                "seeds": SEEDS,
                "alone_s": total["wall_s"],
                "alone_each_s": [one["wall_s"] for one in alone],
                "alone_cpu_s": total["cpu_s"],
                "sweep_s": walls,
                "sweep_cpu_s": [one["cpu_s"] for one in times],
                "ratio": round(total["wall_s"] / mean, 2),
                "ratio_least": round(total["wall_s"] / max(walls), 2),
                **compare(folder, folder / f"{way}-0" / "members"),
            }
        )
    return rows


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


def _losses(run: Path) -> np.ndarray:
    return np.array([record["loss"] for record in read(run / "metrics.jsonl") if record["kind"] == "train"])


def _keys(overrides: Sequence[str]) -> set[str]:
    return {entry.partition("=")[0] for entry in overrides}


def table(results: dict[str, Any]) -> str:
    """The rows for the README."""
    env = results["env"]
    lines = [
        f"{env['date'][:10]}, {env['platform']}, JAX {env['jax']}, {SEEDS} seeds; the machine had other work to do.",
        "",
        "| case | members | alone, s | sweep, s (before, after) | ratio of wall times | of CPU times | bitwise equal "
        "| losses differ by | parameters differ by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        cpu = row["alone_cpu_s"] * len(row["sweep_cpu_s"]) / sum(row["sweep_cpu_s"])
        cells = [
            row["case"],
            row["way"],
            f"{row['alone_s']:.0f}",
            ", ".join(f"{wall:.1f}" for wall in row["sweep_s"]),
            f"{row['ratio']:.1f}",
            f"{cpu:.1f}",
            f"{row['bitwise_equal']} of {SEEDS}",
            f"{row['loss_relative_error']:.1e}",
            f"{row['parameter_absolute_error']:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sweep_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), default=list(CASES))
    options = parser.parse_args(arguments)
    from bampath.data import DataConfig, load_corpus

    load_corpus(DataConfig())
    rows: list[dict[str, Any]] = []
    for case in options.case:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(case, Path(folder))
        print(rows[-len(WAYS) :], flush=True)
    env = environment()
    results = {"env": env, "rows": rows}
    write_results(HERE / "results.json", env, rows)
    replace_between(HERE / "README.md", BEGIN, END, f"\n{table(results)}\n")


if __name__ == "__main__":
    main()
