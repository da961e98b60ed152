"""Needles in haystacks: the eight NIAH tasks."""

import random
import uuid
from dataclasses import dataclass
from typing import Literal

from bampath.evaluation.materials import NOISE, WordLists, sentences
from bampath.evaluation.questions import Question, depth_of

TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text? The special magic {kind} for {query} mentioned in the provided text are"
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = [round(100 * i / 39) for i in range(40)]

Haystack = Literal["noise", "essay", "needle"]
Symbol = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Niah:
    """One NIAH task: what the haystack is made of, what keys and values are, how many keys, values per key, queries."""

    haystack: Haystack
    key: Symbol
    value: Symbol
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def needles(self) -> int:
        return max(self.keys, self.queries) * self.values

    @property
    def least(self) -> int:
        """The smallest haystack, in items, words or needles: room for each needle."""
        return self.needles


def make(task: Niah, size: int, draw: random.Random, words: WordLists, essay: list[str]) -> Question:
    """A prompt with a haystack of `size` items (noise, needle) or words (essay).

    words: its adjective-nouns are keys and values; essay: the words of the prose. The needles of one prompt
    are shuffled by Random(42), as published. Depth: the mean of the needles that are asked for.
    """
    keys = [_symbol(task.key, draw, words) for _ in range(max(task.keys, task.queries))]
    values = [[_symbol(task.value, draw, words) for _ in range(task.values)] for _ in keys]
    needles = [_needle(task, key, value) for key, own in zip(keys, values, strict=True) for value in own]
    random.Random(42).shuffle(needles)
    context = (
        _essay(size, needles, draw, essay) if task.haystack == "essay" else _items(task, size, needles, draw, words)
    )
    asked = draw.sample(range(len(keys)), task.queries)
    queries = [keys[i] for i in asked]
    query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
    wanted = [(keys[i], value) for i in asked for value in values[i]]
    prompt = template(task).format(kind=_kind(task), context=context, query=query)
    depths = [depth_of(prompt, _needle(task, key, value)) for key, value in wanted]
    return Question(prompt, tuple(value for _, value in wanted), sum(depths) / len(depths))


def template(task: Niah) -> str:
    """The template, put in the singular (as published) when there is one answer."""
    if task.queries * task.values > 1:
        return TEMPLATE
    return TEMPLATE.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _kind(task: Niah) -> str:
    return task.value[:-1] if task.queries * task.values == 1 else task.value


def _needle(task: Niah, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.value, key=key, value=value)  # plural also for one answer, as published


def _symbol(kind: Symbol, draw: random.Random, words: WordLists) -> str:
    if kind == "numbers":
        return str(draw.randint(10**6, 10**7 - 1))
    if kind == "words":
        return words.compound(draw)
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _items(task: Niah, size: int, needles: list[str], draw: random.Random, words: WordLists) -> str:
    """Items joined by newlines, the needles put in before random ones of them."""
    if task.haystack == "noise":
        items = [NOISE] * size
    else:
        items = [_needle(task, _symbol(task.key, draw, words), _symbol(task.value, draw, words)) for _ in range(size)]
    for place, needle in zip(sorted(draw.sample(range(size), len(needles)), reverse=True), needles, strict=True):
        items.insert(place, needle)
    return "\n".join(items)


def _essay(size: int, needles: list[str], draw: random.Random, essay: list[str]) -> str:
    """The first `size` words (from the start again when there are fewer), the needles between sentences."""
    repeated = essay[:size] if size <= len(essay) else (essay * -(-size // len(essay)))[:size]
    found = sentences(" ".join(repeated))
    places = sorted(len(found) * depth // 100 for depth in draw.sample(DEPTHS, len(needles)))
    pieces: list[str] = []
    for start, stop, needle in zip([0, *places], [*places, len(found)], [*needles, ""], strict=True):
        pieces += [" ".join(found[start:stop])] * (stop > start) + [needle] * bool(needle)
    return " ".join(pieces)
