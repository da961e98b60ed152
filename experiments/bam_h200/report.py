"""results.json (and speed.json) to report.md and figures: `python -m experiments.bam_h200.report FOLDER`.

`--publish` copies results, report and figures beside this script and writes the numbers into its README
and the repository's.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from bampath.analysis import exponent_figure, heatmap_figure, passkey_figure, perplexity_figure, prior_figure, save
from bampath.analysis.figures import short_number
from bampath.command import fail_gracefully
from experiments.bam_h200 import kept, summary
from experiments.bam_h200.attention_figure import attention_figure
from experiments.bam_h200.config import LOOKED_AT as MAIN
from experiments.bam_h200.config import SCHEMES, without_recipe
from experiments.bam_h200.marks import marks
from experiments.bam_h200.repeats import repeat_table
from experiments.bam_h200.slim import with_curves
from experiments.bam_h200.tables import (
    attention_table,
    digit_table,
    finder_table,
    niah_table,
    prior_table,
    speed_table,
)
from experiments.extrapolation.config import slug
from experiments.tables import (
    by,
    findings,
    passkey_table,
    perplexity_table,
    replace_between,
    require_marks,
    seed_table,
    time_table,
)

Row = dict[str, Any]
Part = tuple[str, str, str]  # size, mix, what its cases change of the recipe
HERE = Path(__file__).parent
BEGIN, END = "<!-- results: written by report.py -->", "<!-- end of results -->"
# A figure holds eight lines that can be told apart.
GROUPS = {
    "": (
        *("path+bam+ssmax", "bam+ssmax(init=0.2)", "bam+ssmax", "bam", "nope+ssmax(init=0.2)"),
        *("fox(bias=5)", "alibi", "rope"),
    ),
    "-starts": tuple(
        f"{name}+ssmax{start}" for name in ("bam", "nope", "rope", "alibi") for start in ("(init=0.2)", "")
    ),
    "-more": ("bam+ssmax", "nope", "sinusoidal+ssmax", "sinusoidal", "path+fox(bias=5)", "path"),
    "-ablations": (
        *("bam+ssmax", "bam+ssmax(init=0.2)", "bam+ssmax(init=0.4)", "bam+ssmax(inside=false)"),
        *("bam+ssmax @ clamped", "bam(init=laplace)+ssmax", "bam"),
    ),
    "-path": ("path+bam+ssmax", "path+ssmax", "path+bam", "path+fox(bias=5)", "path"),
}
WITHOUT_PERPLEXITY = ("-ablations", "-path")  # their lines lie on each other
BY_DEPTH = (  # the cases of the figure by depth
    *("path+bam+ssmax", "path+ssmax", "bam+ssmax(init=0.2)", "bam+ssmax", "bam", "nope+ssmax(init=0.2)"),
    *("fox(bias=5)", "alibi", "rope"),
)
# The cases whose learned priors are drawn: the tables have all of them.
DRAWN_PRIORS = ("bam", "bam+ssmax", "bam+ssmax(init=0.2)", "path+bam+ssmax")
COLOURS = 96  # of a figure's file, which is then a third as large


def parts_of(rows: Sequence[Row]) -> dict[Part, dict[str, Any]]:
    """(size, mix, changes of the recipe) -> what the shared tables read, schemes in the study's order and ablations
    behind them. ValueError for rows of a part without any of training.

    What cases change of the data or of the number of heads is a recipe of its own and has its own part, in which they
    are named without it.
    """
    found: dict[Part, dict[str, Any]] = {}
    order = {case: index for index, case in enumerate(SCHEMES)}
    named = _named(rows)
    place = lambda one: (one[1] != "", order.get(one[0]["case"], len(order)), one[0]["case"])
    for row, recipe in sorted(named, key=place):
        part = found.setdefault((row["size"], row["mix"], recipe), {"study": {"recipe": recipe}, "rows": []})
        part["rows"].append(row)
        if "train_length" in row:
            part["study"].setdefault("train_length", row["train_length"])
    for key, part in found.items():
        if "train_length" not in part["study"]:
            raise ValueError(f"{title(key)}: there are rows of what was asked and none of training")
    return found


def _named(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """Rows with their case and what that changes of the recipe apart."""
    return [({**row, "case": case}, recipe) for row in rows for case, recipe in [without_recipe(row["case"])]]


def stem(key: Part) -> str:
    """What the names of a part's figures begin with."""
    return "-".join(slug(name) for name in key if name)


def title(key: Part) -> str:
    size, mix, recipe = key
    return f"Size {size}, mix {mix}" + (f", another recipe: `{recipe}`" if recipe else "")


def seeds_told(runs: Sequence[Row]) -> str:
    """How many seeds of which schemes: "3 seeds of `bam+ssmax`, 1 seed of `rope`, `alibi`"."""
    counts: dict[int, list[str]] = {}
    for case, own in by(runs, "case").items():
        counts.setdefault(len({row["seed"] for row in own}), []).append(f"`{case}`")
    return ", ".join(f"{n} seed{'s' * (n > 1)} of {', '.join(cases)}" for n, cases in sorted(counts.items())[::-1])


def write_figures(folder: Path, rows: Sequence[Row]) -> dict[Part, list[str]]:
    """All figures into `folder`; their names by part."""
    names: dict[Part, list[str]] = {}
    for key, part in parts_of(rows).items():
        for name, figure in figures_of(part):
            path = save(figure, folder / f"{stem(key)}-{name}.png")
            with Image.open(path) as image:
                image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
            names.setdefault(key, []).append(path.name)
    return names


def figures_of(part: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of one part; only perplexity where no key was found."""
    trained = part["study"]["train_length"]
    of = lambda kind: [row for row in part["rows"] if row["benchmark"] == kind]
    near = [row for row in of("passkey") if row["length"] <= 64 * trained]
    found, drawn = any(row["correct"] for row in near), set[str]()
    for suffix, group in GROUPS.items():
        keys, losses = _of_group(near, group), _of_group(of("perplexity"), group)
        cases = {row["case"] for row in (*keys, *losses)}
        if cases <= drawn:
            continue
        drawn |= cases
        if keys and found:
            yield f"passkey{suffix}", passkey_figure(keys, trained)
        if losses and suffix not in WITHOUT_PERPLEXITY:
            yield f"perplexity{suffix}", perplexity_figure(_half_octaves(losses, trained), trained)
    if found:
        yield "passkey-depth", heatmap_figure(_of_group(near, BY_DEPTH) or near, trained)
    learned = [row for row in of("prior") if found and row["case"] in DRAWN_PRIORS]
    for case, heads in by(learned, "case").items():
        yield f"exponents-{slug(case)}", exponent_figure(heads, f"Heads of {case}")
        first = [row for row in heads if row["seed"] == heads[0]["seed"]]
        yield f"priors-{slug(case)}", prior_figure(with_curves(first), trained, f"Priors of {case}")
    shown = [row for row in of("attention") if row["case"] in MAIN and "row" in row]
    if found and shown:
        yield "attention", attention_figure(shown)


def _of_group(rows: Sequence[Row], group: Sequence[str]) -> list[Row]:
    """The rows of the group's cases, in its order."""
    return sorted((row for row in rows if row["case"] in group), key=lambda row: group.index(row["case"]))


def _half_octaves(rows: Sequence[Row], trained: int) -> list[Row]:
    """Windows of equally many tokens, joined from twice the training length on, so that a figure has two points per
    octave: with their mean loss."""
    joined: dict[Any, list[Row]] = {}
    for row in rows:
        window = row["start"] // trained
        place = window >> max(0, window.bit_length() - 2), window.bit_length()
        joined.setdefault((row["case"], row["seed"], place), []).append(row)
    return [{**own[0], "end": own[-1]["end"], "loss": np.mean([row["loss"] for row in own])} for own in joined.values()]


def report(results: dict[str, Any], figures: dict[Part, list[str]], speed: dict[str, Any] | None) -> str:
    """The report as Markdown."""
    env = results["env"]
    parts = [
        "# The headline comparison on one GPU",
        f"Last rows of {env['date'][:10]}: {env['device']}, {env['platform']}, JAX {env['jax']}, "
        f"commit {env['commit']}.",
    ]
    repeats = _named(results.get("repeats", []))
    for key, part in parts_of(results["rows"]).items():
        again = repeat_table([row for row, recipe in repeats if (row["size"], row["mix"], recipe) == key], part["rows"])
        parts += section(key, part, figures.get(key, []), again)
    if speed is not None:
        parts += ["## Speed of the train step", speed_table(speed)]
    return "\n\n".join(parts) + "\n"


def far_note(part: dict[str, Any]) -> list[str]:
    """Which seeds were asked beyond 64 times the training length, and how many keys each: [] if none was."""
    far = 64 * part["study"]["train_length"]
    rows = [row for row in part["rows"] if row["benchmark"] == "passkey" and row["length"] > far]
    if not rows:
        return []
    lengths = " and ".join(short_number(length) for length in sorted({row["length"] for row in rows}))
    keys = " or ".join(map(str, sorted({row["samples"] for row in rows})))
    who = [f"seed {seed} of `{case}`" for case, own in by(rows, "case").items() for seed in by(own, "seed")]
    return [
        f"At {lengths} only {', '.join(who)} had the question, {keys} keys per seed and length. Where no key is found, "
        "no longer prompt is asked."
    ]


def budgets(runs: Sequence[Row]) -> str:
    """Steps and tokens of the runs; changes behind an @ may have others."""
    found = sorted({(row["steps"], row["tokens"]) for row in runs})
    return " or ".join(f"{steps:,} steps, {tokens:,} tokens" for steps, tokens in found)


def section(key: Part, part: dict[str, Any], figures: Sequence[str], again: str) -> list[str]:
    """One size, mix and recipe; again: table of what was trained twice."""
    runs = [row for row in part["rows"] if row["benchmark"] == "training"]
    shown = lambda name: [f"![{name}](figures/{f})" for f in figures if f == f"{stem(key)}-{name}.png"]
    absent = [case for case in SCHEMES if case not in {row["case"] for row in runs}]
    of_priors = tuple(f"{stem(key)}-{kind}-" for kind in ("exponents", "priors"))
    learned = [f"![{f}](figures/{f})" for f in figures if f.startswith(of_priors)]
    return [
        f"## {title(key)}",
        f"Trained at {part['study']['train_length']} tokens: {budgets(runs)}. {len(runs)} run{'s' * (len(runs) > 1)}: "
        f"{seeds_told(runs)}.",
        *([f"Not run: {', '.join(f'`{case}`' for case in absent)}."] if absent else []),
        *(["\n".join(f"- {line}" for line in [*marks(part), *findings(part)])]),
        passkey_table(part),
        *far_note(part),
        seed_table(part),
        *(["### Trained twice from the same seed: the last line of a cell counts", again] if again else []),
        *(line for suffix in GROUPS for line in shown(f"passkey{suffix}")),
        *shown("passkey-depth"),
        "### Digits found",
        digit_table(part),
        "### RULER's single needles: answers begun right, and their tokens",
        niah_table(part),
        "### Perplexity of held-out books by position",
        perplexity_table(part),
        *(line for suffix in GROUPS for line in shown(f"perplexity{suffix}")),
        *(["### Learned priors", prior_table(part), *learned] if prior_table(part) else []),
        "### Weight on the key's sentence, largest of any head",
        attention_table(part),
        *shown("attention"),
        *(["### Heads that find it, and their priors", finder_table(part)] if finder_table(part) else []),
        "### Training",
        "Where cells shared a GPU with others, seconds and tokens/s say nothing about a scheme's speed (README).",
        time_table(part),
    ]


def write_report(folder: Path, speed: Path | None = None) -> Path:
    """Read folder/results.json, write folder/figures and folder/report.md; returns the latter's path."""
    if not (folder / "results.json").exists():
        raise FileNotFoundError(f"{folder} has no results.json: no cell is finished, or it is no folder of a study")
    results = kept.read(folder / "results.json")
    parts_of(results["rows"])  # which refuses what cannot be shown, while the older figures are there
    shutil.rmtree(folder / "figures", ignore_errors=True)
    (folder / "figures").mkdir()
    figures = write_figures(folder / "figures", results["rows"])
    path = folder / "report.md"
    path.write_text(report(results, figures, _rates(speed)), encoding="utf-8")
    return path


def _rates(speed: Path | None) -> dict[str, Any] | None:
    """What speed.py has written, if it shall be shown."""
    return None if speed is None else json.loads(speed.read_text(encoding="utf-8"))


def publish(folder: Path, speed: Path | None = None, here: Path = HERE, front: Path = summary.FRONT) -> None:
    """Copy what `write_report` made into `here`, and the main numbers into its README and the repository's.

    ValueError, before anything is written, if a page has no place for them or there are none for the front page.
    """
    results = kept.read(folder / "results.json")
    summary.key_table(results["rows"])
    require_marks(here / "README.md", (BEGIN, END), summary.RATES)
    require_marks(front, summary.KEYS, summary.RATES)
    if folder.resolve() != here.resolve():
        kept.write(here / "results.json", results)
        shutil.copy(folder / "report.md", here / "report.md")
        shutil.rmtree(here / "figures", ignore_errors=True)
        shutil.copytree(folder / "figures", here / "figures")
    replace_between(here / "README.md", BEGIN, END, readme_block(results))
    summary.write(results["rows"], _rates(speed), front, here / "README.md")


def readme_block(results: dict[str, Any]) -> str:
    """What the study's README shows of the results, part by part."""
    blocks = []
    for key, part in parts_of(results["rows"]).items():
        told = "\n".join(f"- {line}" for line in [*marks(part), *findings(part)])
        runs = [row for row in part["rows"] if row["benchmark"] == "training"]
        seconds = sum(row["training_seconds"] + row["evaluation_seconds"] for row in runs)
        plain = [row for row in runs if "@" not in row["case"]] or runs
        head = (
            f"{budgets(plain)}; {seeds_told(runs)}; {results['env']['device']}, JAX {results['env']['jax']}. The "
            f"seconds of the {len(runs)} cells add to {seconds:.0f}; cells may have run at the same time."
        )
        shown = [head, passkey_table(part), *far_note(part), told]
        blocks += [f"### {title(key)}", *filter(None, shown)]
    return "\n" + "\n\n".join(blocks) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bam_h200.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where results.json is")
    parser.add_argument("--speed", type=Path, help="speed.py's results (default: those beside this script, if any)")
    parser.add_argument("--publish", action="store_true", help="copy everything beside this script")
    options = parser.parse_args(argv)
    beside = HERE / "speed.json"
    speed = options.speed or (beside if beside.exists() else None)
    if speed is not None and not speed.is_file():
        raise FileNotFoundError(f"--speed {speed}: there is no such file")
    print(write_report(options.folder, speed))
    if options.publish:
        publish(options.folder, speed)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
