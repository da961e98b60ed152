"""Results of several calls, on whatever machines, in one file, with report and figures beside it:

    python -m experiments.state_tracking.merge FOLDER a/results.json b/results.json

A cell (task, scheme, layers) that is in several files is taken from the last of them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from bampath.evaluation.results import write_results
from experiments.state_tracking.config import SIZES, Study
from experiments.state_tracking.report import describe, write_report
from experiments.state_tracking.run import HERE, cells_of
from experiments.studies import calls_of, publish, read_kept

Row = dict[str, Any]


def merge(study: Study, files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"env", "runs", "study", "rows"}: the cells of `files` in the study's order; runs: the environment of each file
    with the tasks that are taken from it, env: the last one.

    ValueError for results of another study, or of a task that had another budget than the study says.
    """
    wanted = json.loads(json.dumps(describe(study)))
    known = {trial["task"]: trial for trial in wanted["trials"]}
    found: dict[tuple[str, str, int], tuple[int, list[Row]]] = {}
    for number, file in enumerate(files):
        if (file["study"]["name"], file["study"]["seeds"]) != (study.name, wanted["seeds"]):
            raise ValueError(
                f"results of study {file['study']['name']}, seeds {file['study']['seeds']}: not {study.name}'s"
            )
        budgets = {trial["task"]: trial for trial in file["study"]["trials"]}
        own: dict[tuple[str, str, int], list[Row]] = {}
        for row in file["rows"]:
            task = row["trained_on"]
            if any(budgets[task][part] != known.get(task, {}).get(part) for part in ("shape", "budget", "tests")):
                raise ValueError(f"{task} had another budget than the study: {budgets[task]}")
            own.setdefault((task, row["case"], row["layers"]), []).append(row)
        found |= {cell: (number, rows) for cell, rows in own.items()}
    rows, missing, used = list[Row](), 0, [list[str]() for _ in files]
    for cell in cells_of(study, rows):
        number, own_rows = found.get((cell.trial.task, cell.scheme, cell.layers), (-1, []))
        rows += own_rows
        missing += not own_rows
        if own_rows and cell.trial.task not in used[number]:
            used[number].append(cell.trial.task)
    runs = [run for file, tasks in zip(files, used, strict=True) for run in calls_of(file, "tasks", tasks)]
    total = lambda name: round(sum(file["study"][name] for file in files), 1)
    times = {name: total(name) for name in ("seconds_of_this_call", "cpu_seconds_of_this_call")}
    return {"env": files[-1]["env"], "runs": runs, "study": {**wanted, "complete": not missing, **times}, "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.state_tracking.merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--size", choices=tuple(SIZES), default="gpu", help="which study (default gpu)")
    parser.add_argument("--publish", action="store_true", help="copy results, report and figures beside this script")
    options = parser.parse_args(argv)
    made = merge(SIZES[options.size], [read_kept(path) for path in options.files])
    write_results(options.folder / "results.json", made["env"], made["rows"], runs=made["runs"], study=made["study"])
    print(write_report(options.folder, made))
    if options.publish:
        publish(options.folder, HERE, made)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
