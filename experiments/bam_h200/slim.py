"""What is kept of a cell's rows: everything that a report tells, without what follows from the rest."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bampath.analysis.heads import heads_of_layer
from bampath.model import geometry_of
from bampath.positions.registry import Composition, parse
from bampath.positions.slots import Geometry, Part
from experiments.bam_h200.attention_figure import LEAST
from experiments.bam_h200.config import Cell
from experiments.bam_h200.kept import CELL

Row = dict[str, Any]
DIGITS = 9  # of a number: it tells a float32 from every other, and a table's last digit stays
EXACT = ("parameters", "accuracy", "token_accuracy")  # shares of few: their means may lie between two printed numbers


def slim(rows: Sequence[Row]) -> list[Row]:
    """The rows with numbers rounded; without the keys that were asked for, which are the same in every cell and say
    nothing of the answers; without weights that no figure shows; without curves of priors that `with_curves` makes."""
    dropped = {id(row) for own in _layers(rows) if _same(own) for row in own}
    return [_slim({name: row[name] for name in row if not (name == "curve" and id(row) in dropped)}) for row in rows]


def with_curves(rows: Sequence[Row]) -> list[Row]:
    """Rows of priors, all heads of every layer, each with its curve."""
    made: dict[int, Row] = {}
    for own in _layers([row for row in rows if "curve" not in row]):
        made |= {id(row): {"curve": curve} for row, curve in zip(own, curves(own) or (), strict=False)}
    return [{**row, **made.get(id(row), {})} for row in rows]


def curves(heads: Sequence[Row]) -> list[dict[str, Any]] | None:
    """The curves that `Head.row` gives the heads of a layer; None if their parameters do not tell them, or if their
    case means nothing here: a study may have changed what its cells' names do not say, and schemes change."""
    count, layer = len(heads), heads[0]["layer"]
    if [row["head"] for row in heads] != list(range(count)):
        return None
    cell = Cell(**{name: heads[0][name] for name in CELL})
    try:
        composition, model = parse(cell.scheme).at(layer), cell.config(Path("tokenizer.json"), "text").model
    except (ValueError, KeyError):
        return None
    geometry = replace(geometry_of(model, layer), dim=1, heads=count, kv_heads=count)
    own: dict[str, dict[str, np.ndarray]] = {}
    for part, name in _decisive(composition, geometry):
        if any(f"{part}/{name}" not in row["parameters"] for row in heads):
            return None
        own.setdefault(part, {})[name] = np.array([row["parameters"][f"{part}/{name}"] for row in heads], np.float32)
    return [head.row()["curve"] for head in heads_of_layer(composition, own, geometry, heads[0]["keys"])]


def _decisive(composition: Composition, geometry: Geometry) -> list[tuple[str, str]]:
    """(part, name) of all parameters of the prior and of what sharpens it."""
    parts = [p for p in composition.layer_parts if p.SLOT == "sharpness" or type(p).log_prior is not Part.log_prior]
    return [(part.NAME, name) for part in parts for name in part.parameters(geometry)]


def _layers(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of priors by cell and layer."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["benchmark"] == "prior" and "parameters" in row:
            found.setdefault((*(row[name] for name in CELL), row["layer"]), []).append(row)
    return list(found.values())


def _same(heads: Sequence[Row]) -> bool:
    """Whether the curves that these rows hold can be made again, as far as a figure shows them."""
    if any("curve" not in row for row in heads):
        return False
    made = curves(heads)
    close = lambda row, curve: np.allclose(row["curve"]["p"], curve["p"], rtol=1e-3, atol=1e-4 / row["keys"])
    return made is not None and all(
        row["curve"]["distance"] == curve["distance"] and close(row, curve)
        for row, curve in zip(heads, made, strict=True)
    )


def _slim(row: Row) -> Row:
    found: Row = {}
    for name, value in row.items():
        if name == "depths":
            value = [{fact: own for fact, own in sample.items() if fact != "key"} for sample in value]
        elif name == "row":
            value = [weight if weight is None or weight >= LEAST else 0.0 for weight in value]
        found[name] = value if name in EXACT else _rounded(value)
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(own) for name, own in value.items()}
    if isinstance(value, list):
        return [_rounded(own) for own in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
