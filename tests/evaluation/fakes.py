"""Stand-ins for what evaluations work with: a tokenizer to count by hand, and readers with known logits."""

import re
from collections.abc import Sequence

import numpy as np


class WordTokenizer:
    """One token per word, punctuation mark, space before a digit, and group of at most `group` digits."""

    name = "words"
    pad_id = 0
    eos_id = None

    def __init__(self, group: int = 1, bos: bool = False) -> None:
        self._pattern = re.compile(rf"\d{{1,{group}}}|[A-Za-z]+|[^\sA-Za-z\d]|\s(?=\d)")
        self._ids: dict[str, int] = {"<pad>": 0, "<s>": 1}
        self._words: list[str] = ["<pad>", "<s>"]
        self.bos_id = 1 if bos else None
        self.fingerprint = f"words-{group}-{bos}"

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        found = []
        for word in self._pattern.findall(text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            found.append(self._ids[word])
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(self.encode(text), np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words[int(i)] for i in ids)


class Oracle:
    """Knows what comes next in the prompts: copies from where the last `context` tokens stood before."""

    def __init__(self, vocab: int, context: int = 4) -> None:
        self.vocab, self.context, self.shapes = vocab, context, set()

    def logits_at(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        self.shapes.add((tokens.shape, places.shape))
        logits = np.zeros((*places.shape, self.vocab), np.float32)
        for row, ats in enumerate(places):
            for column, at in enumerate(ats):
                logits[row, column, self._next(tokens[row, : at + 1].tolist())] = 30.0
        return logits

    def _next(self, seen: list[int]) -> int:
        last = seen[-self.context :]
        for start in range(len(seen) - self.context):
            if seen[start : start + self.context] == last:
                return seen[start + self.context]
        return 0

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """A loss that says which token and which place it belongs to."""
        self.shapes.add(tokens.shape)
        return (targets + np.arange(tokens.shape[1])[None, :] / 1024).astype(np.float32)


class Guesser(Oracle):
    """Any of the ten digits with equal chance, whatever stands before."""

    def __init__(self, vocab: int, digits: Sequence[int], seed: int = 0) -> None:
        super().__init__(vocab)
        self._digits, self._random = list(digits), np.random.default_rng(seed)

    def logits_at(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        logits = np.full((*places.shape, self.vocab), -30.0, np.float32)
        logits[..., self._digits] = self._random.normal(size=(*places.shape, len(self._digits)))
        return logits


class Bigrams:
    """A model whose next token depends on the last one only: p(next | last) = table[last, next]."""

    def __init__(self, table: np.ndarray) -> None:
        self.table, self.rows = np.asarray(table, np.float64), 0

    def logits_at(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        self.rows += len(tokens)
        return np.log(self.table)[np.take_along_axis(tokens, places, axis=1)].astype(np.float32)

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return -np.log(self.table)[tokens, targets].astype(np.float32)

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int, stop) -> list[list[int]]:
        found = []
        for prompt in prompts:
            row: list[int] = []
            while len(row) < new_tokens and not (stop is not None and row and stop(row)):
                row.append(int(self.table[[*prompt, *row][-1]].argmax()))
            found.append(row)
        return found
