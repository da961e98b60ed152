"""Rows of a corpus, or of a mixture of corpora, at places of an endless stream."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bampath.data.config import DataConfig
from bampath.data.corpus import TokenCorpus
from bampath.data.order import PART, PHASE, hash64, interleave, shuffled_rows
from bampath.data.packing import gather, plan_rows

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
RowsAt = Callable[[np.ndarray], Rows]


def rows_of(config: DataConfig, corpus: TokenCorpus, pad: int) -> RowsAt:
    """places int64 [n] -> tokens, borders and counts (as `packing.gather` has them), a pure function of (seed, place).

    In a mixture each part has its share of the places, evenly spread, and goes through its own epochs.
    """
    if not corpus.parts:
        return _single(config, corpus, pad)
    own = [replace(config, seed=hash64(config.seed, PART, index) >> 1) for index in range(len(corpus.parts))]
    streams = [_single(each, part, pad) for each, (part, _) in zip(own, corpus.parts, strict=True)]
    weights = [weight for _, weight in corpus.parts]
    return lambda places: _mixed(streams, weights, places, config.sequence_length + 1)


def _single(config: DataConfig, corpus: TokenCorpus, pad: int) -> RowsAt:
    plan = plan_rows(corpus.offsets, config.sequence_length, config.packing)

    def phase(epoch: int) -> int:
        """Where in the ring of tokens an epoch begins; 0 for the first and where rows keep the corpus's order."""
        if epoch == 0 or not config.shuffle:
            return 0
        return hash64(config.seed, PHASE, epoch) % len(corpus.tokens)

    def rows_at(places: np.ndarray) -> Rows:
        epochs, rows = shuffled_rows(places, plan.rows, config.seed, config.shuffle)
        phases = {epoch: phase(epoch) for epoch in set(epochs.tolist())}
        starts, counts = plan.spans(rows, np.asarray([phases[epoch] for epoch in epochs.tolist()], np.int64))
        tokens, borders = gather(corpus, starts, counts, config.sequence_length + 1, pad)
        return tokens, borders, counts

    return rows_at


def _mixed(streams: Sequence[RowsAt], weights: Sequence[float], places: np.ndarray, width: int) -> Rows:
    """Rows of several streams, each at its share of the places."""
    tokens = np.empty((len(places), width), np.int32)
    borders, counts = np.empty((len(places), width), bool), np.empty(len(places), np.int64)
    for index, where, own in shares(weights, places):
        if len(own):
            tokens[where], borders[where], counts[where] = streams[index](own)
    return tokens, borders, counts


def shares(weights: Sequence[float], places: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """For each stream (its number, which of `places` are its own [n], their places within its own stream [n]).

    The last one's share is spread evenly among all places, then the others' among the rest: exact at every place.
    """
    found = []
    left, inside = np.arange(len(places)), np.asarray(places, np.int64)
    for index in range(len(weights) - 1, 0, -1):
        second, own = interleave(inside, weights[index] / sum(weights[: index + 1]))
        found.append((index, left[second], own[second]))
        left, inside = left[~second], own[~second]
    return [*found, (0, left, inside)]
