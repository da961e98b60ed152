"""What a reader gets wrong on a state-tracking task."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bampath.evaluation.reader import Reader
from bampath.evaluation.state.tasks import Rows, StateTask, spec_of
from bampath.intervals import wilson

BATCH_TOKENS = 65_536
BLOCK = 64  # rows per random stream, so that the rows do not depend on the batch size


@dataclass(frozen=True)
class StateScore:
    """One test: `right` bool and `depth` int32, one entry per answer in the order asked; `row_of`: whose."""

    task: str
    test: str
    sequences: int
    right: np.ndarray
    depth: np.ndarray
    row_of: np.ndarray

    @property
    def error(self) -> float:
        """Share of the answers that are wrong."""
        return 1 - float(self.right.mean())

    @property
    def sequence_right(self) -> int:
        """Rows without a wrong answer."""
        return self.sequences - len(np.unique(self.row_of[~self.right]))

    def row(self, **more: Any) -> dict[str, Any]:
        """Plain values, `more` first. error has Wilson's 95 % interval with answers as units, sequence_accuracy with
        rows as units; by_depth: wrong answers per power of two of the depth; by_length: rows right up to each depth
        where every row is asked at every depth (word problems), else empty."""
        wrong, answers = int((~self.right).sum()), len(self.right)
        low, high = wilson(wrong, answers)
        first, last = wilson(self.sequence_right, self.sequences)
        return {
            **more,
            "benchmark": "state",
            "task": self.task,
            "test": self.test,
            "answers": answers,
            "wrong": wrong,
            "error": self.error,
            "lower": low,
            "upper": high,
            "sequences": self.sequences,
            "sequences_right": self.sequence_right,
            "sequence_accuracy": self.sequence_right / self.sequences,
            "sequence_lower": first,
            "sequence_upper": last,
            "by_depth": self._by_depth(),
            "by_length": self._by_length(),
        }

    def _by_depth(self) -> list[dict[str, int]]:
        bucket = np.ceil(np.log2(np.maximum(self.depth, 1))).astype(int)
        return [
            {"to": 2**b, "answers": int((bucket == b).sum()), "wrong": int((~self.right[bucket == b]).sum())}
            for b in sorted(set(bucket.tolist()))
        ]

    def _by_length(self) -> list[dict[str, int]]:
        longest = int(self.depth.max())
        if len(self.right) != self.sequences * longest or longest < 2:
            return []
        table = self.right.reshape(self.sequences, longest)  # rows are asked at depths 1 … longest, in this order
        good = np.logical_and.accumulate(table, axis=1).sum(axis=0)
        return [{"length": t + 1, "right": int(n)} for t, n in enumerate(good)]


def score(
    reader: Reader,
    task: StateTask,
    test: str,
    sequences: int,
    *,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    ids: np.ndarray | None = None,
) -> StateScore:
    """Ask `reader` for the likeliest symbol at every place that is scored, on rows that (task, seed) determine.

    ids [vocab_size]: the reader's token of each of the task's symbols; then the likeliest of the answers' tokens counts
    (a model of text would rather go on in another way). By default symbols are tokens, and the likeliest of all counts.
    """
    if sequences < 1:
        raise ValueError(f"sequences={sequences} must be at least 1")
    blocks = -(-sequences // BLOCK)
    together = min(blocks, max(1, batch_tokens // (BLOCK * task.length)))
    size = together * BLOCK
    right, depth, row_of = [], [], []
    for start in range(0, sequences, size):  # whole batches, the last one too: compiled once
        rows = _join([task.draw(np.random.default_rng([seed, start // BLOCK + i]), BLOCK) for i in range(together)])
        keep = (rows.weights > 0) & (np.arange(size) < sequences - start)[:, None]
        tokens = rows.tokens if ids is None else ids[rows.tokens].astype(np.int32)
        row, place = np.nonzero(keep)
        right.append(_likeliest(reader, task, tokens, keep, ids) == rows.targets[row, place])
        depth.append(rows.depth[row, place])
        row_of.append(start + row)
    return StateScore(
        spec_of(task), test, sequences, np.concatenate(right), np.concatenate(depth), np.concatenate(row_of)
    )


def _join(blocks: list[Rows]) -> Rows:
    joined = lambda name: np.concatenate([getattr(block, name) for block in blocks])
    return Rows(joined("tokens"), joined("targets"), joined("weights"), joined("depth"))


def _likeliest(
    reader: Reader, task: StateTask, tokens: np.ndarray, keep: np.ndarray, ids: np.ndarray | None
) -> np.ndarray:
    """The symbol that the reader expects after each kept place, in row-major order."""
    places = np.argsort(~keep, axis=1, kind="stable")[:, : task.asked]  # one shape for all tests: compiled once
    logits = reader.logits_at(tokens, places.astype(np.int32))
    if ids is not None:
        answers = np.asarray(task.answers)
        found = answers[logits[:, :, ids[answers]].argmax(axis=2)]
    else:
        found = logits.argmax(axis=2)
    asked = np.take_along_axis(keep, places, axis=1)
    return found[asked]
