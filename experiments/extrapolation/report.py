"""results.json to report.md and figures: `python -m experiments.extrapolation.report FOLDER` makes them anew."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bampath.analysis import exponent_figure, heatmap_figure, passkey_figure, perplexity_figure, prior_figure, save
from bampath.analysis.figures import short_number
from bampath.evaluation.intervals import wilson
from bampath.progress import duration
from experiments.extrapolation.config import slug

Row = dict[str, Any]
LEARNED = 0.9  # share of keys found that counts as having learned retrieval


def write_report(folder: Path) -> Path:
    """Read folder/results.json, write folder/figures/*.png and folder/report.md, and return the latter's path."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    write_figures(folder / "figures", results)
    path = folder / "report.md"
    path.write_text(report(results), encoding="utf-8")
    return path


def write_figures(folder: Path, results: dict[str, Any]) -> list[Path]:
    """All figures of a study. Of learned priors the first seed is shown, of exponents all."""
    rows, trained = results["rows"], results["study"]["train_length"]
    of = lambda kind: [row for row in rows if row["benchmark"] == kind]
    made = [
        save(perplexity_figure(of("perplexity"), trained), folder / "perplexity.png"),
        save(passkey_figure(of("passkey"), trained), folder / "passkey.png"),
        save(heatmap_figure(of("passkey"), trained), folder / "passkey-depth.png"),
    ]
    for case, own in _learned_priors(rows).items():
        first = [row for row in own if row["seed"] == own[0]["seed"]]
        title, name = f"Learned priors of {case}", f"priors-{slug(case)}.png"
        made.append(save(prior_figure(first, trained, title), folder / name))
        if _has_exponents(own):
            made.append(save(exponent_figure(own, f"Heads of {case}"), folder / f"exponents-{slug(case)}.png"))
    return made


def report(results: dict[str, Any]) -> str:
    """The report as Markdown: what was done, both tables, what they say, the figures, times."""
    env, study = results["env"], results["study"]
    first = study["train_length"]
    seeds = len({row["seed"] for row in results["rows"]})
    parts = [
        f"# Extrapolation study, size {study['name']}",
        f"Written by `python -m experiments.extrapolation.run` on {env['date']}: {env['device']}, {env['platform']}, "
        f"Python {env['python']}, JAX {env['jax']}, commit {env['commit']}.",
        f"Every scheme: {study['shape']}, {study['budget']}, {seeds} seed(s), text: {study['text']}. "
        f"Trained on rows of {first} tokens; everything right of 1× is longer than anything seen in training.",
        "## Passkey: share of keys found (all digits right)",
        passkey_table(results),
        "\n".join(f"- {line}" for line in findings(results)),
        *([seed_table(results)] if seeds > 1 else []),
        "![Passkey by length](figures/passkey.png)",
        "![Passkey by length and depth](figures/passkey-depth.png)",
        "## Perplexity of held-out text by position",
        perplexity_table(results),
        "![Perplexity by position](figures/perplexity.png)",
        "## Learned priors",
        "\n\n".join(f"![{path}](figures/{path})" for path in _prior_files(results)) or "No scheme learned a prior.",
        "## Time",
        time_table(results),
        f"Total {duration(study['total_seconds'])} (text, tokenizer, training, evaluation, figures).",
    ]
    return "\n\n".join(parts) + "\n"


def passkey_table(results: dict[str, Any]) -> str:
    """Schemes by lengths, pooled over seeds, with Wilson's 95 % interval."""
    rows = [row for row in results["rows"] if row["benchmark"] == "passkey"]
    trained = results["study"]["train_length"]
    lengths = sorted({row["length"] for row in rows})
    head = ["scheme", *(f"{short_number(n)} ({n // trained}×)" for n in lengths)]
    body = []
    for case, own in _by(rows, "case").items():
        cells = [_pooled([row for row in own if row["length"] == n]) for n in lengths]
        body.append([f"`{case}`", *cells])
    return _table(head, body)


def perplexity_table(results: dict[str, Any]) -> str:
    """Schemes by windows of positions (1×, 2×, 4×, …), mean loss over seeds."""
    rows = [row for row in results["rows"] if row["benchmark"] == "perplexity"]
    trained = results["study"]["train_length"]
    ends = [end for end in sorted({row["end"] for row in rows}) if (end // trained).bit_count() == 1]
    head = ["scheme", *(f"to {short_number(end)} ({end // trained}×)" for end in ends)]
    body = []
    for case, own in _by(rows, "case").items():
        losses = [np.mean([row["loss"] for row in own if row["end"] == end]) for end in ends]
        body.append([f"`{case}`", *(f"{np.exp(loss):.2f}" for loss in losses)])
    return _table(head, body)


def time_table(results: dict[str, Any]) -> str:
    """Parameters, final loss, speed and seconds per scheme, medians over seeds."""
    rows = [row for row in results["rows"] if row["benchmark"] == "training"]
    head = ["scheme", "parameters", "positional", "last loss", "tokens/s", "training", "evaluation"]
    body = []
    for case, own in _by(rows, "case").items():
        middle = lambda name, own=own: statistics.median(row[name] or 0 for row in own)
        speeds = [row["tokens_per_second"] for row in own if row["tokens_per_second"]]
        body.append(
            [
                f"`{case}`",
                f"{own[0]['parameters']:,}",
                f"{own[0]['positional_parameters']:,}",
                f"{middle('loss'):.3f}",
                f"{statistics.median(speeds):,.0f}" if speeds else "not measured",
                f"{middle('training_seconds'):.0f} s",
                f"{middle('evaluation_seconds'):.0f} s",
            ]
        )
    return _table(head, body)


def findings(results: dict[str, Any]) -> list[str]:
    """What the passkey numbers say, in words that hold whichever scheme wins."""
    rows = [row for row in results["rows"] if row["benchmark"] == "passkey"]
    trained = results["study"]["train_length"]
    reach = {case: _reach(own, trained) for case, own in _by(rows, "case").items()}
    said = []
    missing = [case for case, far in reach.items() if far == 0]
    if missing:
        said.append(f"Not learned at the training length (below {LEARNED:.0%} there): {_names(missing)}.")
    for far in sorted({far for far in reach.values() if far}, reverse=True):
        same = [case for case, own in reach.items() if own == far]
        said.append(f"At least {LEARNED:.0%} of the keys up to {far}× the training length: {_names(same)}.")
    return said


def seed_table(results: dict[str, Any]) -> str:
    """How far each run finds at least 90 % of the keys, as multiples of the training length; 0: not even there."""
    rows = [row for row in results["rows"] if row["benchmark"] == "passkey"]
    seeds = sorted({row["seed"] for row in rows})
    head = [f"at least {LEARNED:.0%} found up to", *(f"seed {seed}" for seed in seeds)]
    body = []
    for case, own in _by(rows, "case").items():
        runs = _by(own, "seed")
        far = [_reach(runs[seed], results["study"]["train_length"]) if seed in runs else None for seed in seeds]
        body.append([f"`{case}`", *("" if n is None else f"{n}×" for n in far)])
    return _table(head, body)


def _reach(rows: Sequence[Row], trained: int) -> int:
    """The last of the lengths, in order, before the share of keys found falls below 90 %, over the training length."""
    far = 0
    for length in sorted({row["length"] for row in rows}):
        if _accuracy([row for row in rows if row["length"] == length]) < LEARNED:
            break
        far = length // trained
    return far


def _pooled(rows: list[Row]) -> str:
    if not rows:
        return ""
    hits, samples = sum(row["correct"] for row in rows), sum(row["samples"] for row in rows)
    low, high = wilson(hits, samples)
    return f"{hits / samples:.2f} [{low:.2f}, {high:.2f}]"


def _accuracy(rows: list[Row]) -> float:
    return sum(row["correct"] for row in rows) / sum(row["samples"] for row in rows)


def _prior_files(results: dict[str, Any]) -> list[str]:
    files = []
    for case, own in _learned_priors(results["rows"]).items():
        files += [f"priors-{slug(case)}.png"] + [f"exponents-{slug(case)}.png"] * _has_exponents(own)
    return files


def _learned_priors(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The heads of schemes whose prior has parameters, by scheme."""
    return _by([row for row in rows if row["benchmark"] == "prior" and row["parameters"]], "case")


def _has_exponents(heads: Sequence[Row]) -> bool:
    return any("bam/theta_beta" in row["parameters"] for row in heads)


def _names(cases: Sequence[str]) -> str:
    return ", ".join(f"`{case}`" for case in cases)


def _by(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Put the lines of `text` between two marks of a file, in place of what stands there. ValueError without marks."""
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"{path} has no {begin!r} … {end!r} to write between")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.extrapolation.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="where results.json is")
    path = write_report(parser.parse_args(argv).folder)
    print(path)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"error: {error}")
