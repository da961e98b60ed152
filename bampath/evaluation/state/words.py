"""Word problems of the groups A5 and S5 (Merrill et al., arXiv 2404.08819; protocol of jopetty/word-problem)."""

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import ClassVar, Literal

import numpy as np

from bampath.evaluation.state.tasks import Rows
from bampath.positions.options import check, option

Group = Literal["a5", "s5"]
Letters = Literal["all", "cycles", "swaps"]
ORDER = {"a5": 60, "s5": 120}


@dataclass(frozen=True)
class Words:
    """Which element is the product of the elements so far? BOS, then k = `letters` elements g_1 … g_k drawn uniformly.

    question "product" (the published protocol): tokens are all elements of the group, the target after g_t is the
    running product g_1 g_2 … g_t, at every place. A model is causal and asked everywhere, so rows of one length hold
    the shorter ones; `score` reports the share of rows that are right up to each length. question "identity" (the form
    that arXiv 2505.16381 describes): the one target stands at the end and says whether the word is the identity; half
    of the words are, uniformly among such words. over: the elements that words are made of: "all" of the group;
    "cycles", the six three-cycles (123), (124), (125) and their inverses; "swaps", the identity and the ten
    transpositions, S5 only (Grazzi et al., arXiv 2411.12537: "S5 only swaps"); by default all for "product", cycles for
    "identity". Depth: number of elements so far.
    """

    NAME: ClassVar[str] = "words"
    MAIN: ClassVar[str | None] = "group"

    group: Literal["a5", "s5"] = option("a5", doc="the even, or all, permutations of five things")
    letters: int = option(20, doc="elements per word; a row has one token more, the BOS")
    question: Literal["product", "identity"] = option("product", doc="what is asked")
    over: Literal["auto", "all", "cycles", "swaps"] = option("auto", doc="what words are made of")

    def __post_init__(self) -> None:
        check(self)
        if self.over == "swaps" and self.group == "a5":
            raise ValueError("words(a5,over=swaps): a swap is an odd permutation, which A5 has not; use s5")
        if self.letters < 2:
            raise ValueError(f"words: letters={self.letters} must be at least 2")

    @property
    def elements(self) -> np.ndarray:
        """Indices of the elements that words are made of."""
        usual: Letters = "all" if self.question == "product" else "cycles"
        return alphabet(self.group, usual if self.over == "auto" else self.over)

    @property
    def alphabet(self) -> int:
        """How many these are."""
        return len(self.elements)

    @property
    def results(self) -> int:
        """How many different answers there are."""
        return ORDER[self.group] if self.question == "product" else 2

    @property
    def vocab_size(self) -> int:
        return max(self.alphabet + 1, self.results)

    @property
    def length(self) -> int:
        return self.letters + 1

    @property
    def asked(self) -> int:
        return self.letters if self.question == "product" else 1

    @property
    def answers(self) -> range:
        return range(self.results)

    def draw(self, draws: np.random.Generator, rows: int) -> Rows:
        table, letters = multiplication(self.group), self.elements
        if self.question == "product":
            words = draws.integers(0, len(letters), (rows, self.letters))
            values = _running(table, letters[words])
            asked = np.ones(words.shape)
        else:
            words = _balanced(draws, table, letters, rows, self.letters)
            values = (_running(table, letters[words]) == 0).astype(np.int64)
            asked = np.zeros(words.shape)
            asked[:, -1] = 1
        bos = lambda fill, array: np.concatenate([np.full((rows, 1), fill), array], axis=1)
        depth = np.arange(1, self.letters + 1) * asked
        return Rows(
            bos(self.alphabet, words).astype(np.int32),
            bos(0, values * asked).astype(np.int32),
            bos(0, asked).astype(np.float32),
            bos(0, depth).astype(np.int32),
        )

    def tests(self) -> dict[str, "Words"]:
        return {"in-distribution": self}


@cache
def elements(group: Group) -> np.ndarray:
    """All permutations of the group as rows [order, 5], in lexicographic order: the first is the identity."""
    found = [p for p in permutations(range(5)) if group == "s5" or _even(p)]
    return np.array(found)


@cache
def multiplication(group: Group) -> np.ndarray:
    """table[a, b]: index of a·b, which maps x to a[b[x]]."""
    own = elements(group)
    index = {tuple(p): i for i, p in enumerate(own.tolist())}
    return np.array([[index[tuple(a[b])] for b in own] for a in own])


@cache
def three_cycles(group: Group) -> np.ndarray:
    """Indices of (123), (124), (125) and their inverses, in this order."""
    index = {tuple(p): i for i, p in enumerate(elements(group).tolist())}
    cycles = []
    for last in (2, 3, 4):
        p = list(range(5))
        p[0], p[1], p[last] = 1, last, 0
        cycles.append(tuple(p))
    return np.array([index[c] for c in cycles] + [index[tuple(np.argsort(c).tolist())] for c in cycles])


@cache
def alphabet(group: Group, over: Letters) -> np.ndarray:
    """Indices of the elements that words are made of, see `Words`."""
    if over == "all":
        return np.arange(ORDER[group])
    if over == "cycles":
        return three_cycles(group)
    return np.flatnonzero((elements(group) != np.arange(5)).sum(axis=1) <= 2)  # moves none or two of the five


def _even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i in range(5) for j in range(i + 1, 5)) % 2 == 0


def _running(table: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Products [B, k] of the first t elements of words [B, k], t = 1 … k."""
    values = words.copy()
    for t in range(1, words.shape[1]):
        values[:, t] = table[values[:, t - 1], words[:, t]]
    return values


def _balanced(draws: np.random.Generator, table: np.ndarray, letters: np.ndarray, rows: int, length: int) -> np.ndarray:
    """Words [B, k] of letters; each is the identity with probability 1/2, uniform among the words that are (or not).

    ways[r, g]: share of the words of r letters that carry g to the identity; a letter is drawn in proportion to the
    ways that remain after it.
    """
    after = table[:, letters]  # [order, letters]: where a letter leads
    ways = np.zeros((length + 1, len(table)))
    ways[0, 0] = 1.0
    for r in range(1, length + 1):
        ways[r] = ways[r - 1][after].mean(axis=1)
    identity = draws.random(rows) < 0.5
    state, words = np.zeros(rows, np.int64), np.zeros((rows, length), np.int64)
    for t in range(length):
        left = ways[length - 1 - t][after[state]]
        share = np.where(identity[:, None], left, 1 - left)
        edges = np.cumsum(share, axis=1)
        words[:, t] = np.minimum((draws.random(rows)[:, None] * edges[:, -1:] >= edges).sum(axis=1), len(letters) - 1)
        state = after[state, words[:, t]]
    return words
