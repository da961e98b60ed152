"""Aggregation: the most common words of a numbered list, and of a coded text."""

import math
import random
import string
from dataclasses import dataclass

from bampath.evaluation.materials import WordLists
from bampath.evaluation.questions import DoesNotFit, Question

COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)
COMMON = 10
ZETA_2 = math.pi**2 / 6


@dataclass(frozen=True)
class Repeats:
    """How often common and other words occur, and the solved example: its words, and the same two numbers."""

    common: int
    other: int
    shot_words: int
    shot: tuple[int, int]


LONG, SHORT = Repeats(30, 3, 40, (10, 3)), Repeats(6, 1, 20, (3, 1))


def repeats(length: int) -> Repeats:
    """The published numbers: fewer below 4,096 tokens."""
    return SHORT if length < 4096 else LONG


def common_words(size: int, draw: random.Random, words: WordLists, single: list[str], times: Repeats) -> Question:
    """A numbered list of `size` different words, ten of them common, behind a solved example.

    single: `words.all()`. A list with more words than these goes on with adjective-nouns.
    """
    shot, shot_answer = _list(draw.sample(single, times.shot_words), *times.shot)
    chosen = draw.sample(single, min(size, len(single)))
    chosen += _more(size - len(chosen), draw, words)
    main, answer = _list(chosen, times.common, times.other)
    solved = " " + " ".join(f"{i}. {word}" for i, word in enumerate(shot_answer, 1))
    prompt = COMMON_TEMPLATE.format(context=shot) + solved + "\n" + COMMON_TEMPLATE.format(context=main)
    return Question(prompt, tuple(answer))


def _list(words: list[str], common: int, other: int) -> tuple[str, list[str]]:
    items = words[:COMMON] * common + words[COMMON:] * other
    random.Random(42).shuffle(items)
    return " ".join(f"{i}. {word}" for i, word in enumerate(items, 1)), words[:COMMON]


def _more(wanted: int, draw: random.Random, words: WordLists) -> list[str]:
    if wanted > len(words.adjectives) * len(words.nouns) // 2:
        raise DoesNotFit(f"the word lists cannot make {wanted:,} more words; use a shorter length", "cwe")
    found: dict[str, None] = {}
    while len(found) < wanted:
        found[words.compound(draw)] = None
    return list(found)


def frequent_words(size: int, draw: random.Random, length: int) -> Question:
    """About `size` coded words of six letters whose counts fall off as 1/rank²; the commonest is written as dots.

    The vocabulary has length // 50 words (at least the dots and three others).
    """
    words: list[str] = ["..."]
    while len(words) < max(4, length // 50):
        word = "".join(draw.choices(string.ascii_lowercase, k=6))
        words += [word] * (word not in words)
    items = [word for rank, word in enumerate(words, 1) for _ in range(int(size / rank**2 / ZETA_2))]
    random.Random(42).shuffle(items)
    return Question(FREQUENT_TEMPLATE.format(context=" ".join(items)), tuple(words[1:4]))


LEAST_FREQUENT = math.ceil(16 * ZETA_2)  # then the third reference occurs at least once
