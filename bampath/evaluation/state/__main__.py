"""State tracking on a checkpoint: `python -m bampath.evaluation.state CHECKPOINT`.

A checkpoint of experiments.state_tracking is tested on what it was trained on. Any other one is a model of text: it
reads flip-flops (--state-task fflm) as text, never having been trained on them, and the likelier bit counts.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from bampath.command import fail_gracefully
from bampath.data import Tokenizer
from bampath.evaluation.session import Session, command
from bampath.evaluation.state.flipflop import SYMBOLS, FlipFlop
from bampath.evaluation.state.score import score
from bampath.evaluation.state.tasks import StateTask, parse_task, spec_of

NAME = "state"
LENGTHS = "1x"  # rows have the task's own length
SAMPLES = 1000
PREFIX = "state:"  # of data.source in a checkpoint that was trained on a task


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-task", metavar="SPEC", help="such as fflm(pairs=64) (default: what it was trained on)")


def missing(args: argparse.Namespace) -> str | None:
    return None


def run(session: Session, args: argparse.Namespace) -> None:
    source = session.data.source
    trained = source.startswith(PREFIX)
    task = parse_task(args.state_task or (source.removeprefix(PREFIX) if trained else "fflm"))
    if trained and task.vocab_size != parse_task(source.removeprefix(PREFIX)).vocab_size:
        raise ValueError(
            f"--state-task {spec_of(task)} has other symbols than {source}, which the model was trained on"
        )
    ids = None if trained else text_ids(task, session.tokenizer)
    for test, asked in task.tests().items():
        found = score(
            session.reader, asked, test, session.samples, seed=session.seed, batch_tokens=session.batch_tokens, ids=ids
        )
        session.add(found.row(trained=trained))


def text_ids(task: StateTask, tokenizer: Tokenizer) -> np.ndarray:
    """The token of each symbol. ValueError if the task has no text, or a symbol is more than one token."""
    if not isinstance(task, FlipFlop):
        raise ValueError(f"a model of text can only be asked fflm, not {spec_of(task)}: its symbols are not text")
    tokens = [tokenizer.encode(symbol) for symbol in SYMBOLS]
    if any(len(ids) != 1 for ids in tokens):
        raise ValueError(f"the tokenizer {tokenizer.name} does not make one token of each of {', '.join(SYMBOLS)}")
    return np.array([ids[0] for ids in tokens])


def main(argv: Sequence[str] | None = None) -> None:
    from bampath.evaluation.state import __main__ as benchmark

    command(benchmark, __doc__, argv)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
