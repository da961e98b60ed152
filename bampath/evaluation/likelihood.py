"""How likely a model finds continuations: the same whatever the batch, the padding or the order of what is asked."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bampath.evaluation.reader import Reader

WIDTH = 64  # rows are padded to a multiple of this: few shapes to compile


class Pair(NamedTuple):
    """Token ids of a context (at least one) and of what is asked for behind it (at least one)."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Likelihood(NamedTuple):
    """log_probability of the whole continuation, in nats; greedy: whether each of its tokens is the likeliest."""

    log_probability: float
    greedy: bool


def likelihoods(reader: Reader, pairs: Sequence[Pair], batch_tokens: int) -> list[Likelihood]:
    """One Likelihood per pair, in their order.

    Pairs that differ in their last token only (the choices of many tasks) share one row. Rows are read longest first,
    padded on the right, which no place before can see.
    """
    rows: dict[tuple[int, ...], int] = {}
    for pair in pairs:
        if not pair.context or not pair.continuation:
            raise ValueError("context and continuation need at least one token each; start with a BOS or EOS")
        rows.setdefault(_row(pair), len(rows))
    tails: dict[int, set[int]] = {}
    for pair in pairs:
        tails.setdefault(rows[_row(pair)], set()).add(len(pair.continuation))
    found: dict[tuple[int, ...], dict[int, np.ndarray]] = {}
    order = sorted(rows, key=lambda row: (-len(row), row))
    while order:
        width = -(-len(order[0]) // WIDTH) * WIDTH
        size = max(1, batch_tokens // width)
        batch, order = order[:size], order[size:]
        longest = max(max(tails[rows[row]]) for row in batch)
        scored = min(width, 1 << (longest - 1).bit_length())  # a power of two: few shapes
        for row, logits in zip(batch, _read(reader, batch, size, width, scored), strict=True):
            found[row] = {count: logits[-count:] for count in tails[rows[row]]}
    return [_of(found[_row(pair)][len(pair.continuation)], pair.continuation) for pair in pairs]


def losses_of(reader: Reader, pairs: Sequence[Pair], batch_tokens: int) -> list[float]:
    """Minus the log-probability of each continuation, for long ones: their logits are never all in memory."""
    order = sorted(range(len(pairs)), key=lambda i: (-len(_row(pairs[i])), i))
    found = [0.0] * len(pairs)
    while order:
        width = -(-len(_row(pairs[order[0]])) // WIDTH) * WIDTH
        size = max(1, batch_tokens // width)
        batch, order = order[:size], order[size:]
        tokens, targets = np.zeros((size, width), np.int32), np.zeros((size, width), np.int32)
        for line, index in enumerate(batch):
            row = _row(pairs[index])
            tokens[line, : len(row)] = row
            targets[line, : len(row)] = (*row[1:], pairs[index].continuation[-1])
        losses = reader.losses(tokens, targets).astype(np.float64)
        for line, index in enumerate(batch):
            stop = len(_row(pairs[index]))
            found[index] = float(losses[line, stop - len(pairs[index].continuation) : stop].sum())
    return found


def _row(pair: Pair) -> tuple[int, ...]:
    """What the model reads: everything but the last token."""
    return (*pair.context, *pair.continuation[:-1])


def _read(reader: Reader, batch: Sequence[tuple[int, ...]], size: int, width: int, scored: int) -> list[np.ndarray]:
    """Logits [<= scored, V] after the last places of each row, in float64."""
    tokens, places = np.zeros((size, width), np.int32), np.zeros((size, scored), np.int32)
    for line, row in enumerate(batch):
        tokens[line, : len(row)] = row
        places[line] = np.maximum(np.arange(len(row) - scored, len(row)), 0)
    logits = reader.logits_at(tokens, places)
    return [logits[line].astype(np.float64) for line in range(len(batch))]


def _of(logits: np.ndarray, continuation: Sequence[int]) -> Likelihood:
    """Of one continuation, from the logits [n, V] before each of its tokens."""
    ids = np.asarray(continuation)
    top = logits.max(axis=1)
    log_z = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    hit = logits[np.arange(len(ids)), ids]
    return Likelihood(float((hit - log_z).sum()), bool((logits.argmax(axis=1) == ids).all()))
