"""RULER on a checkpoint: `python -m bampath.evaluation.ruler CHECKPOINT --lengths 4096,8192 --samples 100`."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from bampath.command import fail_gracefully
from bampath.evaluation.materials import prose, word_lists
from bampath.evaluation.ruler.documents import read
from bampath.evaluation.ruler.tasks import LENGTHS, NEW_TOKENS, TASKS, Material, make, score_of
from bampath.evaluation.session import Session, command

NAME = "ruler"
SAMPLES = 500
__all__ = ["LENGTHS", "NAME", "SAMPLES", "add_options", "main", "missing", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ruler-tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--essay", default="sotu", help="prose of the essay haystacks (default: the default corpus)")
    parser.add_argument("--words", metavar="FOLDER", help="word lists (default: those of the package wonderwords)")
    parser.add_argument("--squad", metavar="FILE", help="qa_1: SQuAD v2.0's dev-v2.0.json")
    parser.add_argument("--hotpot", metavar="FILE", help="qa_2: HotpotQA's hotpot_dev_distractor_v1.json")


def missing(args: argparse.Namespace) -> str | None:
    """Word lists are needed by every task that has words; qa_1 and qa_2 need their files when they are asked for."""
    for task, path in (("qa_1", args.squad), ("qa_2", args.hotpot)):
        if args.ruler_tasks and task in args.ruler_tasks and not path:
            return f"needs --{'squad' if task == 'qa_1' else 'hotpot'} FILE for {task}"
    try:
        word_lists(args.words)
    except FileNotFoundError as error:
        return str(error)
    return None


def run(session: Session, args: argparse.Namespace) -> None:
    material = Material(
        word_lists(args.words),
        prose(args.essay),
        read(args.squad) if args.squad else None,
        read(args.hotpot) if args.hotpot else None,
    )
    absent = {task for task, library in (("qa_1", material.squad), ("qa_2", material.hotpot)) if library is None}
    for task in sorted(absent) if args.ruler_tasks is None else ():
        session.skipped[f"ruler {task}"] = f"needs --{'squad' if task == 'qa_1' else 'hotpot'} FILE"
    for task in args.ruler_tasks or [task for task in TASKS if task not in absent]:
        parts: list[Any] = [material.words, material.essay.documents, material.squad, material.hotpot]
        for length in session.lengths:
            build = partial(make, task, length, session.samples, session.tokenizer, material)
            with session.unless_unfit(f"{NAME} {task}", length):
                questions = session.questions(f"{NAME}-{task}", length, parts, build)
                facts = (length, NAME, task, material.labels(task))
                session.ask(questions, NEW_TOKENS[task], score_of(task), *facts, budget=length)


def main(argv: Sequence[str] | None = None) -> None:
    from bampath.evaluation.ruler import __main__ as benchmark

    command(benchmark, __doc__, argv)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
