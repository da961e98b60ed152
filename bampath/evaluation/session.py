"""One checkpoint under several benchmarks: what they share, and the rows that grow while they run.

A benchmark is an object or a module with NAME, LENGTHS and SAMPLES (its defaults), add_options(parser), missing(args)
(why it cannot run: local files that were not named, or None) and run(session, args).
"""

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bampath.data import DataConfig, Tokenizer
from bampath.evaluation.answers import Answerer, ModelAnswerer, Score, ask, row, speed
from bampath.evaluation.command import add_checkpoint_options, check_options, load_reader, parse_lengths
from bampath.evaluation.questions import DoesNotFit, Question, cache_root, kept
from bampath.evaluation.reader import Reader
from bampath.evaluation.report import show, write
from bampath.evaluation.results import environment

BATCH_TOKENS = 32_768


class Benchmark(Protocol):
    """See the head of this file."""

    NAME: str
    LENGTHS: str
    SAMPLES: int

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def missing(self, args: argparse.Namespace) -> str | None: ...

    def run(self, session: "Session", args: argparse.Namespace) -> None: ...


@dataclass
class Session:
    """A model and what is asked of it.

    lengths: in tokens, answers included; samples: per task and length; bos: whether prompts start with a BOS; data:
    what the model was trained on; facts: of the checkpoint, in every row; out: where results go as JSON, with Markdown
    and figures beside it; rows grow while benchmarks run, skipped says which did not and why, unfit has those among
    them for which a length was none.
    """

    answerer: Answerer
    reader: Reader
    tokenizer: Tokenizer
    lengths: Sequence[int] = ()
    samples: int = 20
    seed: int = 42
    bos: bool = False
    train_length: int = 512
    data: DataConfig = field(default_factory=DataConfig)
    batch_tokens: int = BATCH_TOKENS
    cache: Path = field(default_factory=cache_root)
    facts: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None
    say: Callable[[str], None] = print
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    unfit: list[DoesNotFit] = field(default_factory=list)

    @property
    def reserve(self) -> int:
        """Tokens of a length that are not the prompt's or the answer's: the BOS."""
        return int(self.bos)

    def questions(
        self, task: str, length: int, material: Sequence[Any], build: Callable[..., Sequence[Question]]
    ) -> list[Question]:
        """What build(seed=…, reserve=…) makes, kept on disk under everything that it depends on: material is hashed."""
        print_of = hashlib.blake2b(digest_size=16)
        for item in material:
            print_of.update(repr(item).encode())
        identity = {
            "task": task,
            "length": length,
            "samples": self.samples,
            "seed": self.seed,
            "reserve": self.reserve,
            "tokenizer": self.tokenizer.fingerprint,
            "material": print_of.hexdigest(),
        }
        return kept(self.cache, identity, lambda: build(seed=self.seed, reserve=self.reserve))

    def ask(
        self,
        questions: Sequence[Question],
        new_tokens: int,
        score: Score,
        length: int,
        benchmark: str,
        task: str,
        labels: dict[str, Any],
        *,
        budget: int | None,
        until: str | None = None,
    ) -> None:
        """Ask, score, and add the row of one task and length; see `answers.ask`."""
        answered, seconds = ask(
            self.answerer, self.tokenizer, questions, new_tokens, score, budget=budget, bos=self.bos, until=until
        )
        facts = {"benchmark": benchmark, "task": task, "length": length, **labels}
        self.add(row(answered, **facts, **speed(answered, seconds)))

    def add(self, *rows: dict[str, Any]) -> None:
        """Keep rows, show them, and write what there is so far."""
        for new in rows:
            self.rows.append({**self.facts, **new})
            self.say(show(new))
        self.write()

    def skip(self, name: str, reason: str) -> None:
        """Say what is not run, and why; results name it too."""
        self.skipped[name] = reason
        self.say(f"{name}: not run, {reason}")

    @contextmanager
    def unless_unfit(self, name: str, length: int) -> Iterator[None]:
        """Ask within this: where `name` has nothing to ask at this length it is skipped, and all else runs."""
        try:
            yield
        except DoesNotFit as error:
            self.unfit.append(error)
            self.skip(f"{name} at {length} tokens", error.reason)

    def write(self) -> None:
        """Write what there is so far, if it shall be written."""
        if self.out is not None:
            write(self.out, environment(), self.rows, self.train_length, self.skipped)


def add_session_options(parser: argparse.ArgumentParser, samples: str) -> None:
    """The arguments that all benchmarks share."""
    add_checkpoint_options(parser)
    parser.add_argument("--lengths", help="tokens per prompt, answer included, or times the training length: 4096,2x")
    parser.add_argument("--samples", type=int, help=f"per task and length ({samples})")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--bos", choices=("auto", "yes", "no"), default="auto", help="a BOS before prompts (auto: as in training)"
    )
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens read together (%(default)s)")
    parser.add_argument("--cache", metavar="FOLDER", help="where prompts are kept (default: in ~/.cache/bampath)")


def open_session(args: argparse.Namespace) -> Session:
    """The checkpoint of parsed arguments, ready to be asked. ValueError at once for options that cannot be."""
    check_options(args, "batch_tokens", samples=0, seed=0)
    if args.lengths:
        parse_lengths(args.lengths, 1)
    loaded, reader = load_reader(args)
    tokenizer, model = loaded.tokenizer, loaded.config.model
    bos = args.bos == "yes" or (args.bos == "auto" and loaded.config.data.add_bos and tokenizer.bos_id is not None)
    if bos and tokenizer.bos_id is None:
        raise ValueError(f"--bos yes, but the tokenizer {tokenizer.name} has no BOS token")
    print(f"{loaded.path}  {model.position}, trained at {model.train_length} tokens, step {loaded.step}")
    answerer = ModelAnswerer(
        loaded.model,
        loaded.params,
        stop_id=tokenizer.eos_id,
        chunk=args.chunk,
        batch_tokens=args.batch_tokens,
        vocab_size=min(tokenizer.vocab_size, model.vocab_size),
    )
    return Session(
        answerer,
        reader,
        tokenizer,
        seed=args.seed,
        bos=bos,
        train_length=model.train_length,
        data=loaded.config.data,
        batch_tokens=args.batch_tokens,
        cache=cache_root(args.cache),
        facts={"case": model.position, "checkpoint": str(loaded.path), "step": loaded.step},
        out=Path(args.out) if args.out else None,
        say=lambda text: print(text, flush=True),
    )


def run_benchmarks(session: Session, benchmarks: Sequence[Benchmark], args: argparse.Namespace) -> None:
    """Run benchmarks one after the other. Those that miss local files, and lengths at which one has nothing to ask, are
    named with the reason, never quietly left; DoesNotFit if nothing is left for want of length."""
    for benchmark in benchmarks:
        reason = benchmark.missing(args)
        if reason is not None:
            session.skip(benchmark.NAME, reason)
            continue
        session.lengths = parse_lengths(args.lengths or benchmark.LENGTHS, session.train_length)
        session.samples = benchmark.SAMPLES if args.samples is None else args.samples
        if session.samples < min(1, benchmark.SAMPLES):
            raise ValueError(f"--samples {session.samples} must be at least {min(1, benchmark.SAMPLES)}")
        start = time.monotonic()
        benchmark.run(session, args)
        session.say(f"{benchmark.NAME}: {time.monotonic() - start:.0f} s")
    if session.rows:
        session.write()  # with what was skipped after the last row
    elif session.unfit:
        raise session.unfit[0]


def command(benchmark: Benchmark, description: str | None, argv: Sequence[str] | None) -> None:
    """The command of one benchmark. ValueError if local files that it needs are not named."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bampath.evaluation.{benchmark.NAME}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_session_options(parser, f"default {benchmark.SAMPLES}")
    benchmark.add_options(parser)
    args = parser.parse_args(argv)
    reason = benchmark.missing(args)
    if reason is not None:
        raise ValueError(f"{benchmark.NAME}: {reason}")
    run_benchmarks(open_session(args), [benchmark], args)
