"""Figures and report of the study, from its rows."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bampath.analysis import save
from bampath.analysis.figures import COLOURS, DASHES, MARKERS, style
from experiments.positional_lsh.report_runs import crossover, speed_figure, training_figure, training_tables
from kernels.lsh.bench_tables import PASSES, tables

Row = dict[str, Any]
CASES = {
    "shared": "LSH, one normaliser",
    "mean": "LSH, mean of outputs",
    "window": "exact ALiBi, window of the longest block",
    "fixed": "fixed blocks of 2 sigma",
}


def of(rows: Iterable[Row], benchmark: str, **wanted: Any) -> list[Row]:
    """The rows of a benchmark with these values."""
    return [row for row in rows if row["benchmark"] == benchmark and all(row[k] == v for k, v in wanted.items())]


def write_report(
    out: Path, results: dict[str, Any], speed: dict[str, Any] | None, training: dict[str, Any] | None
) -> str:
    """report.md and figures in `out`; speed: kernels/lsh/results.json, training: training.json, if there are any."""
    rows, figures = results["rows"], out / "figures"
    save(mask_figure(rows), figures / "masks.png")
    save(output_figure(rows), figures / "outputs.png")
    save(block_figure(rows), figures / "blocks.png")
    text = report(results)
    if speed is not None:
        save(speed_figure(speed["rows"]), figures / "speed.png")
        shown = tables({**speed, "rows": timings(speed["rows"])})
        text += "\n".join(["", "## Time and memory", "", shown, "", *meetings(speed["rows"]), ""])
    if training is not None:
        save(training_figure(training["rows"], training["plan"]["length"]), figures / "training.png")
        text += "\n".join(["", "## Trained models", "", *training_tables(training), ""])
    (out / "report.md").write_text(text, encoding="utf-8")
    return text


def timings(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["pass"] != "check"]


def meetings(rows: list[Row]) -> list[str]:
    """From which length on LSH is faster."""
    rivals = {"alibi": "exact ALiBi over all keys", "window, s = 10": "one window for all heads"}
    return [
        f"- LSH (s = 10) is faster than {name}, {title}: {crossover(rows, which, rival)}."
        for rival, name in rivals.items()
        for which, title in PASSES.items()
    ]


def _lines(axes: Any, rows: list[Row], value: str, index: int, label: str) -> None:
    own = sorted(rows, key=lambda row: row["samples"])
    look = {"color": COLOURS[index], "marker": MARKERS[index], "linestyle": DASHES[index], "markersize": 4}
    axes.plot([row["samples"] for row in own], [row[value] for row in own], label=label, **look)


def mask_figure(rows: list[Row]) -> Figure:
    """Spectral error relative to the norm, and the largest entry's error, against s; bounds in grey."""
    laws = [law for law in dict.fromkeys(r["case"] for r in of(rows, "mask")) if law != "fixed"]
    sigmas = sorted({row["sigma"] for row in of(rows, "mask")})
    with style():
        figure = Figure(figsize=(9.4, 4.0), layout="constrained")
        axes = figure.subplots(1, 2)
        sigma = sigmas[len(sigmas) // 2]
        panels = (
            (axes[0], "spectral_relative", "spectral_bound_relative", "‖M̄ − L*‖₂ / ‖L*‖₂"),
            (axes[1], "largest", "largest_bound", "max |M̄ − L*|, causal part"),
        )
        for panel, value, bound, title in panels:
            for index, law in enumerate(laws):
                _lines(panel, of(rows, "mask", case=law, sigma=sigma), value, index, law)
            own = sorted(of(rows, "mask", case=laws[0], sigma=sigma), key=lambda row: row["samples"])
            panel.plot([r["samples"] for r in own], [r[bound] for r in own], color="#8A8A8A", label="bound, 90 %")
            fixed = of(rows, "mask", case="fixed", sigma=sigma)
            if fixed:
                panel.axhline(
                    fixed[0][value], color="#000000", linewidth=0.8, linestyle=(0, (1, 3)), label="fixed blocks"
                )
            panel.set(xscale="log", yscale="log", xlabel="samples s", title=f"{title}, sigma = {sigma:g}")
        axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def output_figure(rows: list[Row]) -> Figure:
    """Relative error of attention outputs against s, mean over layers and heads."""
    with style():
        figure = Figure(figsize=(7.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for index, (case, label) in enumerate(CASES.items()):
            samples = sorted({row["samples"] for row in of(rows, "output", case=case)})
            errors = [float(np.mean([r["error"] for r in of(rows, "output", case=case, samples=s)])) for s in samples]
            look = {"color": COLOURS[index], "marker": MARKERS[index], "linestyle": DASHES[index], "markersize": 4}
            axes.plot(samples, np.maximum(errors, 1e-5), label=label, **look)
        axes.set(xscale="log", yscale="log", xlabel="samples s", ylabel="relative error of the output")
        axes.set_title("Distance from exact ALiBi on the inputs of a trained model")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def block_figure(rows: list[Row]) -> Figure:
    """Longest block against length."""
    with style():
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for index, case in enumerate(dict.fromkeys(row["case"] for row in of(rows, "blocks"))):
            own = sorted(of(rows, "blocks", case=case), key=lambda row: row["length"])
            name = f"s = {own[0]['samples']}" if case == "fixed" else "s = log² n"
            look: dict[str, Any] = {"color": COLOURS[index], "marker": MARKERS[index], "markersize": 4}
            axes.plot([r["length"] for r in own], [r["longest"] for r in own], label=name, **look)
            axes.plot([r["length"] for r in own], [r["longest_bound"] for r in own], color=COLOURS[index], alpha=0.4)
        axes.set(xscale="log", xlabel="length n", ylabel="tokens", ylim=(0, None))
        axes.set_title(f"Longest block (pale: bound, 90 %), sigma = {own[0]['sigma']:g}")
        axes.legend(loc="lower right")
    return figure


def report(results: dict[str, Any]) -> str:
    """report.md."""
    rows, study = results["rows"], results["study"]
    lines = [
        "# Positional LSH: what the samples buy",
        "",
        f"Masks and outputs over {study['length']} tokens, {study['seeds']} draws per number. `spectral` is",
        "‖M̄ − L*‖₂ / ‖L*‖₂, `largest` max |M̄ − L*| of the causal part; in parentheses bounds that hold with",
        "probability 0.9.",
        "",
        "| sigma | law | s | spectral | largest |",
        "|---|---|---|---|---|",
    ]
    for row in of(rows, "mask"):
        if row["samples"] in (10, 20, 100) or row["case"] == "fixed":
            count = "–" if row["case"] == "fixed" else row["samples"]
            bounds = ("", "")
            if row["case"] == "integer":
                bounds = f" ({row['spectral_bound_relative']:.2f})", f" ({row['largest_bound']:.2f})"
            lines.append(
                f"| {row['sigma']:g} | {row['case']} | {count} | {row['spectral_relative']:.2f}{bounds[0]} "
                f"| {row['largest']:.2f}{bounds[1]} |"
            )
    lines += ["", "Output of attention, relative error against exact ALiBi, mean over layers and heads:", ""]
    samples = sorted({row["samples"] for row in of(rows, "output")})
    lines += ["| | " + " | ".join(f"s = {s}" for s in samples) + " |", "|---" * (len(samples) + 1) + "|"]
    for case, label in CASES.items():
        errors = [np.mean([r["error"] for r in of(rows, "output", case=case, samples=s)]) for s in samples]
        lines.append(f"| {label} | " + " | ".join(f"{error:.3f}" for error in errors) + " |")
    return "\n".join([*lines, ""])
