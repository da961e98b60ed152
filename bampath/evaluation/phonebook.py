"""PhoneBook (Jelassi et al., arXiv 2402.01032): look a number up. `python -m bampath.evaluation.phonebook CHECKPOINT`.

Lines `First Last: dddddddddd`, two of them repeated as examples, then the name of a third; the answer is its number.
Written anew to the protocol of sjelassi/transformers_ssm_copy; how many lines fill a length is not published, so the
book is as long as the length allows.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bampath.command import fail_gracefully
from bampath.data import Tokenizer
from bampath.evaluation.answers import equals_any
from bampath.evaluation.materials import Names, names
from bampath.evaluation.questions import Question, count, draws, largest, within
from bampath.evaluation.session import Session, command

NAME = "phonebook"
LENGTHS = "2048,4096,8192"
SAMPLES = 96  # three batches of 32
NEW_TOKENS = 50
LEAST = 3  # entries: two examples and the one that is asked for


def make(
    length: int,
    samples: int,
    tokenizer: Tokenizer,
    people: Names,
    *,
    entries: int = 0,
    seed: int = 42,
    reserve: int = 0,
) -> list[Question]:
    """Prompts of a length in tokens, answer included, or with `entries` lines each (then `length` is not looked at).

    Pure functions of the arguments. Names may occur twice, as in the original. DoesNotFit if the length is too short.
    """
    if entries and entries < LEAST:
        raise ValueError(f"entries={entries} must be 0 (as many as fit) or at least {LEAST}")
    build = lambda index, size: _question(size, draws(seed, NAME, entries or length, index), people)
    if entries:
        return [build(index, entries) for index in range(samples)]
    budget, tokens, what = length - NEW_TOKENS - reserve, partial(count, tokenizer), f"phonebook at {length} tokens"
    size = largest(lambda n: tokens(build(0, n).prompt) <= budget, LEAST, what)
    return [within(partial(build, i), tokens, budget, size, LEAST, what) for i in range(samples)]


def _question(size: int, draw: random.Random, people: Names) -> Question:
    """A book of `size` lines, two solved lookups, one to solve; the three entries are different lines."""
    numbers = np.random.default_rng(draw.getrandbits(64))
    first = numbers.choice(people.first, size, p=people.first_share)
    last = numbers.choice(people.last, size, p=people.last_share)
    phone = [str(draw.randint(6, 9)) + "".join(draw.choices("0123456789", k=9)) for _ in range(size)]
    lines = [f"{a} {b}: {number}" for a, b, number in zip(first, last, phone, strict=True)]
    one, two, asked = draw.sample(range(size), 3)
    prompt = "\n".join(lines) + f"\n\n{lines[one]}\n{lines[two]}\n\n{first[asked]} {last[asked]}:"
    return Question(prompt, (phone[asked],), asked / max(1, size - 1), (("entries", size),))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", metavar="FOLDER", help="census name lists (default: those of the package names)")
    parser.add_argument(
        "--entries", type=int, default=0, help="lines of the book (default: as many as the length holds)"
    )


def missing(args: argparse.Namespace) -> str | None:
    try:
        names(args.names)
    except FileNotFoundError as error:
        return str(error)
    return None


def run(session: Session, args: argparse.Namespace) -> None:
    people = names(args.names)
    for length in (0,) if args.entries else session.lengths:
        build = partial(make, length, session.samples, session.tokenizer, people, entries=args.entries)
        material = [args.entries, people.first, people.last, people.first_share.tolist(), people.last_share.tolist()]
        budget = None if args.entries else length
        with session.unless_unfit(NAME, length):
            questions = session.questions(NAME, length, material, build)
            labels = {"names": people.label, "entries": max(dict(q.facts)["entries"] for q in questions)}
            session.ask(questions, NEW_TOKENS, equals_any, length, NAME, NAME, labels, budget=budget, until="\n")


_SELF: Any = sys.modules[__name__]


def main(argv: Sequence[str] | None = None) -> None:
    command(_SELF, __doc__, argv)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
