"""Train every scheme on state-tracking tasks under one budget, then count what it gets wrong:

    python -m experiments.state_tracking.run                       200 s of CPU time
    python -m experiments.state_tracking.run --size gpu --out runs/state --minutes 20
    python -m experiments.state_tracking.run --size gpu --out runs/state --resume

Cells are kept one by one: --minutes starts no further cell after that time, --resume goes on where a study stopped.
A cell that fails is named with the reason and the others go on; the status is 1 then, and --resume runs it again.
So it is where a process of --together is killed, for want of memory say, which ends the others: --resume goes on there.
results.json, report.md and figures grow in --out; --publish copies them beside this script.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from experiments.state_tracking.config import SIZES, Study, Trial, slug
from experiments.studies import alone, folder_of, publish, refuse_alike, refuse_counts

HERE = Path(__file__).parent
RUNS = Path("runs/state_tracking")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    refuse_counts(options, "together")
    study = study_of(options)
    for trial in study.trials:  # a wrong scheme or task fails here, before anything is made
        for scheme in trial.schemes:
            trial.config(scheme, trial.depths[0])
    refuse_alike(
        (f"{t.task} with {scheme}", slug(t.task, scheme, t.depths[0])) for t in study.trials for scheme in t.schemes
    )
    refuse_alike((f"--seeds {seed}", str(seed)) for seed in study.seeds)
    out = folder_of(options, RUNS)
    with alone(out):
        try:
            results = run_study(study, out, options.minutes, options.together)
        except BrokenProcessPool as error:
            sys.exit(f"error: {error}")
    failed = results["study"].get("failed", {})
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}; --resume runs what failed again")
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
    parser.add_argument(
        "--together", type=int, default=1, help="tasks and schemes at a time, a process each (default 1)"
    )
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


def run_study(study: Study, out: Path, minutes: float = float("inf"), together: int = 1) -> dict[str, Any]:
    """Run the cells that are missing, write everything after each; returns the results, in whose study `failed` says
    {name: why} of cells that were tried in this call in vain.

    together: chains of cells (a task and a scheme, depth after depth) that are worked off at a time, one process each.
    OSError and, if one of these processes was killed, BrokenProcessPool end the study, whose results.json then has what
    is finished and what failed; of a chain that ended so in a process of its own, only stderr names what failed.
    """
    from bampath.evaluation.results import environment

    if together > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the device
    env, start, failed = environment(), time.monotonic(), dict[str, str]()
    print(f"{out}\n{env['device']}, {env['platform']}, JAX {env['jax']}, {env['date']}", flush=True)
    write = lambda: _write(study, out, env, start, failed)
    write()
    chains = [(trial, scheme) for trial in study.trials for scheme in trial.schemes]
    latest = time.time() + 60 * minutes
    if together == 1:
        for trial, scheme in chains:
            run_chain(trial, scheme, study.seeds, out, latest, failed, write)
    else:
        _side_by_side(chains, study.seeds, out, latest, together, write, failed)
    results = write()
    print(f"report    {out / 'report.md'}\ntotal     {time.monotonic() - start:.0f} s")
    return results


def run_chain(
    trial: Trial,
    scheme: str,
    seeds: tuple[int, ...],
    out: Path,
    latest: float,
    failed: dict[str, str],
    done: Callable[[], Any] = lambda: None,
) -> dict[str, str]:
    """The cells of one task and scheme, depth after depth; `done` is called after each. None starts after `latest`.

    One that fails goes into `failed`, {name: why}, before `done`; it has not solved the task, so the deeper ones go on.
    Returns `failed`, which is a copy of the caller's in another process. OSError ends the chain: where a file cannot be
    written, that of the next cell cannot be either.
    """
    from experiments.state_tracking.cells import finished

    study, rows = Study("", (replace(trial, schemes=(scheme,)),), seeds), list[dict[str, Any]]()
    for cell in cells_of(study, rows):
        own = finished(cell, out)
        if own is None:
            if time.time() > latest:
                print(f"{cell.slug}: left for --resume, the time is over", flush=True)
                break
            print(f"{cell.trial.task}, {scheme}, {cell.layers} layer(s), seeds {list(seeds)}", flush=True)
            own, why = _try(cell, out)
            if why is not None:
                failed[cell.slug] = why
            done()
        rows += own
    return failed


def _try(cell: Any, out: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of a cell that is run now, or none and why it failed, which is shown."""
    from experiments.state_tracking.cells import run_cell

    try:
        return run_cell(cell, out, partial(_say, cell.slug)), None
    except OSError:
        raise
    except Exception as error:
        if not isinstance(error, FloatingPointError):  # that one says all there is to know
            traceback.print_exc(limit=-6)
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"{cell.slug} failed: {why}", file=sys.stderr, flush=True)
        return [], why


def _say(slug: str, text: str) -> None:
    print(f"{slug:<28} {text}", flush=True)


def _side_by_side(
    chains: Sequence[tuple[Trial, str]],
    seeds: tuple[int, ...],
    out: Path,
    latest: float,
    together: int,
    write: Callable[[], Any],
    failed: dict[str, str],
) -> None:
    """`run_chain` for all of them in processes of their own. `failed` gets the failed cells of each chain that comes to
    its end. One that cannot go on lets the others end, then its error is raised; if a process was killed, which ends
    all of them, BrokenProcessPool says which chains did not finish."""
    with ProcessPoolExecutor(together, get_context("spawn")) as pool:
        jobs = {pool.submit(run_chain, *chain, seeds, out, latest, {}): chain for chain in chains}
        open_jobs, seen = set(jobs), -1
        while open_jobs:
            over, open_jobs = wait(open_jobs, timeout=1)
            for job in over:
                error = job.exception()
                if error is None:
                    failed |= job.result()
                elif not isinstance(error, BrokenProcessPool):
                    print(f"{jobs[job][0].task}, {jobs[job][1]}: {error!r}", file=sys.stderr, flush=True)
            count = len(list(out.glob("cells/*/rows.json")))
            if over or count != seen:
                write()
                seen = count
    errors = [error for job in jobs if (error := job.exception())]
    if any(isinstance(error, BrokenProcessPool) for error in errors):
        names = ", ".join(f"{trial.task} with {scheme}" for job, (trial, scheme) in jobs.items() if job.exception())
        raise BrokenProcessPool(
            f"a process was killed (out of memory, perhaps); not finished: {names}; --resume runs what is missing"
        )
    if errors:
        raise errors[0]


def cells_of(study: Study, rows: list[dict[str, Any]]) -> Iterator[Any]:
    """Cells in order. A deeper model is passed over where `rows`, which grow meanwhile, say that a shallower one of the
    scheme has solved the task."""
    from experiments.state_tracking.cells import Cell, solved

    for trial in study.trials:
        for scheme in trial.schemes:
            for layers in trial.depths:
                before = [r for r in rows if r["trained_on"] == trial.task and r["case"] == scheme]
                shallower = {r["layers"] for r in before if r["layers"] < layers}
                if not any(solved([r for r in before if r["layers"] == n]) for n in shallower):
                    yield Cell(trial, scheme, layers, study.seeds)


def _write(study: Study, out: Path, env: dict[str, Any], start: float, failed: dict[str, str]) -> dict[str, Any]:
    """Write what is finished: results.json, and report.md with figures where there are rows; returns the results."""
    from bampath.evaluation.results import write_results
    from experiments.state_tracking.cells import finished
    from experiments.state_tracking.report import describe, write_report

    rows, complete = list[dict[str, Any]](), True
    for cell in cells_of(study, rows):
        own = finished(cell, out)
        complete &= own is not None
        rows += own or []
    facts = {**describe(study), "complete": complete, "seconds_of_this_call": round(time.monotonic() - start, 1)}
    facts |= {"cpu_seconds_of_this_call": round(_cpu_seconds(), 1)} | ({"failed": dict(failed)} if failed else {})
    write_results(out / "results.json", env, rows, study=facts)
    results = {"env": env, "study": facts, "rows": rows}
    if rows:
        write_report(out, results)
    return results


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:], stopped="stopped; --resume continues with what is finished")
