"""Questions whose answers are generated: how they are kept on disk, how a haystack is cut to a budget."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bampath.data import Tokenizer
from bampath.data.corpus import cache_root as tokens_root
from bampath.evaluation.results import write_json

FORMAT = 1


@dataclass(frozen=True)
class Question:
    """One sample. prompt: the whole text before the answer; references: what the scorer compares with; depth: where the
    evidence stands in the prompt, 0 first to 1 last, None where it is everywhere; facts: plain values for its row."""

    prompt: str
    references: tuple[str, ...]
    depth: float | None = None
    facts: tuple[tuple[str, Any], ...] = ()


class DoesNotFit(ValueError):
    """There is nothing to ask at a length: the smallest prompt is longer than it, or the text shorter. Other lengths
    and benchmarks may still do. reason: the message without `what`."""

    def __init__(self, reason: str, what: str = "") -> None:
        super().__init__(f"{what}: {reason}" if what else reason)
        self.reason = reason


def cache_root(folder: str | None = None) -> Path:
    """Where questions are kept: `folder`, else evaluation/ in $BAMPATH_CACHE or ~/.cache/bampath."""
    return Path(folder).expanduser() if folder else tokens_root() / "evaluation"


def kept(root: Path, identity: dict[str, Any], make: Callable[[], Sequence[Question]]) -> list[Question]:
    """The questions that `identity` (plain values) determines: read from disk, or made and written there.

    A file that is not of this identity or format is made anew, as is one that cannot be read.
    """
    facts = {"format": FORMAT, **identity}
    text = json.dumps(facts, sort_keys=True)
    name = f"{identity.get('task', 'questions')}-{hashlib.blake2b(text.encode(), digest_size=10).hexdigest()}.json"
    path = root / name.replace("/", "-")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["identity"] == json.loads(text):
            return [_question(entry) for entry in saved["questions"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    made = list(make())
    write_json(path, {"identity": facts, "questions": [asdict(question) for question in made]})
    return made


def _question(entry: dict[str, Any]) -> Question:
    facts = tuple((name, value) for name, value in entry["facts"])
    return Question(entry["prompt"], tuple(entry["references"]), entry["depth"], facts)


def draws(seed: int, *names: Any) -> random.Random:
    """A random stream that is a pure function of the seed and of what it is for."""
    return random.Random("/".join(map(str, (seed, *names))))


def count(tokenizer: Tokenizer, text: str) -> int:
    """Tokens of a text."""
    return len(tokenizer.encode(text))


def largest(fits: Callable[[int], bool], least: int, what: str) -> int:
    """The largest size >= least that fits, by bisection. DoesNotFit, naming `what`, if `least` does not."""
    if not fits(least):
        raise DoesNotFit("even the smallest prompt is longer than the budget; use a longer length", what)
    low, high = least, 2 * max(least, 1)
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def within(
    make: Callable[[int], Question], tokens: Callable[[str], int], budget: int, size: int, least: int, what: str
) -> Question:
    """`make(size)` with the size taken back until its prompt has at most `budget` tokens (sizes differ by sample)."""
    while True:
        question = make(size)
        over = tokens(question.prompt) - budget
        if over <= 0:
            return question
        if size <= least:
            raise DoesNotFit(f"even the smallest prompt is {over} tokens longer than the budget of {budget}", what)
        size = max(least, size - max(1, size * over // (over + budget)))


def depth_of(prompt: str, evidence: str) -> float:
    """Where `evidence` begins in the prompt, as a share of its characters. ValueError if it is not there."""
    return prompt.index(evidence) / len(prompt)
