"""Cells that were trained twice from one seed: how much chance there is in what a GPU sums up in another order."""

from collections.abc import Sequence
from typing import Any

from bampath.analysis.figures import short_number
from experiments.bam_h200.kept import CELL
from experiments.tables import by, table

Row = dict[str, Any]


def repeat_table(repeats: Sequence[Row], rows: Sequence[Row]) -> str:
    """Shares of keys found by each earlier run of a cell, and by the one that counts; "" if nothing was repeated.

    repeats, rows: of one part of the study. Runs of a cell follow each other, each begins with its training.
    """
    name = lambda row: tuple(row[fact] for fact in CELL)
    again = {name(row) for row in repeats}
    shown = sorted((row for row in [*repeats, *rows] if name(row) in again), key=lambda row: name(row)[2:])
    lengths = sorted({row["length"] for row in shown if row["benchmark"] == "passkey"})
    body = []
    for (case, seed), own in _by_cell(shown).items():
        for run in _runs(own):
            loss, keys = run[0]["loss"], {row["length"]: row for row in run if row["benchmark"] == "passkey"}
            cells = [f"{keys[length]['accuracy']:.2f}" if length in keys else "" for length in lengths]
            body.append([f"`{case}`", str(seed), f"{loss:.3f}", *cells])
    return table(["scheme", "seed", "last loss", *map(short_number, lengths)], body) if body else ""


def _by_cell(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    return {(case, seed): own for case, found in by(rows, "case").items() for seed, own in by(found, "seed").items()}


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of a cell, cut before each training."""
    found: list[list[Row]] = []
    for row in rows:
        if row["benchmark"] == "training":
            found.append([])
        found[-1].append(row)
    return found
