"""Asking questions: generated answers in batches, one scored row per task and length."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bampath.data import Tokenizer
from bampath.evaluation.questions import Question
from bampath.evaluation.reader import CHUNK
from bampath.generate import generate
from bampath.intervals import wilson
from bampath.model import LM

BATCH_TOKENS = 32_768
WIDTH = 256  # prompts are padded to a multiple of this: few shapes to compile

Score = Callable[[str, Question], float]  # (answer, question) -> 0 … 1


class Answerer(Protocol):
    """A model that goes on from prompts. Rows are independent of each other."""

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: Callable[[list[int]], bool] | None
    ) -> list[list[int]]:
        """At most new_tokens greedy tokens after each prompt, up to an end of text or to where `stop` is satisfied."""
        ...


@dataclass(frozen=True)
class ModelAnswerer:
    """A trained LM as an `Answerer`. Prompts stream through its cache, `chunk` tokens at a time: memory is that of the
    cache, O(T). batch_tokens: tokens of the prompts that are answered together (at least one prompt). vocab_size: the
    tokenizer's, where the model has more embeddings."""

    model: LM
    params: Any
    stop_id: int | None = None
    chunk: int = CHUNK
    batch_tokens: int = BATCH_TOKENS
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.batch_tokens < 1:
            raise ValueError(f"chunk={self.chunk} and batch_tokens={self.batch_tokens} must be at least 1")

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: Callable[[list[int]], bool] | None
    ) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))  # of similar length together
        found: list[list[int]] = [[] for _ in prompts]
        while order:
            width = -(-len(prompts[order[0]]) // WIDTH) * WIDTH
            together, order = _cut(order, max(1, self.batch_tokens // width))
            answers = generate(
                self.model,
                self.params,
                [prompts[i] for i in together],
                new_tokens,
                stop_id=self.stop_id,
                stop=stop,
                chunk=self.chunk,
                multiple=min(self.chunk, WIDTH),
                vocab_size=self.vocab_size,
            )
            for index, answer in zip(together, answers, strict=True):
                found[index] = answer
        return found


@dataclass(frozen=True)
class Answered:
    """One question and how it went."""

    question: Question
    tokens: int
    answer: str
    score: float


def ask(
    answerer: Answerer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    new_tokens: int,
    score: Score,
    *,
    budget: int | None = None,
    bos: bool = False,
    until: str | None = None,
) -> tuple[list[Answered], float]:
    """Answers to `questions` in their order, and the seconds that they took.

    budget: tokens that prompt and new tokens may have together; ValueError if a prompt is longer: it is made to fit and
    nothing is cut here. bos: put the tokenizer's BOS in front. until: answers end before this text.
    """
    front = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    prompts = [[*front, *tokenizer.encode(question.prompt)] for question in questions]
    longest = max(map(len, prompts))
    if budget is not None and longest + new_tokens > budget:
        raise ValueError(f"a prompt of {longest} tokens and {new_tokens} new ones do not fit a budget of {budget}")
    stop = None if until is None else lambda tokens: until in tokenizer.decode(tokens)
    start = time.monotonic()
    raw = answerer.answer(prompts, new_tokens, stop)
    seconds = time.monotonic() - start
    texts = [tokenizer.decode(tokens) for tokens in raw]
    if until is not None:
        texts = [text.partition(until)[0] for text in texts]
    answered = [
        Answered(question, len(prompt), text, score(text, question))
        for question, prompt, text in zip(questions, prompts, texts, strict=True)
    ]
    return answered, seconds


def row(answered: Sequence[Answered], **more: Any) -> dict[str, Any]:
    """One row of plain values, `more` first: the mean score with Wilson's 95 % interval, speed, one entry per sample.

    A score between 0 and 1 counts as that share of a right answer; among values in [0, 1] of one mean, zeros and ones
    vary most, so the interval is on the safe side.
    """
    correct = sum(a.score for a in answered)
    low, high = wilson(correct, len(answered))
    return {
        **more,
        "tokens": max(a.tokens for a in answered),
        "samples": len(answered),
        "correct": correct,
        "accuracy": correct / len(answered),
        "lower": low,
        "upper": high,
        "depths": [
            {
                "depth": a.question.depth,
                "correct": a.score,
                "answer": a.answer,
                "references": list(a.question.references),
                **dict(a.question.facts),
            }
            for a in answered
        ],
    }


def speed(answered: Sequence[Answered], seconds: float) -> dict[str, float]:
    """samples and prompt tokens per second, for a row."""
    read = sum(a.tokens for a in answered)
    return {
        "seconds": round(seconds, 3),
        "samples_per_second": len(answered) / max(seconds, 1e-9),
        "prompt_tokens_per_second": read / max(seconds, 1e-9),
    }


def contains_all(answer: str, question: Question) -> float:
    """Share of the references that occur in the answer, whatever their case (RULER's string_match_all)."""
    return sum(reference.lower() in answer.lower() for reference in question.references) / len(question.references)


def contains_any(answer: str, question: Question) -> float:
    """1 if one of the references occurs in the answer, whatever its case (RULER's string_match_part)."""
    return float(any(reference.lower() in answer.lower() for reference in question.references))


def equals_any(answer: str, question: Question) -> float:
    """1 if the answer is one of the references, spaces around it aside."""
    return float(answer.strip() in question.references)


def _cut(order: list[int], size: int) -> tuple[list[int], list[int]]:
    return order[:size], order[size:]
