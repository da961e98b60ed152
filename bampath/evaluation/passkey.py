"""Passkey retrieval: `python -m bampath.evaluation.passkey CHECKPOINT`.

The protocol of BAM's evaluation (arXiv 2505.22842, figure 3; eval_utils.py of the authors' code): a task sentence,
noise sentences with "The pass key is 12345. …" between two of them, and a question; every piece is tokenised alone and
without special tokens, so a prompt of nominal length L has at most L tokens. One teacher-forced forward over prompt and
key decides: a sample counts if the most likely token is right at every digit, which is what greedy decoding would give.

Unlike the original, the samples are a pure function of (task, tokenizer, length): they do not depend on which other
lengths are asked for, and the same ones are put to every model.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from bampath.command import fail_gracefully
from bampath.data import WORDINGS, Tokenizer
from bampath.evaluation.command import add_checkpoint_options, check_options, load_reader, parse_lengths
from bampath.evaluation.reader import Reader
from bampath.evaluation.results import environment, write_results
from bampath.intervals import Interval, wilson

Depth = Literal["equidistant", "random", "beginning", "end"]
BATCH_TOKENS = 16_384
WIDTH = 1024  # prompts are padded to a multiple of this: lengths that share a shape are compiled once

# Lengths of the paper's evaluation script (its figure 3 shows 512 … 32768).
PAPER_LENGTHS = (
    *(0, 128, 256, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 2048, 3072, 4096, 6144),
    *range(8192, 32768 + 1, 2048),
)


@dataclass(frozen=True)
class PasskeyTask:
    """What is asked. The defaults are the paper's.

    samples: prompts per length; depth: noise sentences before the key, "equidistant" from none to all of them,
    "random", "beginning" or "end"; digits: how many are asked for; prefix_digits: digits of the key that the prompt
    gives away (the authors' evaluation script: 1); bos: whether a BOS stands in front (the authors': no); seed: of keys
    and random depths.
    """

    samples: int = 20
    depth: Depth = "equidistant"
    digits: int = 5
    prefix_digits: int = 0
    bos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("samples", 1), ("digits", 1), ("prefix_digits", 0), ("seed", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        if self.digits + self.prefix_digits > 18:
            raise ValueError(f"digits={self.digits} and prefix_digits={self.prefix_digits} must be at most 18 together")
        if self.depth not in get_args(Depth):
            raise ValueError(f"depth={self.depth!r} is not one of {', '.join(get_args(Depth))}")


@dataclass(frozen=True)
class Prompt:
    """One sample. tokens: int32, prompt and key; of these the last `scored` are asked for. The key stands behind `slot`
    of `slots` noise sentences."""

    tokens: np.ndarray
    scored: int
    prompt_tokens: int
    key: str
    slot: int
    slots: int

    @property
    def depth(self) -> float:
        """Share of the noise that stands before the key; 0 without noise."""
        return self.slot / self.slots if self.slots else 0.0


@dataclass(frozen=True)
class Sample:
    """How one prompt went: scored tokens, how many of them were right, and the log-probability of all of them."""

    prompt: Prompt
    right: int
    log_probability: float

    @property
    def correct(self) -> bool:
        return self.right == self.prompt.scored


@dataclass(frozen=True)
class PasskeyResult:
    """All samples of one nominal length."""

    length: int
    samples: tuple[Sample, ...]

    @property
    def correct(self) -> int:
        return sum(sample.correct for sample in self.samples)

    @property
    def accuracy(self) -> float:
        return self.correct / len(self.samples)

    @property
    def interval(self) -> Interval:
        """Wilson's 95 % interval of the accuracy."""
        return wilson(self.correct, len(self.samples))

    @property
    def token_accuracy(self) -> float:
        """Share of the scored tokens that are right."""
        return sum(s.right for s in self.samples) / sum(s.prompt.scored for s in self.samples)

    def row(self, **more: Any) -> dict[str, Any]:
        """The result as plain values, `more` first, one entry of "depths" per sample."""
        return {
            **more,
            "benchmark": "passkey",
            "length": self.length,
            "tokens": max(s.prompt.prompt_tokens for s in self.samples),
            "samples": len(self.samples),
            "correct": self.correct,
            "accuracy": self.accuracy,
            "lower": self.interval.lower,
            "upper": self.interval.upper,
            "token_accuracy": self.token_accuracy,
            "answer_loss": -sum(s.log_probability for s in self.samples) / sum(s.prompt.scored for s in self.samples),
            "depths": [
                {
                    "depth": round(s.prompt.depth, 4),
                    "key": s.prompt.key,
                    "correct": s.correct,
                    "right": s.right,
                    "scored": s.prompt.scored,
                }
                for s in self.samples
            ],
        }


class Prompts:
    """Builds the prompts of one task with one tokenizer.

    ValueError if the task asks for a BOS that the tokenizer lacks, or if a token would straddle the digits that are
    given and those that are asked for.
    """

    def __init__(self, task: PasskeyTask, tokenizer: Tokenizer) -> None:
        if task.bos and tokenizer.bos_id is None:
            raise ValueError(f"bos=True, but the tokenizer {tokenizer.name} has no BOS token")
        self.task, self.tokenizer = task, tokenizer
        self._encode = lru_cache(64)(tokenizer.encode)

    def make(self, length: int) -> list[Prompt]:
        """The samples of a nominal length; all pieces are kept even where `length` is too short for them."""
        if length < 0:
            raise ValueError(f"length={length} must not be negative")
        return [self._sample(length, index) for index in range(self.task.samples)]

    def _sample(self, length: int, index: int) -> Prompt:
        task, wording = self.task, WORDINGS["passkey"]
        draw = np.random.default_rng([task.seed, length, index])
        total = task.digits + task.prefix_digits
        key = str(draw.integers(10 ** (total - 1) if total > 1 else 0, 10**total))
        bos = [self.tokenizer.bos_id] if task.bos and self.tokenizer.bos_id is not None else []
        head = bos + self._encode(wording.task)
        noise, query = self._encode(wording.filler), self._encode(wording.question)
        info, answer = self.tokenizer.encode(wording.needle.format(key=key)), self.tokenizer.encode(f" {key}")
        slots = max(0, (length - len(head) - len(info) - len(query)) // len(noise))
        slot = self._slot(slots, index, draw)
        prompt = head + noise * slot + info + noise * (slots - slot) + query
        return Prompt(np.asarray(prompt + answer, np.int32), self._scored(answer, key), len(prompt), key, slot, slots)

    def _slot(self, slots: int, index: int, draw: np.random.Generator) -> int:
        last = max(1, self.task.samples - 1)
        return {
            "equidistant": slots * index // last,  # the whole part of index equal steps from 0 to slots
            "random": int(draw.integers(0, slots + 1)),
            "beginning": 0,
            "end": slots,
        }[self.task.depth]

    def _scored(self, answer: list[int], key: str) -> int:
        """How many of the last tokens of the answer hold the digits that are asked for."""
        for count in range(1, len(answer) + 1):
            held = sum(c.isdigit() for c in self.tokenizer.decode(answer[-count:]))
            if held == self.task.digits:
                return count
            if held > self.task.digits:
                raise ValueError(
                    f"the tokenizer {self.tokenizer.name} puts given and asked digits of the key {key} into one token: "
                    f"prefix_digits={self.task.prefix_digits} cannot be used with it"
                )
        raise ValueError(f"the tokenizer {self.tokenizer.name} does not keep the digits of {key!r}")


def evaluate(
    reader: Reader,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    task: PasskeyTask = PasskeyTask(),  # noqa: B008 (frozen)
    *,
    batch_tokens: int = BATCH_TOKENS,
    patience: int = 0,
    on_result: Callable[[PasskeyResult], None] | None = None,
) -> list[PasskeyResult]:
    """Ask for the key at each of `lengths`, in the order given.

    batch_tokens: tokens of the prompts that are read together (at least one prompt; the result does not depend on it).
    patience: stop after so many lengths in a row without one right answer; 0 never stops. on_result sees each result
    when it is there.
    """
    if patience < 0 or batch_tokens < 1:
        raise ValueError(f"patience={patience} must be at least 0 and batch_tokens={batch_tokens} at least 1")
    prompts, results, failures = Prompts(task, tokenizer), [], 0
    for length in lengths:
        result = PasskeyResult(length, tuple(answer(reader, prompts.make(length), batch_tokens)))
        results.append(result)
        if on_result is not None:
            on_result(result)
        failures = 0 if result.correct else failures + 1
        if patience and failures == patience:
            break
    return results


def answer(reader: Reader, prompts: Sequence[Prompt], batch_tokens: int = BATCH_TOKENS) -> list[Sample]:
    """Put prompts to a model, several at a time, padded on the right (which no place before can see)."""
    width = -(-(max(len(p.tokens) for p in prompts) - 1) // WIDTH) * WIDTH
    scored = max(p.scored for p in prompts)
    size = min(len(prompts), max(1, batch_tokens // width))
    samples: list[Sample] = []
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        filled = [*batch, *[batch[-1]] * (size - len(batch))]  # one shape for all batches: compiled once
        tokens = np.zeros((size, width), np.int32)
        places = np.zeros((size, scored), np.int32)
        for row, prompt in enumerate(filled):
            count = len(prompt.tokens) - 1
            tokens[row, :count] = prompt.tokens[:-1]
            places[row] = np.maximum(np.arange(count - scored, count), 0)
        logits = reader.logits_at(tokens, places).astype(np.float64)
        samples += [_judge(prompt, logits[row]) for row, prompt in enumerate(batch)]
    return samples


def _judge(prompt: Prompt, logits: np.ndarray) -> Sample:
    """logits [n, V] of the last n tokens, n >= prompt.scored."""
    logits, wanted = logits[-prompt.scored :], prompt.tokens[-prompt.scored :]
    top = logits.max(axis=-1)
    log_z = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
    log_p = logits[np.arange(prompt.scored), wanted] - log_z
    return Sample(prompt, int((logits.argmax(axis=-1) == wanted).sum()), float(log_p.sum()))


def line(result: PasskeyResult, train_length: int) -> str:
    """One line for a person: length, hits, interval, and a mark per depth from the beginning to the end. Where even the
    shortest prompt is longer than what was asked for, its length is shown."""
    marks = "".join("■" if sample.correct else "·" for sample in result.samples)
    low, high = result.interval
    longest = max(sample.prompt.prompt_tokens for sample in result.samples)
    shown = max(longest, result.length)
    times = f"{shown / train_length:{'.3g' if shown > result.length else 'g'}}x"
    longer = f"  (asked for {result.length:,}: no prompt is that short)" if shown > result.length else ""
    return (
        f"{shown:>8,} {times:>6}  {result.correct:>3}/{len(result.samples)}  {result.accuracy:6.1%} "
        f"[{low:4.0%}, {high:4.0%}]  digits {result.token_accuracy:6.1%}  {marks}{longer}"
    )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bampath.evaluation.passkey", description="Find a key in noise, at any length and depth."
    )
    add_checkpoint_options(p)
    p.add_argument(
        "--lengths",
        default="1x,2x,4x,8x,16x,32x,64x",
        help="prompt lengths in tokens or as multiples of the training length (default %(default)s), or 'paper'",
    )
    p.add_argument("--samples", type=int, default=20, help="prompts per length (default 20)")
    p.add_argument("--depth", choices=get_args(Depth), default="equidistant", help="where the key stands")
    p.add_argument("--digits", type=int, default=5, help="digits asked for (default 5)")
    p.add_argument("--prefix-digits", type=int, default=0, help="further digits that the prompt gives (default 0)")
    p.add_argument("--bos", action="store_true", help="start prompts with a BOS (the protocol does not)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--patience", type=int, default=0, help="stop after so many lengths without a hit (default: never)")
    p.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens read together (default %(default)s)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_options(args, "samples", "digits", "batch_tokens", prefix_digits=0, seed=0, patience=0)
    task = PasskeyTask(args.samples, args.depth, args.digits, args.prefix_digits, args.bos, args.seed)
    if args.lengths != "paper":
        parse_lengths(args.lengths, 1)
    loaded, reader = load_reader(args)
    trained = loaded.config.model.train_length
    lengths = PAPER_LENGTHS if args.lengths == "paper" else parse_lengths(args.lengths, trained)
    print(f"{loaded.path}  {loaded.config.model.position}, trained at {trained} tokens, step {loaded.step}")
    results = evaluate(
        reader,
        loaded.tokenizer,
        lengths,
        task,
        batch_tokens=args.batch_tokens,
        patience=args.patience,
        on_result=lambda result: print(line(result, trained), flush=True),
    )
    if args.out:
        facts = {"case": loaded.config.model.position, "checkpoint": str(loaded.path), "step": loaded.step}
        write_results(Path(args.out), environment(), [result.row(**facts) for result in results])


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
