"""Train every scheme under one budget, then test it far beyond its training length:

    python -m experiments.extrapolation.run                      about 8 minutes on 2 CPU cores
    python -m experiments.extrapolation.run --size gpu --seeds 3
    python -m experiments.extrapolation.run --schemes rope bam+ssmax rope+ssmax train.steps=2000

Results, report and figures go to --out (a new folder under runs/ by default), checkpoints to its cells/. Finished cells
are kept: --resume continues the last study, or the one in --out, where it was stopped.
"""

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from bampath.config import Config
from experiments.extrapolation.config import SIZES, Study, slug
from experiments.studies import alone, read_kept, refuse_alike

HERE = Path(__file__).parent
FRONT = HERE.parent.parent / "README.md"
RUNS = Path("runs/extrapolation")
BEGIN, END = "<!-- results: written by --publish -->", "<!-- end of results -->"

# JAX comes in with the functions that need it, so that help and refusals come at once.


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    study = study_of(options)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for scheme in study.schemes:  # a wrong scheme or override fails here, before anything is made
        study.config(scheme, options.first_seed)
    refuse_alike((f"the scheme {scheme}", slug(scheme)) for scheme in study.schemes)
    out = folder_of(options)
    with alone(out):
        results = run_study(study, seeds, out)
    if options.publish:
        publish(out, results)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.extrapolation.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration of all cells")
    parser.add_argument("--size", choices=tuple(SIZES), default="cpu", help="which study (default cpu)")
    parser.add_argument("--schemes", nargs="+", metavar="SPEC", help="positional schemes (default: the study's)")
    parser.add_argument("--seeds", type=_positive, default=1, help="how many runs of each scheme (default 1)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--out", type=Path, help="folder of the study (default: a new one under runs/extrapolation)")
    parser.add_argument("--resume", action="store_true", help="continue the study in --out, or the last one")
    parser.add_argument("--publish", action="store_true", help="copy results, report and figures beside this script")
    options = parser.parse_args(argv)
    if options.schemes:  # key=value after --schemes belongs to the configuration
        is_override = [_is_override(word) for word in options.schemes]
        options.overrides += [word for word, is_one in zip(options.schemes, is_override, strict=True) if is_one]
        options.schemes = [word for word, is_one in zip(options.schemes, is_override, strict=True) if not is_one]
    return options


def study_of(options: argparse.Namespace) -> Study:
    """The study of the command line."""
    study = SIZES[options.size]
    return replace(
        study, schemes=tuple(options.schemes or study.schemes), overrides=(*study.overrides, *options.overrides)
    )


def folder_of(options: argparse.Namespace) -> Path:
    """Where the study goes. ValueError if that holds another run that is not to be continued."""
    if options.resume and options.out is None:
        earlier = sorted(path for path in RUNS.glob("*") if (path / "cells").is_dir())
        if not earlier:
            raise ValueError(f"there is no study under {RUNS} to resume")
        return earlier[-1]
    out = options.out or RUNS / time.strftime("%Y%m%d-%H%M%S")
    if not options.resume and (out / "cells").exists():
        raise ValueError(f"{out} holds a study already: continue it with --resume, or choose another --out")
    if not options.resume and (out / "checkpoints").exists():
        raise ValueError(f"{out} holds a run of experiments.train, not a study: choose another --out")
    return Path(out)


def run_study(study: Study, seeds: Sequence[int], out: Path) -> dict[str, Any]:
    """Run or read all cells, write results.json after each, then report.md and figures; returns the results.

    Their environment and seconds are those of the calls that ran cells, whoever reads them again.
    """
    from experiments.extrapolation.cells import Cell, is_finished
    from experiments.extrapolation.clock import Clock

    out = out.absolute()
    cells = [Cell(scheme, seed) for seed in seeds for scheme in study.schemes]
    with Clock(out, measures=not all(is_finished(cell, out) for cell in cells)) as clock:
        return _run_cells(study, cells, out, clock)


def _run_cells(study: Study, cells: Sequence[Any], out: Path, clock: Any) -> dict[str, Any]:
    from bampath.evaluation.results import write_results
    from experiments.extrapolation.cells import run_cell
    from experiments.extrapolation.display import Board
    from experiments.extrapolation.report import report, write_figures
    from experiments.extrapolation.tokenizer import make_tokenizer
    from experiments.tables import findings

    config = study.config(cells[0].scheme, cells[0].seed)
    env = _environment(out, clock.measures)
    print(f"{out}\n{env['device']}, {env['platform']}, Python {env['python']}, JAX {env['jax']}, {env['date']}")
    tokenizer = make_tokenizer(out / "tokenizer.json", config)
    rows: list[dict[str, Any]] = []
    facts = describe(study, config)
    with Board(study, config.model.train_length, cells) as board:
        for cell in cells:
            own = run_cell(study, cell, out, tokenizer, board.watch(cell))
            rows += own
            board.finish(cell, own)
            write_results(out / "results.json", env, rows, study={**facts, "total_seconds": clock.keep()})
    write_figures(out / "figures", {"study": facts, "rows": rows})
    results = {"env": env, "study": {**facts, "total_seconds": clock.keep()}, "rows": rows}
    write_results(out / "results.json", env, rows, study=results["study"])
    (out / "report.md").write_text(report(results), encoding="utf-8")
    print(*findings(results), sep="\n")
    print(f"report    {out / 'report.md'}\nfigures   {out / 'figures'}\ntotal     {clock.keep():.0f} s")
    learned = {row["case"] for row in rows if row["benchmark"] == "prior" and row["parameters"]}
    shown = next((cell for cell in cells if cell.scheme in learned), cells[0])
    print(f"inspect   python -m bampath.inspect {out / 'cells' / shown.slug / 'run'}")
    return results


def _environment(out: Path, measures: bool) -> dict[str, Any]:
    """That of this call, or of the one that ran the last cell if this one only reads them."""
    from bampath.evaluation.results import environment

    path = out / "results.json"
    return environment() if measures or not path.exists() else dict(read_kept(path)["env"])


def describe(study: Study, config: Config) -> dict[str, Any]:
    """What a reader of the results must know of the study."""
    model, data, train = config.model, config.data, config.train
    tokens = train.steps * data.batch_size * data.sequence_length
    return {
        "name": study.name,
        "schemes": list(study.schemes),
        "train_length": model.train_length,
        "overrides": list(study.overrides),
        "shape": f"{model.layers} layers, dim {model.dim}, {model.heads} heads, MLP {model.mlp_dim}, "
        f"vocabulary {model.vocab_size}",
        "budget": f"{train.steps} steps of {data.batch_size} × {data.sequence_length} tokens ({tokens:,} in all), "
        f"{data.retrieval.share:.0%} of the rows end in a passkey document",
        "text": data.source,
    }


def publish(out: Path, results: dict[str, Any]) -> None:
    """Copy results.json, report.md and figures beside this script, and write the numbers into both READMEs."""
    from experiments.tables import (
        findings,
        passkey_table,
        perplexity_table,
        replace_between,
        seed_table,
        time_table,
    )

    shutil.rmtree(HERE / "figures", ignore_errors=True)
    shutil.copytree(out / "figures", HERE / "figures")
    for name in ("results.json", "report.md"):
        shutil.copy(out / name, HERE / name)
    env, total = results["env"], results["study"]["total_seconds"]
    numbers = "\n\n".join(
        [
            f"Measured on {env['date'][:10]}: {env['device']}, {env['platform']}, JAX {env['jax']}, in {total:.0f} s.",
            passkey_table(results),
            "\n".join(f"- {line}" for line in findings(results)),
            *([seed_table(results)] if len({row["seed"] for row in results["rows"]}) > 1 else []),
            perplexity_table(results),
            time_table(results),
        ]
    )
    replace_between(HERE / "README.md", BEGIN, END, f"\n{numbers}\n")
    replace_between(FRONT, "<!-- passkey table -->", "<!-- end of passkey table -->", passkey_table(results))


def _is_override(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and "(" not in name


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:], stopped="stopped; --resume continues with what is finished")
