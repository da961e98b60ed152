"""results.json to report.md and figures: `python -m experiments.conversion.report FOLDER` makes them anew."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bampath.analysis import passkey_figure, perplexity_figure, save
from bampath.analysis.figures import COLOURS, DASHES, short_number, style
from bampath.command import fail_gracefully
from experiments.tables import by, pooled, table

Row = dict[str, Any]
STAGES = {
    "untrained": "not trained",
    "start": "before",
    "stage1": "stage 1",
    "stage2": "stage 2",
    "stage3": "stage 3",
}
SPEED = (
    "tokens/s: the median between two lines of the log, of a process that may have shared the device and its CPU with "
    "others; training: from the first step to the last, compilation included."
)


def write_report(folder: Path, results: dict[str, Any]) -> Path:
    """Write folder/figures/*.png and folder/report.md of results, and return the latter's path."""
    write_figures(folder / "figures", results)
    path = folder / "report.md"
    path.write_text(report(results), encoding="utf-8")
    return path


def last_rows(rows: Sequence[Row]) -> list[Row]:
    """The measurements after the last stage of each case, whose name says which where others have gone further."""
    order = list(STAGES)
    latest = {case: max((r["after"] for r in own), key=order.index) for case, own in by(rows, "case").items()}
    furthest = max(latest.values(), key=order.index, default="")

    def name(case: str) -> str:
        behind = latest[case] not in ("untrained", furthest)
        return f"{case}, {STAGES[latest[case]]}" if behind else case

    return [{**row, "case": name(row["case"])} for row in rows if row["after"] == latest[row["case"]]]


def report(results: dict[str, Any]) -> str:
    """The report as Markdown."""
    study, rows = results["study"], results["rows"]
    teacher, context = study["teacher"], study["train_length"]
    parts = [f"# Conversion study, size {study['name']}", *map(_origin, results.get("runs", [results["env"]]))]
    if not study["complete"]:
        parts += ["Not complete yet: the rest of the cells comes with --resume."]
    parts += [
        f"Teacher: {teacher['shape']}, {teacher['parameters']:,} parameters, `{teacher['position']}`, trained at "
        f"{context:,} tokens. Text: {', '.join(study['text'])}. One seed.",
        "## Perplexity of held-out text, by window of positions",
        perplexity_table(rows, context),
        "Every window sees the same rows; brackets: 95 % interval over rows.",
        "## Passkeys found",
        passkey_table(rows, context),
        "## Digits of them, the earlier ones given",
        digits_table(rows, context),
        "Brackets: 95 % interval (Wilson's, over several seeds Student's where that is wider).",
        "![Perplexity by position](figures/perplexity.png)",
        "![Passkeys by length](figures/passkey.png)",
    ]
    if any(row["benchmark"] == "training" for row in rows):
        parts += ["## Training", training_table(rows), SPEED, "![Losses](figures/losses.png)"]
    if any(row.get("layers") for row in rows):
        parts += ["![Error of each layer after stage 1](figures/layers.png)"]
    parts += [f"Words of the distillation: `{' '.join(study['words'])}`"]
    return "\n\n".join(parts) + "\n"


def _origin(env: Row) -> str:
    """Who wrote the results, or those of some cases where calls were merged."""
    what = f"`{'`, `'.join(env['cases'])}`: written" if "cases" in env else "Written"
    return (
        f"{what} by `python -m experiments.conversion.run` on {env['date']}: {env['device']}, {env['platform']}, "
        f"Python {env['python']}, JAX {env['jax']}, commit {env['commit']}."
    )


def _lines(rows: Sequence[Row], benchmark: str) -> list[tuple[str, str, list[Row]]]:
    """(case, stage, its rows) in order."""
    own = [row for row in rows if row["benchmark"] == benchmark]
    return [
        (case, stage, some)
        for case, group in by(own, "case").items()
        for stage in STAGES
        if (some := [row for row in group if row["after"] == stage])
    ]


def perplexity_table(rows: Sequence[Row], context: int) -> str:
    """A line per case and stage, a column per window of the teacher's context."""
    lines = _lines(rows, "perplexity")
    ends = sorted({row["end"] for _, _, own in lines for row in own})
    head = ["case", "after", *(f"to {short_number(end)} ({end // context}×)" for end in ends)]
    body = []
    for case, stage, own in lines:
        found = {row["end"]: row for row in own}
        cells = [f"{found[e]['perplexity']:.2f} {_interval(found[e])}".strip() if e in found else "" for e in ends]
        body.append([f"`{case}`", STAGES[stage], *cells])
    return table(head, body)


def _interval(row: Row) -> str:
    known = row["lower"] is not None and row["lower"] == row["lower"]  # a single row has no spread
    return f"[{row['lower']:.2f}, {row['upper']:.2f}]" if known else ""


def passkey_table(rows: Sequence[Row], context: int) -> str:
    """A line per case and stage, a column per length."""
    lines = _lines(rows, "passkey")
    lengths = sorted({row["length"] for _, _, own in lines for row in own})
    head = ["case", "after", *(f"{short_number(n)} ({n // context}×)" for n in lengths)]
    body = [
        [f"`{case}`", STAGES[stage], *(pooled([row for row in own if row["length"] == n]) for n in lengths)]
        for case, stage, own in lines
    ]
    return table(head, body)


def digits_table(rows: Sequence[Row], context: int) -> str:
    """The share of the keys' tokens that were right, each after the right ones before it."""
    lines = _lines(rows, "passkey")
    lengths = sorted({row["length"] for _, _, own in lines for row in own})
    found = [(case, stage, {row["length"]: row["token_accuracy"] for row in own}) for case, stage, own in lines]
    head = ["case", "after", *(f"{short_number(n)} ({n // context}×)" for n in lengths)]
    return table(
        head,
        [
            [f"`{case}`", STAGES[stage], *(f"{own[n]:.2f}" if n in own else "" for n in lengths)]
            for case, stage, own in found
        ],
    )


def training_table(rows: Sequence[Row]) -> str:
    """Tokens, first and last loss, speed and seconds of every stage."""
    body = []
    for case, stage, own in _lines(rows, "training"):
        row = own[0]
        speed = f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "not measured"
        losses = [f"{row['curve']['loss'][i]:.4g}" for i in (0, -1)]
        body.append([f"`{case}`", STAGES[stage], f"{row['tokens']:,}", *losses, speed, f"{row['seconds']:.0f} s"])
    return table(["case", "stage", "tokens", "first loss", "last loss", "tokens/s", "training"], body)


def write_figures(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Perplexity and passkeys after the last stage, losses of all stages, errors of layers."""
    rows, context = results["rows"], results["study"]["train_length"]
    of = lambda kind: [row for row in rows if row["benchmark"] == kind]
    made = [
        save(perplexity_figure(last_rows(of("perplexity")), context), folder / "perplexity.png"),
        save(passkey_figure(last_rows(of("passkey")), context), folder / "passkey.png"),
    ]
    training, cases = of("training"), list(by(rows, "case"))
    if training:
        made.append(save(loss_figure(training, cases), folder / "losses.png"))
    layered = [row for row in training if row["layers"]]
    if layered:
        made.append(save(layer_figure(layered, cases), folder / "layers.png"))
    return made


def _look(row: Row, cases: Sequence[str]) -> dict[str, Any]:
    """The same line for a case in every figure."""
    index = cases.index(row["case"])
    return {"color": COLOURS[index % 8], "ls": DASHES[index % 8], "lw": 1.6, "label": row["case"]}


def loss_figure(rows: Sequence[Row], cases: Sequence[str]) -> Figure:
    """The loss over steps, a panel per stage: each has its own loss, and a case that only continues has the text's."""
    stages = [stage for stage in STAGES if any(row["after"] == stage for row in rows)]
    with style():
        figure = Figure(figsize=(3.6 * len(stages) + 1.6, 3.4), layout="constrained")
        panels = figure.subplots(1, len(stages), squeeze=False)[0]
        lines: dict[str, Any] = {}
        for panel, stage in zip(panels, stages, strict=True):
            for row in (row for row in rows if row["after"] == stage):
                curve = row["curve"]
                (lines[row["case"]],) = panel.plot(curve["step"], curve["loss"], **_look(row, cases))
            panel.set(title=STAGES[stage], xlabel="step", ylabel="loss", yscale="log")
        panels[-1].legend(handles=list(lines.values()), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def layer_figure(rows: Sequence[Row], cases: Sequence[str]) -> Figure:
    """The error of attention outputs over the teacher's mean square, by layer, at the end of stage 1."""
    with style():
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for row in rows:
            axes.plot(np.arange(len(row["layers"])), row["layers"], **_look(row, cases))
        axes.set(xlabel="layer", ylabel="error / mean square", yscale="log", title="Attention outputs after stage 1")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.conversion.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="where results.json is")
    folder = parser.parse_args(argv).folder
    print(write_report(folder, json.loads((folder / "results.json").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
