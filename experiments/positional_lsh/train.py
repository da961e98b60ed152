"""Models trained under ALiBi, LSH, fixed blocks and nothing, on one budget, then read at up to twice the length:

    python -m experiments.positional_lsh.train --text books.u16.xz --held-out novels.u16.xz     3 minutes on an H200
    python -m experiments.positional_lsh.train … --resume                                       what is missing

Both files hold GPT-2 tokens, little-endian uint16 (.u16 or .u16.xz). training.json beside this script (or --results)
grows with every cell that is done; `run.py --report` makes report and figures of it.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully, file_to_write
from experiments.studies import read_kept, refuse_counts

HERE = Path(__file__).parent


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    import jax
    import numpy as np

    from bampath.evaluation.results import environment, write_results
    from experiments.bam_h200.text import read
    from experiments.positional_lsh import training

    facts: dict[str, Any] = {
        "plan": asdict(plan_of(options.changes)),
        "text": [options.text.name, options.held_out.name],
    }
    refuse_missing(options)
    plan, done = training.Plan(**facts["plan"]), finished(options.results, facts, options.resume)
    begin = time.monotonic()
    say = lambda what: print(f"[{time.monotonic() - begin:6.1f}] {what}", flush=True)
    left = [scheme for scheme in options.cells if scheme not in done]
    tokens = np.frombuffer(read(options.text), "<u2")
    held_out = training.held_out_rows(plan, np.frombuffer(read(options.held_out), "<u2"))
    programs = training.compile_all(plan, left, len(tokens), options.threads)
    say(f"{len(programs.train)} + {len(programs.read)} programs compiled")
    on_device = jax.device_put(tokens)
    for scheme in left:
        done[scheme] = training.run_cell(plan, scheme, programs, on_device, held_out)
        write_results(options.results, environment(), [row for rows in done.values() for row in rows], **facts)
        first, second = done[scheme][:2]
        losses = " ".join(f"{loss:.3f}" for loss in second["loss"])
        say(f"{scheme}: loss {first['loss']:.3f} after {first['seconds']} s; held-out {losses}")


def refuse_missing(options: argparse.Namespace) -> None:
    """Errors of files that are not there, or cannot be written, and of numbers that are none."""
    for name in ("text", "held_out"):
        if not getattr(options, name).is_file():
            raise FileNotFoundError(f"--{name.replace('_', '-')} {getattr(options, name)}: there is no such file")
    refuse_counts(options, "threads")
    file_to_write(options.results, "--results")


def finished(results: Path, facts: dict[str, Any], resume: bool) -> dict[str, list[Any]]:
    """Rows by cell that are in the results already. ValueError if they are not to be continued, or of another plan."""
    if not results.exists():
        return {}
    if not resume:
        raise ValueError(f"{results} is there already: continue it with --resume, or choose another --results")
    found = read_kept(results)
    if {name: found[name] for name in facts} != facts:
        raise ValueError(
            f"{results} has another plan or text: {found['plan']}, {found['text']}; choose another --results"
        )
    cells = dict.fromkeys(row["case"] for row in found["rows"])
    return {cell: [row for row in found["rows"] if row["case"] == cell] for cell in cells}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from experiments.positional_lsh.training import CELLS

    parser = argparse.ArgumentParser(
        prog="python -m experiments.positional_lsh.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes of the plan (training.Plan)")
    parser.add_argument("--text", type=Path, required=True, help="training text, GPT-2 tokens")
    parser.add_argument("--held-out", type=Path, required=True, help="text for perplexities, GPT-2 tokens")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="SPEC")
    parser.add_argument("--results", type=Path, default=HERE / "training.json", help="where the rows of all cells go")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are in --results")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="programs compiled at a time")
    return parser.parse_intermixed_args(argv)


def plan_of(changes: Sequence[str]) -> Any:
    """The plan with `key=value` changes. ValueError for a key or value that is wrong."""
    from experiments.positional_lsh.training import BLOCK, Plan

    plan = Plan()
    kinds = {field.name: type(getattr(plan, field.name)) for field in fields(Plan)}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in kinds:
            raise ValueError(f"{change!r}: {key!r} is not one of {', '.join(kinds)}")
        try:
            plan = replace(plan, **{key: kinds[key](value)})
        except ValueError:
            raise ValueError(f"{change!r}: {value!r} is no {kinds[key].__name__}") from None
    counts: tuple[tuple[str, int, int], ...] = (("steps", plan.steps, BLOCK), ("rows", plan.rows, plan.read_at_once))
    for name, count, unit in counts:
        if count < 1 or count % unit:
            raise ValueError(f"{name}={count} must be a multiple of {unit}")
    return plan


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:], stopped="stopped; --resume keeps the cells that are done")
