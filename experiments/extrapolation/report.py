"""results.json to report.md and figures: `python -m experiments.extrapolation.report FOLDER` makes them anew."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bampath.analysis import exponent_figure, heatmap_figure, passkey_figure, perplexity_figure, prior_figure, save
from bampath.command import fail_gracefully
from bampath.progress import duration
from experiments.extrapolation.config import slug
from experiments.tables import by, findings, passkey_table, perplexity_table, seed_table, time_table

Row = dict[str, Any]


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


def _prior_files(results: dict[str, Any]) -> list[str]:
    files = []
    for case, own in _learned_priors(results["rows"]).items():
        files += [f"priors-{slug(case)}.png"] + [f"exponents-{slug(case)}.png"] * _has_exponents(own)
    return files


def _learned_priors(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The heads of schemes whose prior has parameters, by scheme."""
    return by([row for row in rows if row["benchmark"] == "prior" and row["parameters"]], "case")


def _has_exponents(heads: Sequence[Row]) -> bool:
    return any("bam/theta_beta" in row["parameters"] for row in heads)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.extrapolation.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="where results.json is")
    path = write_report(parser.parse_args(argv).folder)
    print(path)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
