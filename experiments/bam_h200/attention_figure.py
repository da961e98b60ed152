"""Attention of retrieval heads, drawn over the places of a prompt."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bampath.analysis.figures import short_number, style
from experiments.tables import by

Row = dict[str, Any]
LEAST = 1e-6  # a weight below it is drawn as this


def attention_figure(rows: Iterable[Row]) -> Figure:
    """One panel per case and length: where the head with the most weight on the key's sentence looks, from the token
    before the first digit; the sentence is shaded. rows: those that hold a `row`, the first seed of each case."""
    chosen: dict[tuple[str, int], Row] = {}
    for case, own in by(list(rows), "case").items():
        for length, group in by([row for row in own if row["seed"] == own[0]["seed"]], "length").items():
            chosen[case, length] = max(group, key=lambda row: row["needle"])
    lengths = sorted({length for _, length in chosen})
    cases = list(dict.fromkeys(case for case, _ in chosen))
    with style():
        size = (4.4 * len(lengths) + 0.3, 1.7 * len(cases) + 0.6)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(cases), len(lengths), squeeze=False, sharey=True)
        for line, case in zip(panels, cases, strict=True):
            for panel, length in zip(line, lengths, strict=True):
                if (case, length) in chosen:
                    _draw(panel, chosen[case, length])
        for panel in panels[-1]:
            panel.set_xlabel("place in the prompt (tokens)")
        for panel in panels[:, 0]:
            panel.set_ylabel("weight")
    return figure


def _draw(panel: Any, row: Row) -> None:
    width = -(-row["keys"] // len(row["row"]))
    places = np.minimum(np.arange(len(row["row"])) * width, row["keys"])
    panel.axvspan(row["needle_start"], row["needle_end"], color="#E0EEF7", lw=0, zorder=0)
    panel.axvline(row["needle_start"], color="#56B4E9", lw=0.8, ls=":")
    panel.vlines(places, LEAST, np.maximum(row["row"], LEAST), color="#0072B2", lw=0.9)
    panel.set(yscale="log", ylim=(1e-5, 1.3))
    where = f"layer {row['layer']}, head {row['head']}, {short_number(row['length'])} tokens"
    panel.set_title(f"{row['case']}: {where}; {row['needle']:.2f} on the key's sentence", fontsize=8.5)
