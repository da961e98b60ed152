"""The page, the table and the figures of a sweep, from its rows and its members' metrics."""

import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bampath.analysis.figures import COLOURS, DASHES, MARKERS, save, style
from bampath.metrics import read
from experiments.sweep.plan import SEEDS, Group, Spec, spec_json

Row = dict[str, Any]


def page(rows: Sequence[Row], spec: Spec, groups: Sequence[Group], env: dict[str, Any], figures: Sequence[str]) -> str:
    """report.md: what was asked for, of what size, on what, the table, what is lowest, and where the runs are.

    figures: paths as seen from the page.
    """
    first, members = groups[0].members[0].config, [member for group in groups for member in group.members]
    tokens = first.train.steps * first.data.batch_size * first.data.sequence_length
    axes = [("--vary", axis) for axis in spec.vary] + [("--structure", axis) for axis in spec.structure]
    words = ["--config", spec.config, *(word for flag, axis in axes for word in (flag, str(axis))), *spec.overrides]
    sizes = sorted({row["parameters"] for row in rows})
    size = " to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1])))
    rows_of = f"{first.train.steps:,} steps of {first.data.batch_size} rows of {first.data.sequence_length} tokens"
    where = f"{env['date'][:10]}, {env['device']}, JAX {env['jax']}, commit {env['commit'] or 'unknown'}"
    lines = [
        f"# Sweep of `{spec.config}`",
        "",
        f"    python -m experiments.sweep {shlex.join(words)}",
        "",
        f"{len(members)} runs in {len(groups)} program(s): {rows_of} ({tokens:,} tokens each), {size} parameters, text "
        f"`{first.data.source}`. {where}.",
        "",
        report(rows, spec_json(spec)),
        "",
        "Mean ± standard deviation over seeds. Training loss: mean of the last tenth of the records; validation loss: "
        f"{first.train.eval_batches} held-out batches after the last step.",
        "",
        lowest(rows),
        "",
        *(f"![{Path(name).stem}]({name})" for name in figures),
        "",
        "Each run is a folder in `members` beside this file: `python -m bampath.inspect OUT/members/NAME`, "
        "`python -m experiments.train --resume --run-dir OUT/members/NAME`, with OUT this file's folder.",
    ]
    return "\n".join(lines) + "\n"


def lowest(rows: Sequence[Row]) -> str:
    """The combination with the lowest mean validation loss, and how far the next one is in standard errors of seeds."""
    keys = [key for key in rows[0]["values"] if key not in SEEDS]
    known = {
        label: [row["validation_loss"] for row in own]
        for label, own in pooled(rows, keys).items()
        if all(row["validation_loss"] is not None for row in own)
    }
    if len(known) < 2:
        return "There is nothing to compare: " + ("one combination." if known else "no combination has a loss.")
    ranked = sorted(known.items(), key=lambda item: statistics.fmean(item[1]))
    (best, losses), (second, others) = ranked[:2]
    name = lambda label: ", ".join(f"{key}={value}" for key, value in zip(keys, label, strict=True))
    gap = statistics.fmean(others) - statistics.fmean(losses)
    text = f"Lowest validation loss: `{name(best)}`, {gap:.4f} below `{name(second)}`"
    if min(len(losses), len(others)) < 2:
        return f"{text}; with one seed it cannot be told whether that is chance."
    error = (statistics.variance(losses) / len(losses) + statistics.variance(others) / len(others)) ** 0.5
    return f"{text}: {gap / error:.1f} standard errors of seeds." if error else f"{text}."


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
