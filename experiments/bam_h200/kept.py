"""results.json of this study: what the rows of many cells have in common is written once.

Rows that stand one after the other, belong to one cell and benchmark and have the same names are one line of the file:
{"case": …, "benchmark": …, "columns": {"length": [512, 1024], …}}. So are lists of objects inside a row: {"columns":
{"step": [50, 100], …}}. `read` gives the rows back as they were, also those of files that hold a row per object.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bampath.evaluation.results import finite, write_text
from experiments.studies import read_kept

Row = dict[str, Any]
CELL = ("size", "mix", "case", "seed")
FACTS = (*CELL, "benchmark")
COLUMNS = "columns"


def write(path: Path, results: dict[str, Any]) -> None:
    """A results file, {"env", …, "rows"}, so that a crash leaves the old one or the new one."""
    write_text(path, in_lines({**finite(results), "rows": packed(finite(results["rows"]))}))


def read(path: Path) -> dict[str, Any]:
    """What `write` was given. ValueError that names the file if it is damaged."""
    results = read_kept(path)
    try:
        return {**results, "rows": unpacked(results["rows"])}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no results of this study ({type(error).__name__}: {error})") from None


def in_lines(results: dict[str, Any]) -> str:
    """JSON with one of the rows per line: a repository shows what changed."""
    rows = ",\n".join(json.dumps(row, allow_nan=False) for row in results["rows"])
    head = json.dumps({name: value for name, value in results.items() if name != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n'


def packed(rows: Sequence[Row]) -> list[Row]:
    """Rows with the same facts and names as one, in their order."""
    found: list[Row] = []
    for _, group in groupby(rows, key=lambda row: ([row.get(name) for name in FACTS], sorted(row))):
        alike = list(group)
        facts = {name: value for name, value in alike[0].items() if name in FACTS}
        values = [{name: value for name, value in row.items() if name not in FACTS} for row in alike]
        found += [{**facts, **_pack(values)}] if len(alike) > 1 and values[0] else [_pack(row) for row in alike]
    return found


def unpacked(rows: Sequence[Row]) -> list[Row]:
    """The rows that `packed` was given."""
    found: list[Row] = []
    for row in rows:
        facts = {name: value for name, value in row.items() if name != COLUMNS}
        found += [{**facts, **own} for own in _unpack({COLUMNS: row[COLUMNS]})] if COLUMNS in row else [_unpack(row)]
    return found


def _pack(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pack(own) for name, own in value.items()}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(one, dict) and one and one.keys() == value[0].keys() for one in value):
        return {COLUMNS: {name: _pack([one[name] for one in value]) for name in value[0]}}
    return [_pack(one) for one in value]


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(one) for one in value]
    if not isinstance(value, dict):
        return value
    own = {name: _unpack(one) for name, one in value.items()}
    if list(own) != [COLUMNS]:
        return own
    columns = own[COLUMNS]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
