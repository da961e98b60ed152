"""The table and the figures of a sweep, from its rows and its members' metrics."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bampath.analysis.figures import COLOURS, DASHES, MARKERS, save, style
from bampath.metrics import read
from experiments.sweep_plan import SEEDS

Row = dict[str, Any]


def report(rows: Sequence[Row], spec: dict[str, Any]) -> str:
    """A Markdown table: one line per combination of values, seeds pooled into mean and standard deviation."""
    keys = [key for key, _ in (*spec["structure"], *spec["vary"]) if key not in SEEDS]
    head = [*(f"`{key}`" for key in keys), "runs", "training loss", "validation loss", "ended early"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for label, own in pooled(rows, keys).items():
        early = [f"{row['case']} after step {row['steps']}" for row in own if not row["finite"]]
        numbers = [_spread([row[name] for row in own]) for name in ("loss", "validation_loss")]
        lines.append(f"| {' | '.join([*label, str(len(own)), *numbers, ', '.join(early) or '–'])} |")
    return "\n".join(lines)


def pooled(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by their values of some axes, in order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row["values"][key] for key in keys), []).append(row)
    return found


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.4f}"
    return f"{statistics.fmean(known):.4f} ± {statistics.stdev(known):.4f}"


def write_figures(rows: Sequence[Row], out: Path) -> list[Path]:
    """loss.png: the loss over steps, a line per combination (mean over seeds) with the range of its seeds. For each
    axis of numbers final-AXIS.png: the validation loss against it."""
    keys = [key for key in rows[0]["values"] if key not in SEEDS]
    paths = [save(loss_figure(rows, keys, out), out / "figures" / "loss.png")]
    for key in keys:
        if len({row["values"][key] for row in rows}) > 1 and all(_is_number(row["values"][key]) for row in rows):
            figure = axis_figure(rows, key, [other for other in keys if other != key])
            paths.append(save(figure, out / "figures" / f"final-{key.rpartition('.')[2]}.png"))
    return paths


def loss_figure(rows: Sequence[Row], keys: Sequence[str], out: Path) -> Figure:
    """Training loss over steps."""
    with style():
        figure = Figure(figsize=(7.4, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for index, (label, own) in enumerate(pooled(rows, keys).items()):
            curves = [_curve(out / row["run"] / "metrics.jsonl") for row in own]
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            values = [[curve[step] for curve in curves] for step in steps]
            look: Any = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
            axes.plot(steps, [statistics.fmean(at) for at in values], label=", ".join(label) or "all runs", **look)
            axes.fill_between(steps, [min(at) for at in values], [max(at) for at in values], alpha=0.15, **look)
        axes.set(xlabel="step", ylabel="training loss", title=", ".join(keys) or "all runs; range over seeds")
        axes.legend()
    return figure


def axis_figure(rows: Sequence[Row], key: str, others: Sequence[str]) -> Figure:
    """Validation loss against an axis of numbers, a line per combination of the others, every run a point."""
    with style():
        figure = Figure(figsize=(5.6, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for index, (label, own) in enumerate(pooled(rows, others).items()):
            points = sorted((float(r["values"][key]), r["validation_loss"]) for r in own if r["validation_loss"])
            means = {x: statistics.fmean(y for other, y in points if other == x) for x, _ in points}
            look: Any = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            axes.plot(list(means), list(means.values()), label=", ".join(label) or "mean", **look)
            axes.scatter([x for x, _ in points], [y for _, y in points], s=10, alpha=0.5, color=look["color"])
        written = {float(row["values"][key]): row["values"][key] for row in rows}
        values = sorted(written)
        if values[0] > 0 and values[-1] / values[0] >= 8:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(values, [written[value] for value in values])
        axes.set(xlabel=key, ylabel="validation loss")
        axes.legend()
    return figure


def _curve(path: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read(path) if record["kind"] == "train"}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
