"""results.json to report.md and figures: `python -m experiments.state_tracking.report FOLDER` makes them anew."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bampath.analysis import save
from bampath.analysis.figures import COLOURS, DASHES, MARKERS, style
from bampath.command import fail_gracefully
from bampath.evaluation.report import table
from bampath.evaluation.state.tasks import parse_task
from bampath.intervals import over_seeds
from experiments.state_tracking.config import SCHEMES, SOLVED, Study

Row = dict[str, Any]
INTERVAL = (
    "All seeds together, the 95 % interval over seeds (Student's, with models as units, or Wilson's of all answers "
    "where that is wider), then each seed."
)
# Wrong answers in percent, in distribution / sparse / dense, as PaTH reports them (arXiv 2505.16381): 1 layer, 2 heads,
# dim 64; its training recipe is not published.
PAPER = {"rope": (6.9, 40.3, 0.01), "fox": (8.3, 36.3, 0.0), "path": (0.0, 0.0001, 0.0)}


def describe(study: Study) -> dict[str, Any]:
    """What a reader of the results must know of the study."""
    trials = []
    for trial in study.trials:
        config, task = trial.config(trial.schemes[0], trial.depths[0]), parse_task(trial.task)
        model, data, optim, train = config.model, config.data, config.optim, config.train
        trials.append(
            {
                "task": trial.task,
                "schemes": list(trial.schemes),
                "depths": list(trial.depths),
                "shape": f"dim {model.dim}, {model.heads} heads, MLP {model.mlp_dim}, {task.vocab_size} symbols",
                "budget": f"{train.steps:,} steps of {data.batch_size} rows of {task.length} symbols, {optim.name}, "
                f"betas {optim.b1:g}, {optim.b2:g}, rate {optim.lr:g} after {optim.warmup_steps} steps of warm-up, "
                f"{optim.schedule} to {optim.lr * optim.lr_end:g}, decay {optim.weight_decay:g}",
                "tests": {name: trial.rows_of(name) for name in task.tests()},
            }
        )
    return {"name": study.name, "seeds": list(study.seeds), "trials": trials}


def write_report(folder: Path, results: dict[str, Any]) -> Path:
    """Write folder/report.md and folder/figures/*.png from results; returns the former's path."""
    figures = write_figures(folder / "figures", results)
    path = folder / "report.md"
    path.write_text(report(results, figures), encoding="utf-8")
    return path


def report(results: dict[str, Any], figures: dict[str, Path]) -> str:
    """The report as Markdown: per task the budget, a table, what the paper has, a figure."""
    study = results["study"]
    parts = [f"# State-tracking study, size {study['name']}", *map(_origin, results.get("runs", [results["env"]]))]
    parts += [
        f"Seeds {study['seeds']}."
        + ("" if study["complete"] else " Not complete yet: the rest of the cells comes with --resume.")
    ]
    parts += [f"`{name}` failed: {why}" for name, why in study.get("failed", {}).items()]
    if len({row["trained_on"] for row in results["rows"]}) > 1:
        parts += ["## Overview", overview_table(results["rows"])]
    for trial in study["trials"]:
        rows = [row for row in results["rows"] if row["trained_on"] == trial["task"]]
        if not rows:
            continue
        parts += [f"## `{trial['task']}`", f"{trial['shape'][0].upper()}{trial['shape'][1:]}; {trial['budget']}."]
        parts += [errors_table(rows)]
        if trial["task"].startswith("fflm"):
            parts += [_paper_note()]
        if trial["task"].startswith("words"):
            parts += [reach_table(rows, trial["depths"]), layers_table(rows, trial["depths"])]
        if trial["task"] in figures:
            parts += [f"![{trial['task']}](figures/{figures[trial['task']].name})"]
            if trial["task"].startswith("words"):
                parts += ["A scheme has no deeper model where it has solved the task, or where that one was not run."]
        parts += [time_table(rows)]
    took = "This call took" if len(results.get("runs", [0])) == 1 else "These calls took"
    parts += [
        f"{took} {study['seconds_of_this_call']:.0f} s on the clock and "
        f"{study['cpu_seconds_of_this_call']:.0f} s of CPU time."
    ]
    return "\n\n".join(parts) + "\n"


def _origin(env: Row) -> str:
    what = f"`{'`, `'.join(env['tasks'])}`: written" if "tasks" in env else "Written"
    return (
        f"{what} by `python -m experiments.state_tracking.run` on {env['date']}: {env['device']}, {env['platform']}, "
        f"Python {env['python']}, JAX {env['jax']}, commit {env['commit']}."
    )


def overview_table(rows: Sequence[Row]) -> str:
    """Wrong answers in distribution in percent, schemes by tasks, of the deepest models trained; all seeds."""
    scored = [row for row in rows if row.get("test") == "in-distribution"]
    tasks = list(dict.fromkeys(row["trained_on"] for row in scored))
    body = []
    for (case,), own in _by(scored, "case").items():
        cells = []
        for task in tasks:
            some = [row for row in own if row["trained_on"] == task]
            deepest = [row for row in some if row["layers"] == max(row["layers"] for row in some)]
            share = sum(row["wrong"] for row in deepest) / max(1, sum(row["answers"] for row in deepest))
            cells.append(f"{100 * share:.3g} ({deepest[0]['layers']})" if deepest else "")
        body.append([f"`{case}`", *cells])
    head = ["scheme", *(f"`{task}`" for task in tasks)]
    return (
        "Wrong answers in distribution in percent, all seeds together, and the layers of the deepest model that was "
        f"trained:\n\n{table(head, body)}"
    )


def errors_table(rows: Sequence[Row]) -> str:
    """Wrong answers in percent per scheme and test: all seeds together, the interval over seeds, then each seed."""
    scored = [row for row in rows if row["benchmark"] == "state"]
    tests = list(dict.fromkeys(row["test"] for row in scored))
    body = []
    for (case, layers), own in _by(scored, "case", "layers").items():
        cells = []
        for test in tests:
            some = [row for row in own if row["test"] == test]
            wrong, answers = [row["wrong"] for row in some], [row["answers"] for row in some]
            low, high = over_seeds(wrong, answers)
            seeds = ", ".join(_percent(row["error"]) for row in some)
            cells.append(f"{_percent(sum(wrong) / sum(answers))} [{_percent(low)}, {_percent(high)}] ({seeds})")
        body.append([f"`{case}`", str(layers), *cells])
    heads = [f"{test}: wrong %" for test in tests]
    return table(["scheme", "layers", *heads], body) + f"\n\n{INTERVAL}"


def layers_table(rows: Sequence[Row], depths: Sequence[int]) -> str:
    """The least number of layers with which more than 90 % of the words are right, all seeds together, by length of the
    word; and how many of the seeds are above that mark by themselves, at this depth or at the deepest there is."""
    scored = [row for row in rows if row["benchmark"] == "state"]
    lengths = [entry["length"] for entry in scored[0]["by_length"]]
    shown = [n for n in lengths if n % 5 == 0 or n == lengths[-1]]
    body = []
    for (case,), own in _by(scored, "case").items():
        cells = []
        for length in shown:
            models = dict(sorted((n, some) for (n,), some in _by(own, "layers").items()))
            enough = [n for n, some in models.items() if _share(some, length) > SOLVED]
            shown_at = models[enough[0] if enough else max(models)]
            seeds = sum(_share([row], length) > SOLVED for row in shown_at)
            cells.append(f"{enough[0] if enough else f'> {max(models)}'} ({seeds} of {len(shown_at)})")
        body.append([f"`{case}`", *cells])
    head = ["scheme", *(f"{n} letters" for n in shown)]
    return (
        f"Least layers (of {list(depths)}) with over 90 % of the words right, all seeds together, and how many seeds "
        f"are above that by themselves:\n\n{table(head, body)}"
    )


def reach_table(rows: Sequence[Row], depths: Sequence[int]) -> str:
    """The longest words of which more than 90 % are right, all seeds together, by the number of layers."""
    scored = [row for row in rows if row["benchmark"] == "state"]
    body = []
    for (case,), own in _by(scored, "case").items():
        models = {n: some for (n,), some in _by(own, "layers").items()}
        lengths = [entry["length"] for entry in own[0]["by_length"]]
        reached = lambda some, lengths=lengths: max((n for n in lengths if _share(some, n) > SOLVED), default=0)
        body.append([f"`{case}`", *(f"{reached(models[n])}" if n in models else "" for n in depths)])
    head = ["scheme", *(f"{n} layer{'s' if n > 1 else ''}" for n in depths)]
    return f"Letters up to which over 90 % of the words are right, all seeds together:\n\n{table(head, body)}"


def time_table(rows: Sequence[Row]) -> str:
    """Parameters, last loss per seed, seconds."""
    body = []
    for (case, layers), own in _by([r for r in rows if r["benchmark"] == "training"], "case", "layers").items():
        losses = ", ".join(f"{row['curve']['loss'][-1]:.4f}" for row in own)
        seconds = f"{own[0]['seconds_of_all_seeds']:.0f} s", f"{own[0]['test_seconds_of_all_seeds']:.0f} s"
        body.append([f"`{case}`", str(layers), f"{own[0]['parameters']:,}", losses, *seconds])
    return table(["scheme", "layers", "parameters", "last loss per seed", "training, all seeds", "tests"], body)


def write_figures(folder: Path, results: dict[str, Any]) -> dict[str, Path]:
    """One figure per task, one line per scheme, all seeds together: wrong answers by depth for each test (fewest
    layers), or the words that are right by their length for each number of layers."""
    made = {}
    for trial in results["study"]["trials"]:
        rows = [r for r in results["rows"] if r["trained_on"] == trial["task"] and r["benchmark"] == "state"]
        if rows:
            name = "".join(c if c.isalnum() else "-" for c in trial["task"]).strip("-")
            draw = length_figure if rows[0]["by_length"] else depth_figure
            made[trial["task"]] = save(draw(rows, trial["task"]), folder / f"{name}.png")
    return made


def depth_figure(rows: Sequence[Row], title: str) -> Figure:
    """Share of wrong answers by the distance (or amount) of the evidence, a panel per test."""
    tests = list(dict.fromkeys(row["test"] for row in rows))
    with style():
        figure = Figure(figsize=(3.4 * len(tests) + 1.4, 3.4), layout="constrained")
        panels = figure.subplots(1, len(tests), squeeze=False, sharey=True)[0]
        for panel, test in zip(panels, tests, strict=True):
            for (case,), own in _by([r for r in rows if r["test"] == test], "case").items():
                least = min(row["layers"] for row in own)
                points = _by_depth([row for row in own if row["layers"] == least])
                panel.plot(list(points), [100 * p for p in points.values()], **_look(case))
            panel.set_xscale("log", base=2)
            panel.set(title=test, xlabel="symbols since the evidence, up to")
        panels[0].set_ylabel("wrong answers (%)")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(title, fontsize=11)
    return figure


def length_figure(rows: Sequence[Row], title: str) -> Figure:
    """Share of the words whose products are all right up to each length, a panel per number of layers."""
    depths = sorted({row["layers"] for row in rows})
    with style():
        figure = Figure(figsize=(3.1 * len(depths) + 1.6, 3.4), layout="constrained")
        panels = figure.subplots(1, len(depths), squeeze=False, sharey=True)[0]
        for panel, layers in zip(panels, depths, strict=True):
            for (case,), own in _by([row for row in rows if row["layers"] == layers], "case").items():
                lengths = [entry["length"] for entry in own[0]["by_length"]]
                panel.plot(lengths, [100 * _share(own, length) for length in lengths], **_look(case))
            panel.axhline(100 * SOLVED, color="#777777", lw=0.8, ls=":")
            panel.set(title=f"{layers} layer{'s' if layers > 1 else ''}", xlabel="letters", xticks=[1, 5, 10, 15, 20])
            panel.set_xlim(0.4, lengths[-1] + 0.6)
        panels[0].set_ylabel("words right up to this length (%)")
        handles = [pair for panel in panels for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
        named = {label: handle for handle, label in handles}
        panels[-1].legend(named.values(), named.keys(), loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(title, fontsize=11)
    return figure


def _look(case: str) -> dict[str, Any]:
    """The same colour, dash and marker for a scheme in every figure."""
    index = SCHEMES.index(case) if case in SCHEMES else len(SCHEMES)
    return {"label": case, "ms": 4.5, "lw": 1.6, "color": COLOURS[index], "ls": DASHES[index], "marker": MARKERS[index]}


def _by_depth(rows: Sequence[Row]) -> dict[int, float]:
    wrong: dict[int, int] = {}
    answers: dict[int, int] = {}
    for entry in (entry for row in rows for entry in row["by_depth"]):
        wrong[entry["to"]] = wrong.get(entry["to"], 0) + entry["wrong"]
        answers[entry["to"]] = answers.get(entry["to"], 0) + entry["answers"]
    return {to: wrong[to] / answers[to] for to in sorted(answers)}


def _share(rows: Sequence[Row], length: int) -> float:
    right = sum(entry["right"] for row in rows for entry in row["by_length"] if entry["length"] == length)
    return right / sum(row["sequences"] for row in rows)


def _paper_note() -> str:
    body = [[f"`{case}`", *(f"{value:g}" for value in values)] for case, values in PAPER.items()]
    head = ["PaTH's paper, 256 pairs, 1 layer", "in-distribution", "sparse", "dense"]
    return table(head, body) + "\n\nIts optimiser, steps and batch are not published; see README.md for what differs."


def _percent(share: float) -> str:
    return f"{100 * share:.4g}"


def _by(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.state_tracking.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="where results.json is")
    folder = parser.parse_args(argv).folder
    print(write_report(folder, json.loads((folder / "results.json").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
