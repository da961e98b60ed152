"""Results of several calls, on whatever machines, in one file, with report and figures beside it:

    python -m experiments.conversion.merge FOLDER a/results.json b/results.json

A case that is in several files is taken from the last of them, all its stages together: they are one run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from bampath.evaluation.results import write_results
from experiments.conversion.config import cases_of
from experiments.conversion.report import write_report
from experiments.conversion.run import HERE
from experiments.studies import calls_of, publish, read_kept

STAGES = ("stage1", "stage2", "stage3")


def merge(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"env", "runs", "study", "rows"} of results files, cases in the study's order; runs: the environment of each file
    with the cases that are taken from it, env: the last one. ValueError for files of different studies."""
    same = lambda file: {name: value for name, value in file["study"].items() if name != "complete"}
    for file in files:
        if same(file) != same(files[0]):
            different = next(name for name in same(files[0]) if same(file).get(name) != same(files[0])[name])
            raise ValueError(f"results of different studies: {different} is not the same")
    study = files[-1]["study"]
    cases = cases_of(study["teacher"]["position"], study["train_length"])
    last = {row["case"]: number for number, file in enumerate(files) for row in file["rows"]}
    taken = [[case.name for case in cases if last.get(case.name) == number] for number in range(len(files))]
    rows = [
        row for case in cases if case.name in last for row in files[last[case.name]]["rows"] if row["case"] == case.name
    ]
    runs = [run for file, names in zip(files, taken, strict=True) for run in calls_of(file, "cases", names)]
    ends = {(row["case"], row["after"]) for row in rows if row["benchmark"] == "passkey"}
    done = all((case.name, STAGES[-1] if case.trained else "untrained") in ends for case in cases)
    return {"env": files[-1]["env"], "runs": runs, "study": {**study, "complete": done}, "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.conversion.merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--publish", action="store_true", help="copy results, report and figures beside this script")
    options = parser.parse_args(argv)
    made = merge([read_kept(path) for path in options.files])
    options.folder.mkdir(parents=True, exist_ok=True)
    write_results(options.folder / "results.json", made["env"], made["rows"], runs=made["runs"], study=made["study"])
    print(write_report(options.folder, made))
    if options.publish:
        publish(options.folder, HERE, made)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
