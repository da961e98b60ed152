"""How good is ALiBi made of random blocks? Masks, outputs and block sizes against theory:

    python -m experiments.positional_lsh.run                     about 5 minutes on 2 CPU cores
    python -m experiments.positional_lsh.run --checkpoint RUN    attention inputs from this model (its scheme: alibi)
    python -m experiments.positional_lsh.run --report            report and figures alone, from the results there are

Writes results.json, report.md and figures to --out (default: beside this script). The report also shows the times of
kernels/lsh/results.json and the trained models of training.json (`train.py`) in --out.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully, file_to_write
from experiments.studies import read_kept

HERE = Path(__file__).parent
SPEED = HERE.parents[1] / "kernels" / "lsh" / "results.json"
STEPS = 400  # of the small ALiBi model that gives attention inputs, if no checkpoint does
LENGTHS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.positional_lsh.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, help="a run whose scheme is alibi (default: train a small one)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of masks and outputs (default 1024)")
    parser.add_argument("--seeds", type=int, default=5, help="draws of each setting (default 5)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args(argv)
    for name, least in (("length", 2), ("seeds", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least {least}")
    file_to_write(options.out / "results.json", "--out")
    if not options.report:
        measure(options)
    from experiments.positional_lsh.report import write_report

    read = lambda path: read_kept(path) if path.exists() else None
    results = read(options.out / "results.json")
    if results is None:
        raise ValueError(f"{options.out} has no results.json: run without --report first")
    print(write_report(options.out, results, read(SPEED), read(options.out / "training.json")))


def measure(options: argparse.Namespace) -> None:
    """Masks, blocks and outputs: results.json."""
    from bampath.evaluation.results import environment, write_results
    from experiments.positional_lsh.convergence import Plan, block_rows, mask_rows

    if options.checkpoint:
        refuse_other(options.checkpoint)
    plan = Plan(length=options.length, seeds=options.seeds)
    rows = list(mask_rows(plan))
    print(f"masks: {len(rows)} rows")
    rows += block_rows(LENGTHS, 32.0, 10, plan.delta, 20)
    with tempfile.TemporaryDirectory() as folder:
        rows += outputs(options.checkpoint or train(Path(folder) / "alibi"), plan)
    facts = {"length": plan.length, "seeds": plan.seeds, "delta": plan.delta, "steps": STEPS}
    write_results(options.out / "results.json", environment(), rows, study=facts)


def refuse_other(run: Path) -> None:
    """ValueError for a checkpoint that is not there or not of ALiBi, before anything is measured."""
    from bampath.checkpoint import describe

    position = describe(run).config["model"]["position"]
    if position != "alibi":
        raise ValueError(
            f"--checkpoint {run} is a model of {position!r}; attention inputs of an alibi model are wanted"
        )


def train(run_dir: Path) -> Path:
    """A small ALiBi model on the default corpus, one to two minutes."""
    from bampath.config import get
    from bampath.train import fit

    changes = (
        "position=alibi",
        "model.heads=8",
        f"train.steps={STEPS}",
        "train.log_every=100",
        "train.tensorboard=false",
    )
    fit(get("tiny", *changes), run_dir)
    return run_dir


def outputs(run: Path, plan: Any) -> list[dict[str, Any]]:
    """Errors of attention outputs on the model's own q, k, v for held-out text, layer by layer."""
    import jax.numpy as jnp

    from bampath.attention import Attention
    from bampath.data import load_corpus
    from bampath.load import load
    from bampath.positions.alibi import alibi_slopes
    from experiments.positional_lsh.convergence import output_rows

    loaded = load(run)
    corpus = load_corpus(loaded.config.data, "validation", loaded.tokenizer)
    tokens = jnp.asarray(corpus.tokens[: plan.length], jnp.int32)[None]
    projections = lambda module, method: isinstance(module, Attention) and method == "_project"
    _, state = loaded.model.apply(
        {"params": loaded.params}, tokens, capture_intermediates=projections, mutable=["intermediates"]
    )
    rows: list[dict[str, Any]] = []
    for layer in range(loaded.config.model.layers):
        q, k, v = state["intermediates"][f"layer_{layer}"]["attention"]["_project"][0]
        rows += output_rows(q, k, v, plan, layer, alibi_slopes(loaded.config.model.heads))
        print(f"outputs of layer {layer}")
    return rows


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
