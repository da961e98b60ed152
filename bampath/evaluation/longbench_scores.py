"""The scorers of LongBench's English tasks (THUDM/LongBench, MIT), with the edge cases of the published code.

Each takes (answer, reference, classes) and gives a number from 0 to 1. `tests/evaluation/test_longbench.py`
holds values of the published packages.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any


def question_answering(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the bags of words, lower-case, without punctuation and articles."""
    found, wanted = _words(answer), _words(reference)
    same = sum((Counter(found) & Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def summary(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L as the package rouge 1.0 computes it: sentences end at full stops, and different words count, once each.

    Of each pair of sentences one longest common subsequence is taken; the words of all of them together are the hits.
    """
    found, wanted = _sentences(answer), _sentences(reference)
    if not found or not wanted:
        return 0.0
    hits = {word for ours in wanted for theirs in found for word in _common(ours, theirs)}
    recall = len(hits) / len({word for sentence in wanted for word in sentence})
    precision = len(hits) / len({word for sentence in found for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """A longest common subsequence; among several the one that the package's backtracking finds."""
    table = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, a in enumerate(x, 1):
        for j, b in enumerate(y, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if a == b else max(table[i - 1][j], table[i][j - 1])
    i, j, found = len(x), len(y), list[str]()
    while i and j:
        if x[i - 1] == y[j - 1]:
            found.append(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 / (number of classes that the answer names) if the right one is among them.

    A named class that is part of the right one's name does not count; as published, the class after such a one is not
    looked at, since the list shrinks under the loop.
    """
    named = [name for name in classes if name in answer]
    index = 0
    while index < len(named):
        if named[index] in reference and named[index] != reference:
            named.remove(named[index])
        index += 1
    return 1 / len(named) if reference in named else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the paragraph's."""
    wanted = re.findall(r"Paragraph (\d+)", reference)
    if not wanted:
        raise ValueError(f"the reference {reference!r} of passage retrieval names no paragraph")
    return count(answer, wanted[0])


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the reference, written alike."""
    numbers = re.findall(r"\d+", answer)
    return sum(number == reference for number in numbers) / len(numbers) if numbers else 0.0


def code(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the answer's first line without a comment or quote mark, in whole percent (fuzz.ratio)."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def best(scorer: Any, answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """The best score against any of the references."""
    return max([0.0, *(float(scorer(answer, reference, classes)) for reference in references)])
