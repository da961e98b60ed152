"""Train every scheme on state-tracking tasks under one budget, then count what it gets wrong:

    python -m experiments.state_tracking.run                       200 s of CPU time
    python -m experiments.state_tracking.run --size gpu --out runs/state --minutes 20
    python -m experiments.state_tracking.run --size gpu --out runs/state --resume

Cells are kept one by one: --minutes starts no further cell after that time, --resume goes on where a study stopped.
results.json, report.md and figures grow in --out; --publish copies them beside this script.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from experiments.state_tracking.config import SIZES, Study
from experiments.studies import folder_of, publish

HERE = Path(__file__).parent
RUNS = Path("runs/state_tracking")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    study = study_of(options)
    for trial in study.trials:  # a wrong scheme or task fails here, before anything is made
        for scheme in trial.schemes:
            trial.config(scheme, trial.depths[0])
    out = folder_of(options, RUNS)
    results = run_study(study, out, options.minutes)
    if options.publish:
        publish(out, HERE, results)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.state_tracking.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="cpu", help="which study (default cpu)")
    parser.add_argument("--tasks", nargs="+", metavar="SPEC", help="only the study's trials of these tasks")
    parser.add_argument("--schemes", nargs="+", metavar="SPEC", help="positional schemes (default: each trial's)")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: the study's")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after this time")
    parser.add_argument("--out", type=Path, help="folder of the study (default: a new one under runs/state_tracking)")
    parser.add_argument("--resume", action="store_true", help="continue the study in --out")
    parser.add_argument("--publish", action="store_true", help="copy results, report and figures beside this script")
    return parser.parse_args(argv)


def study_of(options: argparse.Namespace) -> Study:
    """The study of the command line."""
    study = SIZES[options.size]
    trials = study.trials
    if options.tasks:
        unknown = sorted(set(options.tasks) - {trial.task for trial in trials})
        if unknown:
            raise ValueError(f"--tasks {unknown[0]} is not in the study: {', '.join(trial.task for trial in trials)}")
        trials = tuple(trial for trial in trials if trial.task in options.tasks)
    if options.schemes:
        trials = tuple(replace(trial, schemes=tuple(options.schemes)) for trial in trials)
    return Study(study.name, trials, tuple(options.seeds or study.seeds))


def run_study(study: Study, out: Path, minutes: float = float("inf")) -> dict[str, Any]:
    """Run or read the cells in order, write everything after each; returns the results."""
    from bampath.evaluation.results import environment
    from experiments.state_tracking.cells import finished, run_cell

    start, env, rows = time.monotonic(), environment(), list[dict[str, Any]]()
    print(f"{out}\n{env['device']}, {env['platform']}, JAX {env['jax']}, {env['date']}", flush=True)
    results = _write(study, out, env, rows, start, complete=False)
    complete = True
    for cell in cells_of(study, rows):
        own = finished(cell, out)
        if own is None:
            if time.monotonic() - start > 60 * minutes:
                complete = False
                print(f"{cell.slug}: left for --resume, {minutes:g} minutes are over", flush=True)
                continue
            print(f"{cell.trial.task}, {cell.scheme}, {cell.layers} layer(s), seeds {list(cell.seeds)}", flush=True)
            own = run_cell(cell, out, lambda text: print(text, flush=True))
        rows += own
        results = _write(study, out, env, rows, start, complete=False)
    results = _write(study, out, env, rows, start, complete)
    print(f"report    {out / 'report.md'}\ntotal     {time.monotonic() - start:.0f} s")
    return results


def cells_of(study: Study, rows: list[dict[str, Any]]) -> Iterator[Any]:
    """Cells in order. A deeper model is passed over where `rows`, which grow meanwhile, say that a shallower one of the
    scheme has solved the task."""
    from experiments.state_tracking.cells import Cell, solved

    for trial in study.trials:
        for layers in trial.depths:
            for scheme in trial.schemes:
                before = [r for r in rows if r["trained_on"] == trial.task and r["case"] == scheme]
                shallower = {r["layers"] for r in before if r["layers"] < layers}
                if not any(solved([r for r in before if r["layers"] == n]) for n in shallower):
                    yield Cell(trial, scheme, layers, study.seeds)


def _write(
    study: Study, out: Path, env: dict[str, Any], rows: list[dict[str, Any]], start: float, complete: bool
) -> dict[str, Any]:
    from bampath.evaluation.results import write_results
    from experiments.state_tracking.report import describe, write_report

    facts = {**describe(study), "complete": complete, "seconds_of_this_call": round(time.monotonic() - start, 1)}
    facts |= {"cpu_seconds_of_this_call": round(time.process_time(), 1)}
    write_results(out / "results.json", env, rows, study=facts)
    results = {"env": env, "study": facts, "rows": rows}
    if rows:
        write_report(out, results)
    return results


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:], stopped="stopped; --resume continues with what is finished")
