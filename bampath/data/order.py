"""Which row comes when: hashes, a permutation and the interleaving of two streams, all O(1) per row.

Nothing here keeps state. The row at place `g` of the endless global stream is computed from (seed, g) alone, so that
resuming costs nothing and no number of workers or processes can change the order. The hash is SplitMix64's finaliser
(Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), written out here because the streams
of a library's generators may change between its versions, and a resumed run must not.
"""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's constants
_ROUNDS = 6

# What a hash of a seed is for, so that two uses of one seed have nothing in common. A resumed run relies on them: they
# decide its data.
LENGTH, DOCUMENT, START, FILLER = 1, 2, 3, 4  # of retrieval documents
EPOCH, PHASE, PART = 0xE90C4, 0xFA5E, 0x3117  # an epoch's permutation, where it begins, the seed of a mixture's part


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: a bijection of uint64 that scatters every bit. Any shape, uint64 in and out."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def hash64(*values: int) -> int:
    """One 64-bit hash of a tuple of integers; equal to chained `mix64`, in plain Python integers."""
    state = len(values)
    for value in values:
        x = ((state ^ (value & _MASK)) + _GOLDEN) & _MASK
        x = ((x ^ (x >> 30)) * _FIRST) & _MASK
        x = ((x ^ (x >> 27)) * _SECOND) & _MASK
        state = x ^ (x >> 31)
    return state


@dataclass
class Draws:
    """A short stream of random integers that is a pure function of the integers it was keyed with."""

    key: int
    count: int = field(default=0, init=False)

    def below(self, size: int) -> int:
        """Uniform in [0, size); the bias of at most size / 2^64 is far below anything that can be measured."""
        if size <= 0:
            raise ValueError(f"below(size={size}) needs size >= 1")
        self.count += 1
        return (hash64(self.key, self.count) * size) >> 64

    def between(self, low: int, high: int) -> int:
        """Uniform in [low, high], both ends included."""
        return low + self.below(high - low + 1)

    def digits(self, count: int) -> str:
        """`count` random decimal digits, leading zeros included, at most 18."""
        return str(self.below(10**count)).zfill(count)


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """A pseudorandom permutation of range(size), evaluated at `index` without storing it.

    index: int64 [...], each in [0, size); key: selects the permutation. Returns int64 of the same shape.
    A generalised Feistel network on a × b ≥ size with cycle walking (Black and Rogaway, Ciphers with arbitrary finite
    domains, CT-RSA 2002): x = l·b + r, and l and r take turns in adding a hash of the other one.
    """
    if size <= 1:
        return np.zeros_like(index, dtype=np.int64)
    a = int(np.ceil(np.sqrt(size)))
    b = -(-size // a)
    out = np.array(index, dtype=np.int64)
    pending = np.ones(out.shape, bool)
    while pending.any():
        out[pending] = _feistel(out[pending], a, b, key)
        pending = out >= size
    return out


def _feistel(x: np.ndarray, a: int, b: int, key: int) -> np.ndarray:
    left, right = np.divmod(x, b)
    for r in range(_ROUNDS):
        salt = np.uint64(hash64(key, r))
        if r % 2 == 0:
            left = (left + (mix64(right.astype(np.uint64) ^ salt) % np.uint64(a)).astype(np.int64)) % a
        else:
            right = (right + (mix64(left.astype(np.uint64) ^ salt) % np.uint64(b)).astype(np.int64)) % b
    return left * b + right


def shuffled_rows(places: np.ndarray, rows: int, seed: int, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
    """(epoch, row) of each place of an endless stream over a corpus of `rows` rows, each once per epoch.

    places: int64 [n] >= 0. Every epoch has a permutation of its own; without `shuffle` the order is the corpus's.
    """
    epochs, inside = np.divmod(np.asarray(places, np.int64), rows)
    if not shuffle:
        return epochs, inside
    out = np.empty_like(inside)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        out[chosen] = permute(inside[chosen], rows, hash64(seed, EPOCH, int(epoch)))
    return epochs, out


def interleave(places: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Spread a second stream evenly: (is it a row of the second stream, its index within its own stream).

    Among the first g places exactly floor(share · g) belong to the second stream. Exact rational arithmetic, so that no
    place, however late, is counted twice. places: int64 [n]; returns bool [n] and int64 [n].
    """
    ratio = Fraction(share).limit_denominator(1000)
    p, q = ratio.numerator, ratio.denominator
    laps, rest = np.divmod(np.asarray(places, np.int64), q)
    before = laps * p + rest * p // q
    second = (rest + 1) * p // q > rest * p // q
    return second, np.where(second, before, places - before)
