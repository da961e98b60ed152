"""From a stream of documents to rows: which tokens a row holds, and the five arrays of a batch.

    documents      |a a a a a|b b b|c c c c c c c|        a row of 4 targets needs 5 tokens
    row 0          a a a a → a        the last target is the row's fifth token: still document a, so it counts
    row 1          a b b b → ·        a ends: its last token has no target; b fills the row and ends with it
    row 2          c c c c → c        …

Every token of the corpus is an input exactly once per epoch and every token but a document's first is a target exactly
once. A document that goes on in the next row starts there at position 0, in a segment of its own: what a row cannot
hold is not visible. A place whose next token belongs to another document has weight 0 and the padding id as its target,
so the loss cannot cross a border, whatever a model sees.

The stream is read as a ring: each shuffled epoch of "split" rows starts at another place, so that documents are not cut
at the same places again. The ring's seam is a document border like any other.
"""

from dataclasses import dataclass

import numpy as np

from bampath.data.config import Packing
from bampath.data.corpus import TokenCorpus
from bampath.data.shards import spans_of

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class RowPlan:
    """Rows as spans of the token stream. table: int64 [rows + 1] starts, None where rows are simply `length` apart."""

    total: int
    length: int
    table: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """Rows of one epoch."""
        return -(-self.total // self.length) if self.table is None else len(self.table) - 1

    def spans(self, rows: np.ndarray, phase: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(start, count) in the ring of tokens, int64 [n] each; phase: int64 [n], the start of the row's epoch."""
        if self.table is not None:
            return self.table[rows], self.table[rows + 1] - self.table[rows]
        starts = rows * self.length
        return (starts + phase) % self.total, np.minimum(self.length, self.total - starts)


def plan_rows(offsets: np.ndarray, length: int, packing: Packing) -> RowPlan:
    """How documents (offsets int64 [documents + 1]) become rows of at most `length` inputs.

    "split" needs no table. "whole" goes through the documents in order and starts a new row when the next one does not
    fit (next fit); a document longer than a row is cut into pieces of `length`, and its rest shares a row again.
    """
    total = int(offsets[-1])
    if packing == "split":
        return RowPlan(total, length)
    borders = _cut(offsets, length)
    following = np.searchsorted(borders, borders + length, side="right") - 1
    jump = following.data  # an element of a memoryview is a plain int: several times faster than numpy's
    starts, at = [0], 0
    while at < len(borders) - 1:
        at = jump[at]
        starts.append(at)
    return RowPlan(total, length, borders[np.asarray(starts)])


def _cut(offsets: np.ndarray, length: int) -> np.ndarray:
    """The document borders and, inside longer documents, every `length` tokens one more."""
    pieces = -(-np.diff(offsets) // length)
    first = np.repeat(offsets[:-1], pieces)
    number = np.arange(len(first)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(first + number * length, offsets[-1])


def gather(
    corpus: TokenCorpus, starts: np.ndarray, counts: np.ndarray, width: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of spans of the ring, each with the one token that follows it.

    starts, counts: int64 [B], counts < width. Returns tokens int32 [B, width] (`pad` behind the end) and borders bool
    [B, width], true where a document begins; a row's first place is never marked.
    """
    total = len(corpus.tokens)
    tokens = np.full((len(starts), width), pad, np.int32)
    borders = np.zeros((len(starts), width), bool)
    first = np.searchsorted(corpus.offsets, starts, side="right")
    last = np.searchsorted(corpus.offsets, starts + counts, side="right")
    inside = starts + counts < total
    spans = iter(spans_of(corpus.tokens, starts[inside], counts[inside] + 1))
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if start + count < total:
            tokens[row, : count + 1] = next(spans)
            borders[row, corpus.offsets[first[row] : last[row]] - start] = True
        else:
            ring = np.arange(start, start + count + 1) % total
            tokens[row, : count + 1] = corpus.tokens[ring]
            borders[row, : count + 1] = np.isin(ring, corpus.offsets)
            borders[row, 0] = False
    return tokens, borders


def make_batch(
    tokens: np.ndarray, borders: np.ndarray, counts: np.ndarray, loss: np.ndarray | None, pad: int, document_mask: bool
) -> Batch:
    """The arrays that training reads, all [B, T], from tokens int32 [B, T + 1] and their document borders (bool).

    counts: int64 [B] inputs of each row, the rest is padding; loss: float32 [B, T + 1] weight of each token as a
    target, or None for 1. Returns tokens int32, targets int32, weights float32 (0 where the next token belongs to
    another document or to padding), segment_ids int32 (0, 1, … per row, −1 padding), positions int32 (restart per
    document). Without `document_mask` a row is one segment; the weights stay as they are.
    """
    length = tokens.shape[1] - 1
    column = np.arange(length, dtype=np.int32)
    real = column[None, :] < counts[:, None]
    scored = real & ~borders[:, 1:]
    weights = scored.astype(np.float32) if loss is None else np.where(scored, loss[:, 1:], np.float32(0))
    inputs = borders[:, :-1] if document_mask else np.zeros_like(borders[:, :-1])
    segments = np.cumsum(inputs, axis=1, dtype=np.int32)
    begins = np.maximum.accumulate(np.where(inputs, column[None, :], np.int32(0)), axis=1)
    return {
        "tokens": np.where(real, tokens[:, :-1], np.int32(pad)),
        "targets": np.where(scored, tokens[:, 1:], np.int32(pad)),
        "weights": weights,
        "segment_ids": np.where(real, segments, np.int32(-1)),
        "positions": np.where(real, column[None, :] - begins, np.int32(0)),
    }
