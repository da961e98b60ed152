"""Which benchmarks belong together, and passkey and perplexity by position as members of a suite."""

import argparse
from importlib import import_module
from typing import Any

from bampath.data import load_corpus
from bampath.evaluation import passkey, perplexity
from bampath.evaluation.session import Benchmark, Session


class Passkey:
    """`bampath.evaluation.passkey` with its own defaults. Lengths are the prompt's, the answer comes on top, there is
    no BOS unless --bos yes asks for one: both as in the protocol."""

    NAME = "passkey"
    LENGTHS = "1x,2x,4x,8x,16x,32x,64x"
    SAMPLES = 20

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        pass

    def missing(self, args: argparse.Namespace) -> str | None:
        return None

    def run(self, session: Session, args: argparse.Namespace) -> None:
        passkey.evaluate(
            session.reader,
            session.tokenizer,
            session.lengths,
            passkey.PasskeyTask(samples=session.samples, bos=args.bos == "yes", seed=session.seed),
            batch_tokens=session.batch_tokens,
            on_result=lambda result: session.add(result.row()),
        )


class Perplexity:
    """`bampath.evaluation.perplexity` on rows of the longest length that the text has any of, which have all shorter
    ones in them; samples: how many rows at most."""

    NAME = "perplexity"
    LENGTHS = "16x"
    SAMPLES = 64

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--text", help="perplexity: another text than the held-out part of the training text")

    def missing(self, args: argparse.Namespace) -> str | None:
        return None

    def run(self, session: Session, args: argparse.Namespace) -> None:
        corpus = load_corpus(perplexity.held_out(session.data, args.text), "validation", session.tokenizer)
        for length in sorted(session.lengths, reverse=True):
            with session.unless_unfit(self.NAME, length):
                rows = perplexity.rows_of(corpus, length, limit=session.samples)
                window = min(session.train_length, length)
                result = perplexity.loss_by_position(session.reader, rows, window, batch_tokens=session.batch_tokens)
                session.add(*result.rows(text=corpus.info["source"]))
                return


def _module(name: str) -> Any:
    return import_module(f"bampath.evaluation.{name}")


def suite(name: str) -> list[Benchmark]:
    """The benchmarks of "long", "short" or "state"."""
    if name == "long":
        modules = ("ruler.__main__", "babilong", "phonebook", "longbench2", "longbench_e")
        return [Passkey(), *map(_module, modules), Perplexity()]
    if name not in ("short", "state"):
        raise ValueError(f"suite={name!r} is not one of long, short, state")
    return [_module("short" if name == "short" else "state.__main__")]
