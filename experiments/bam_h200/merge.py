"""Results of several calls, on whatever machines, in one file:

    python -m experiments.bam_h200.merge results.json a/results.json b/results.json

A cell that is in several files is taken from the last of them; if it was trained anew there, what the earlier ones say
of its passkeys stays under "repeats". Rows are slimmed as a study's own are, so one file of an earlier study becomes a
smaller one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from experiments.bam_h200 import kept
from experiments.bam_h200.kept import CELL
from experiments.bam_h200.slim import slim

Row = dict[str, Any]


def merge(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"env", "runs", "repeats", "rows"} of results files; runs: the environment of each, env: the last one.

    ValueError if runs of one size and mix had different budgets: they do not compare.
    """
    cells, repeats = dict[tuple[Any, ...], list[Row]](), list[Row]()
    for file in files:
        own: dict[tuple[Any, ...], list[Row]] = {}
        for row in file["rows"]:
            own.setdefault(tuple(row[name] for name in CELL), []).append(row)
        repeats += file.get("repeats", [])
        for name in own.keys() & cells.keys():
            before = _told(cells[name])
            repeats += before if before != _told(own[name]) else []
        cells |= own
    rows = [row for own in cells.values() for row in own]
    budgets: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        if row["benchmark"] == "training" and "@" not in row["case"]:
            part, budget = (row["size"], row["mix"]), (row["steps"], row["tokens"])
            if budgets.setdefault(part, budget) != budget:
                raise ValueError(f"{row['case']} of {part} had (steps, tokens) {budget}, others {budgets[part]}")
    runs = [env for file in files for env in file.get("runs", [file["env"]])]
    return {"env": files[-1]["env"], "runs": runs, "repeats": repeats, "rows": slim(rows)}


def _told(rows: Sequence[Row]) -> list[Row]:
    """What stays of a cell that was trained once more: its budget, loss and passkeys, without each answer."""
    told = [row for row in slim(rows) if row["benchmark"] in ("training", "passkey")]
    return [{name: value for name, value in row.items() if name not in ("curve", "depths")} for row in told]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bam_h200.merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(argv)
    made = merge([kept.read(path) for path in options.files])
    kept.write(options.out, made)
    print(f"{len({tuple(row[name] for name in CELL) for row in made['rows']})} cells in {options.out}")


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
