"""Retrieval documents as tokens, at the end of a row of real text."""

from functools import lru_cache

import numpy as np

from bampath.data.corpus import TokenCorpus
from bampath.data.order import FILLER, START, hash64
from bampath.data.packing import gather
from bampath.data.retrieval import Document, RetrievalOptions, document, draw_length, shortest
from bampath.data.tokenizer import Tokenizer


class RetrievalRows:
    """Makes retrieval rows of `length` targets; row `index` is a pure function of (options, seed, corpus, tokenizer).

    ValueError if a row cannot hold the options' document without any filler.
    """

    def __init__(
        self, options: RetrievalOptions, corpus: TokenCorpus, tokenizer: Tokenizer, length: int, seed: int
    ) -> None:
        self._options, self._corpus, self._tokenizer, self._seed = options, corpus, tokenizer, seed
        self._width = length + 1
        self._marks = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
        self._encode = lru_cache(4096)(lambda text: np.asarray(tokenizer.encode(text), np.int32))
        self._least = shortest(options, self._count)
        if self._least > self._width:
            raise ValueError(
                f"retrieval.kind={options.kind!r} needs {self._least} tokens with the tokenizer {tokenizer.name} even "
                f"without filler, but a row of sequence_length={length} holds {self._width}: use longer rows or 'brief'"
            )
        everything_is_marks = options.filler != "noise" and not self._real_text(1).size
        if everything_is_marks:
            raise ValueError(f"retrieval.filler={options.filler!r} needs text, but the corpus holds only BOS and EOS")

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Retrieval rows: tokens int32 [B, T + 1], borders bool [B, T + 1], counts int64 [B], loss float32 [B, T + 1].

        Real text fills the row up to the document (from a random place of the corpus), or, with front="pad", the
        document stands first and the row is padded behind it.
        """
        width, padded = self._width, self._options.front == "pad"
        pad = self._tokenizer.pad_id
        starts = np.asarray([hash64(self._seed, int(i), START) % len(self._corpus.tokens) for i in indices], np.int64)
        counts = np.full(len(indices), width - 1, np.int64)
        tokens, borders = gather(self._corpus, starts, counts, width, pad)
        loss = np.ones((len(indices), width), np.float32)
        for row, index in enumerate(indices.tolist()):
            ids, weights = self.document(index)
            where = slice(0, len(ids)) if padded else slice(width - len(ids), width)
            if padded:
                tokens[row], counts[row] = pad, len(ids) - 1
                borders[row] = False
            tokens[row, where], loss[row, where], borders[row, where] = ids, weights, False
            borders[row, where.start] = self._options.isolated and where.start > 0
        return tokens, borders, counts, loss

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [n] and loss weights float32 [n] of document `index`, n at most one row."""
        length = max(draw_length(self._options, self._width, self._seed, index), self._least)
        drawn = document(self._options, self._seed, index, length, self._count)
        ids, weights = self._tokens_and_weights(drawn, index)
        # A key may be a token longer than those that the shortest length was measured with: drop it at the far end.
        return ids[-self._width :], weights[-self._width :]

    def _tokens_and_weights(self, drawn: Document, index: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [
            self._encode(piece.text) if piece.text else self._real_text(piece.corpus_tokens, index, number)
            for number, piece in enumerate(drawn.pieces)
        ]
        weight = {True: self._options.answer_weight, False: self._options.text_weight}
        weights = np.asarray([weight[piece.answer] for piece in drawn.pieces], np.float32)
        return np.concatenate(parts), np.repeat(weights, [len(ids) for ids in parts])

    def _real_text(self, count: int, *key: int) -> np.ndarray:
        """`count` tokens of the corpus from a random place on, BOS and EOS left out; fewer if it has no others."""
        total = len(self._corpus.tokens)
        start = hash64(self._seed, *key, FILLER) % total
        found: list[np.ndarray] = []
        read = 0
        while count > 0 and read < 2 * total + count:
            span = np.arange(start + read, start + read + count + 8) % total
            ids = np.asarray(self._corpus.tokens[span], np.int32)
            is_text = np.ones(len(ids), bool)
            for mark in self._marks:
                is_text &= ids != mark
            kept = ids[is_text][:count]
            found.append(kept)
            count -= len(kept)
            read += len(span)
        return np.concatenate([np.zeros(0, np.int32), *found])

    def _count(self, text: str) -> int:
        return len(self._encode(text))
