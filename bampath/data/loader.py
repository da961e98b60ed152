"""Batches: a pure function of (seed, step) over the global batch, prefetched by grain, resumed by a number.

The row at place `step · batch_size + i` of an endless stream is computed directly (see `order`), each process makes its
own slice of it, and grain's threads make the batches of the next steps while the current one trains. Threads suffice:
tokens lie ready in a memory map, so a batch is a few copies and cumulative sums that take milliseconds. Processes would
have to start, to import everything again and to pickle what they make. The number of workers cannot change what comes
out, because batches are numbered.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import numpy as np

from bampath.data.config import DataConfig
from bampath.data.corpus import Part, TokenCorpus, load_corpus, tokenizer_of
from bampath.data.mixing import RetrievalRows
from bampath.data.order import interleave, permute
from bampath.data.packing import Batch, gather, make_batch, plan_rows
from bampath.data.rows import rows_of
from bampath.data.tokenizer import Tokenizer

STATE_VERSION = 1
_ENDLESS = 1 << 48


class BatchSource:
    """Random access to one process's rows of every batch: `source[step]`. Used by grain as a data source."""

    def __init__(
        self,
        config: DataConfig,
        corpus: TokenCorpus,
        tokenizer: Tokenizer,
        rows: np.ndarray | None = None,
    ) -> None:
        self.config, self.corpus, self.tokenizer = config, corpus, tokenizer
        self.plan = plan_rows(corpus.offsets, config.sequence_length, config.packing)
        self._rows = rows_of(config, corpus, tokenizer.pad_id)
        self._slice = checked_rows(rows, config.batch_size)
        share = config.retrieval.share
        self._retrieval = (
            RetrievalRows(config.retrieval, corpus, tokenizer, config.sequence_length, config.seed) if share else None
        )

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, step: int) -> Batch:
        """The batch of `step`, arrays [rows of this process, sequence_length] as in `packing.make_batch`."""
        config = self.config
        is_retrieval, index = interleave(int(step) * config.batch_size + self._slice, config.retrieval.share)
        tokens, borders, counts = self.corpus_rows(index[~is_retrieval])
        loss = None
        if self._retrieval is not None:
            made = self._retrieval.rows(index[is_retrieval])
            loss = np.ones_like(tokens, np.float32)
            plain = (tokens, borders, counts, loss)
            tokens, borders, counts, loss = (_merge(is_retrieval, a, b) for a, b in zip(plain, made, strict=True))
        return make_batch(tokens, borders, counts, loss, self.tokenizer.pad_id, config.document_mask)

    def corpus_rows(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, borders and counts (as `packing.gather` has them) of places int64 [n] of the corpus's own stream."""
        return self._rows(places)


def _merge(second: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rows of `a` where `second` is false and of `b` where it is true, in order."""
    out = np.empty((len(second), *a.shape[1:]), a.dtype)
    out[~second], out[second] = a, b
    return out


class Loader:
    """An endless iterator over batches whose whole state is the number of the next step.

    `state()` is a small dict for JSON; `restore(state)` continues there at once, after checking that text, tokenizer,
    seed and everything else that decides the order are the same. The number of processes and workers may change.
    """

    def __init__(self, source: BatchSource) -> None:
        import grain

        self.source = source
        workers = source.config.workers
        options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers * source.config.prefetch)
        self._batches: Any = iter(grain.MapDataset.source(source).to_iter_dataset(options))

    @property
    def step(self) -> int:
        """The step whose batch comes next."""
        return int(self._batches.get_state()["next_index"])

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def batch_at(self, step: int) -> Batch:
        """The batch of any step; the iteration stays where it is."""
        return self.source[step]

    def state(self) -> dict[str, Any]:
        """{"version", "step", "identity"}: what a checkpoint keeps."""
        return {"version": STATE_VERSION, "step": self.step, "identity": identity(self.source)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at state["step"]. ValueError, naming every difference, if the batches would not be the same ones."""
        check_state(state, identity(self.source))
        self._batches.set_state({"next_index": int(state["step"])})

    def close(self) -> None:
        """Stop the workers."""
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_loader(
    config: DataConfig,
    *,
    part: Part = "train",
    rows: np.ndarray | None = None,
    corpus: TokenCorpus | None = None,
    tokenizer: Tokenizer | None = None,
) -> Loader:
    """The loader of a configuration; text and tokenizer may be given instead of being opened.

    rows: which rows of every global batch this process makes (`bampath.sharding.local_rows`), default: all of them.
    What a row holds does not depend on who makes it.
    """
    tokenizer = tokenizer or tokenizer_of(config)
    corpus = corpus or load_corpus(config, part, tokenizer)
    return Loader(BatchSource(config, corpus, tokenizer, rows))


def checked_rows(rows: np.ndarray | None, batch_size: int) -> np.ndarray:
    """The rows of a batch that a process makes, int64. ValueError unless they ascend within [0, batch_size)."""
    if rows is None:
        return np.arange(batch_size, dtype=np.int64)
    found = np.asarray(rows, np.int64)
    if found.ndim != 1 or not len(found) or found[0] < 0 or found[-1] >= batch_size or (np.diff(found) <= 0).any():
        raise ValueError(f"rows={found.tolist()} must ascend within [0, batch_size={batch_size})")
    return found


def identity(source: BatchSource) -> dict[str, Any]:
    """Everything that decides which tokens come at which step, as flat JSON values."""
    return {
        "corpus": source.corpus.fingerprint,
        "tokenizer": source.tokenizer.fingerprint,
        **row_options(source.config),
    }


def row_options(config: DataConfig) -> dict[str, Any]:
    """The options that decide which tokens of a corpus come at which step, under their (dotted) names."""
    names = ("seed", "sequence_length", "batch_size", "packing", "document_mask", "shuffle")
    retrieval = asdict(config.retrieval) if config.retrieval.share else {"share": 0.0}
    return {
        **{name: getattr(config, name) for name in names},
        **{f"retrieval.{name}": value for name, value in retrieval.items()},
    }


def check_state(state: dict[str, Any], now: dict[str, Any]) -> None:
    """ValueError unless `state` was saved by a loader of this version and with the identity `now`."""
    if state.get("version") != STATE_VERSION:
        raise ValueError(
            f"the data state has version {state.get('version')!r}; this code reads version {STATE_VERSION}"
        )
    saved = state["identity"]
    different = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    if different:
        lines = [f"  {name}: saved {saved.get(name)!r}, now {now.get(name)!r}" for name in different]
        raise ValueError(
            "cannot resume the data stream: it would not be the same stream. Different are\n" + "\n".join(lines)
        )
    if not isinstance(state["step"], int) or not 0 <= state["step"] < _ENDLESS:
        raise ValueError(f"the data state has step={state['step']!r}; it must be an integer of at least 0")


def validation_batches(
    config: DataConfig,
    *,
    batches: int = 0,
    rows: np.ndarray | None = None,
    corpus: TokenCorpus | None = None,
    tokenizer: Tokenizer | None = None,
) -> Iterator[Batch]:
    """The held-out text once, in order and without retrieval rows; at most `batches` batches, 0 means all. Rows of a
    mixture come in another order, so that a few batches have rows of all its parts.

    Every token is scored exactly once for any batch size and any sharing out of rows (as in `make_loader`): the last
    batch is filled up with rows of padding, which have weight 0. All processes get equally many batches.
    """
    tokenizer = tokenizer or tokenizer_of(config)
    corpus = corpus or load_corpus(config, "validation", tokenizer)
    source, mine = BatchSource(config, corpus, tokenizer), checked_rows(rows, config.batch_size)
    total = math.ceil(source.plan.rows / config.batch_size)
    for step in range(min(batches, total) if batches else total):
        places = step * config.batch_size + mine
        places = places[places < source.plan.rows]
        if corpus.parts:
            places = permute(places, source.plan.rows, key=0)
        starts, counts = source.plan.spans(places, np.zeros_like(places))
        tokens, borders = gather(corpus, starts, counts, config.sequence_length + 1, tokenizer.pad_id)
        batch = make_batch(tokens, borders, counts, None, tokenizer.pad_id, config.document_mask)
        yield {name: _fill_up(array, len(mine), _PADDING.get(name, tokenizer.pad_id)) for name, array in batch.items()}


_PADDING = {"weights": 0, "segment_ids": -1, "positions": 0}


def _fill_up(array: np.ndarray, rows: int, value: float) -> np.ndarray:
    return np.concatenate([array, np.full((rows - len(array), *array.shape[1:]), value, array.dtype)])
