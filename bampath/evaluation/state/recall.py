"""Recall of values by key: the N-th last value of a key that is assigned again and again, or the only one."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bampath.evaluation.state.tasks import Rows
from bampath.positions.options import check, option


@dataclass(frozen=True)
class Mqrar:
    """MQRAR-N-back, our reconstruction: the value of a key's N-th last assignment.

    PaTH (arXiv 2505.16381) states 32 keys, length 768 and N = 1 … 4; its layout is not published. Here a row is `pairs`
    pairs; the key of each is uniform. A key with at least N earlier assignments becomes, with probability 1/2, a query:
    the blank `?` stands in the place of a value, and the value of the N-th last assignment is asked for there. All
    other pairs are assignments of a uniform value. Queries are not assignments, and answers never stand in the row.
    Depth: tokens from the assigned value to the blank.
    """

    NAME: ClassVar[str] = "mqrar"
    MAIN: ClassVar[str | None] = None

    back: int = option(1, doc="N: which of the last assignments is asked for")
    keys: int = option(32, doc="different keys")
    values: int = option(64, doc="different values")
    pairs: int = option(384, doc="pairs per row")

    def __post_init__(self) -> None:
        check(self)
        for name in ("back", "keys", "values", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"mqrar: {name}={getattr(self, name)} must be at least 1")

    @property
    def vocab_size(self) -> int:
        return self.values + self.keys + 1

    @property
    def length(self) -> int:
        return 2 * self.pairs

    @property
    def asked(self) -> int:
        return self.pairs

    @property
    def answers(self) -> range:
        return range(self.values)

    def draw(self, draws: np.random.Generator, rows: int) -> Rows:
        keys = draws.integers(0, self.keys, (rows, self.pairs))
        values = draws.integers(0, self.values, (rows, self.pairs))
        ask = draws.random((rows, self.pairs)) < 0.5
        every = np.arange(rows)
        places = np.full((rows, self.keys, self.back), -1)  # pairs of the last assignments, newest first
        answers, depth = np.zeros_like(values), np.zeros_like(values)
        for pair in range(self.pairs):
            key = keys[:, pair]
            before = places[every, key]
            oldest = before[:, -1]
            ask[:, pair] &= oldest >= 0
            query = ask[:, pair]
            answers[:, pair] = np.where(query, values[every, oldest], 0)
            depth[:, pair] = np.where(query, 2 * (pair - oldest), 0)
            shifted = np.concatenate([np.full((rows, 1), pair), before[:, :-1]], axis=1)
            places[every, key] = np.where(query[:, None], before, shifted)
        blank = self.values + self.keys
        pairs = lambda even, odd: np.stack([even, odd], axis=2).reshape(rows, -1)
        zero = np.zeros_like(keys)
        return Rows(
            tokens=pairs(self.values + keys, np.where(ask, blank, values)).astype(np.int32),
            targets=pairs(zero, answers).astype(np.int32),
            weights=pairs(zero, ask).astype(np.float32),
            depth=pairs(zero, depth).astype(np.int32),
        )

    def tests(self) -> dict[str, "Mqrar"]:
        return {"in-distribution": self}


@dataclass(frozen=True)
class Mqar:
    """Multi-query associative recall (Arora et al., arXiv 2312.04927; after `multiquery_ar` of HazyResearch/zoology).

    `pairs` different keys with values first, then the same keys in the rest of the row, at gaps that follow a power law
    with exponent `power` - 1, so that most queries come early; the value is asked for at the key. All other places are
    uniform symbols. Keys are the ids 1 … V/2 - 1, values V/2 … V - 1. Depth: tokens from the value to the query.
    """

    NAME: ClassVar[str] = "mqar"
    MAIN: ClassVar[str | None] = None

    pairs: int = option(16, doc="keys per row")
    length: int = option(128, doc="tokens per row")
    vocabulary: int = option(8192, doc="V: keys and values together")
    power: float = option(0.01, doc="exponent of the gaps, plus one")

    def __post_init__(self) -> None:
        check(self)
        if self.pairs < 1 or self.length < 4 * self.pairs:
            raise ValueError(f"mqar: length={self.length} must be at least four times pairs={self.pairs} >= 1")
        if self.vocabulary % 2 or self.vocabulary // 2 - 1 < self.pairs:
            raise ValueError(f"mqar: vocabulary={self.vocabulary} must be even and hold two symbols for each pair")
        if not self.power > 0:
            raise ValueError(f"mqar: power={self.power} must be positive")

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def asked(self) -> int:
        return self.pairs

    @property
    def answers(self) -> range:
        return range(self.vocabulary // 2, self.vocabulary)

    def draw(self, draws: np.random.Generator, rows: int) -> Rows:
        half, start = self.vocabulary // 2, 2 * self.pairs
        keys = _distinct(draws, rows, half - 1, self.pairs) + 1
        values = draws.integers(half, self.vocabulary, keys.shape)
        tokens = draws.integers(0, self.vocabulary, (rows, self.length))
        tokens[:, 0:start:2], tokens[:, 1:start:2] = keys, values
        slots = (self.length - start) // 2
        weight = np.arange(1, slots + 1, dtype=np.float64) ** (self.power - 1)
        places = start + 2 * _weighted(draws, rows, weight, self.pairs)
        every = np.arange(rows)[:, None]
        targets, weights, depth = np.zeros_like(tokens), np.zeros(tokens.shape), np.zeros_like(tokens)
        tokens[every, places], targets[every, places], weights[every, places] = keys, values, 1
        depth[every, places] = places - (2 * np.arange(self.pairs) + 1)
        return Rows(
            tokens.astype(np.int32), targets.astype(np.int32), weights.astype(np.float32), depth.astype(np.int32)
        )

    def tests(self) -> dict[str, "Mqar"]:
        return {"in-distribution": self}


def _distinct(draws: np.random.Generator, rows: int, count: int, wanted: int) -> np.ndarray:
    """`wanted` different numbers below `count` per row, in random order."""
    return np.argsort(draws.random((rows, count)), axis=1)[:, :wanted]


def _weighted(draws: np.random.Generator, rows: int, weight: np.ndarray, wanted: int) -> np.ndarray:
    """`wanted` different indices of `weight` per row, without replacement in proportion to it (Gumbel's trick)."""
    noise = draws.gumbel(size=(rows, len(weight)))
    return np.argsort(-(np.log(weight)[None, :] + noise), axis=1)[:, :wanted]
