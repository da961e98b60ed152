"""Perplexity by position: `python -m bampath.evaluation.perplexity CHECKPOINT`.

One forward per long row, full attention and no sliding window; the loss of every token is averaged within windows of
positions over all rows, and the exponential taken last (the protocol of BAM's figures 8 and 9, arXiv 2505.22842). The
x axis is the position inside one row, and every window sees the same rows: choosing texts per length would make the
curve compare texts instead of positions.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from bampath.command import fail_gracefully
from bampath.data import DataConfig, TokenCorpus, load_corpus
from bampath.evaluation.command import add_checkpoint_options, check_options, load_reader, parse_length
from bampath.evaluation.questions import DoesNotFit
from bampath.evaluation.reader import Reader
from bampath.evaluation.results import environment, write_results
from bampath.intervals import Z95

Cut = Literal["within", "documents", "across"]
BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class PositionLoss:
    """Losses of rows summed per window of positions.

    totals: float64 [rows, windows], nats; counts: int64 [windows], tokens per row and window (the last window may be
    shorter); window: its size.
    """

    window: int
    totals: np.ndarray
    counts: np.ndarray

    @property
    def tokens(self) -> int:
        """Scored tokens in all."""
        return int(self.counts.sum()) * len(self.totals)

    @property
    def loss(self) -> np.ndarray:
        """Mean loss per window [windows]."""
        return self.totals.sum(axis=0) / (self.counts * len(self.totals))

    @property
    def mean_loss(self) -> float:
        """Mean loss of all tokens."""
        return float(self.totals.sum() / self.tokens)

    @property
    def standard_error(self) -> np.ndarray:
        """Of `loss`, with rows as the independent units [windows]; NaN for a single row."""
        if len(self.totals) < 2:
            return np.full(len(self.counts), np.nan)
        return (self.totals / self.counts).std(axis=0, ddof=1) / math.sqrt(len(self.totals))

    def rows(self, **more: Any) -> list[dict[str, Any]]:
        """One dict of plain values per window, `more` first; lower and upper are exp(loss ± 1.96 standard errors)."""
        ends = np.cumsum(self.counts)
        return [
            {
                **more,
                "benchmark": "perplexity",
                "start": int(end - count),
                "end": int(end),
                "tokens": int(count) * len(self.totals),
                "loss": float(loss),
                "perplexity": float(np.exp(loss)),
                "lower": float(np.exp(loss - Z95 * error)),
                "upper": float(np.exp(loss + Z95 * error)),
            }
            for end, count, loss, error in zip(ends, self.counts, self.loss, self.standard_error, strict=True)
        ]


def rows_of(
    corpus: TokenCorpus, length: int, cut: Cut = "within", *, limit: int = 0, drop: Sequence[int | None] = ()
) -> np.ndarray:
    """Rows int32 [R, length + 1] of a corpus: `length` inputs and the target of the last.

    cut: "within" takes consecutive pieces of every document (none crosses a border); "documents" takes the beginning of
    each document that is long enough (BAM on Wikipedia); "across" joins all documents (BAM on FineWeb, with BOS and EOS
    in `drop`). limit: at most so many rows, 0 all. DoesNotFit if there is no row, naming the longest document.
    """
    if length < 1 or limit < 0:
        raise ValueError(f"length={length} must be at least 1 and limit={limit} at least 0")
    if cut not in get_args(Cut):
        raise ValueError(f"cut={cut!r} is not one of {', '.join(get_args(Cut))}")
    width, marks = length + 1, [i for i in drop if i is not None]
    streams = [corpus.document(i) for i in range(corpus.documents)]
    if marks:
        streams = [stream[~np.isin(stream, marks)] for stream in streams]
    if cut == "across":
        streams = [np.concatenate(streams)]
    pieces = [min(len(stream) // width, 1 if cut == "documents" else len(stream)) for stream in streams]
    if not any(pieces):
        longest = max(map(len, streams))
        raise DoesNotFit(f"no row of {width} tokens: the longest text has {longest}; use a smaller length")
    rows = [stream[: n * width].reshape(n, width) for stream, n in zip(streams, pieces, strict=True)]
    return np.concatenate(rows)[: limit or None]


def loss_by_position(
    reader: Reader, rows: np.ndarray, window: int, *, batch_tokens: int = BATCH_TOKENS
) -> PositionLoss:
    """Losses of rows [R, L + 1], summed per `window` positions. Exact for any batch size: each token counts once."""
    length = rows.shape[1] - 1
    if not 1 <= window <= length:
        raise ValueError(f"window={window} must be between 1 and the rows' length {length}")
    size = min(len(rows), max(1, batch_tokens // length))
    edges = np.arange(0, length, window)
    totals = []
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        filled = np.concatenate([batch, np.repeat(batch[-1:], size - len(batch), axis=0)])  # one shape: compiled once
        losses = reader.losses(filled[:, :-1], filled[:, 1:])[: len(batch)]
        totals.append(np.add.reduceat(losses.astype(np.float64), edges, axis=1))
    return PositionLoss(window, np.concatenate(totals), np.diff(np.append(edges, length)))


def held_out(data: DataConfig, source: str | None) -> DataConfig:
    """The data options whose validation part is another text, if there is one."""
    return replace(data, validation_source=source) if source else data


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bampath.evaluation.perplexity", description="Perplexity of held-out text by position."
    )
    add_checkpoint_options(p)
    p.add_argument("--length", default="16x", help="tokens of a row, or times the training length (default 16x)")
    p.add_argument("--window", help="positions averaged together, in the same forms (default 1x, at most the row)")
    p.add_argument("--rows", type=int, default=64, help="at most so many rows, 0 for all (default 64)")
    p.add_argument("--cut", choices=get_args(Cut), default="within", help="how rows are cut (see rows_of)")
    p.add_argument("--source", help="another text than the held-out part of the training text")
    p.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens read together (default %(default)s)")
    return p


def sizes(args: argparse.Namespace, trained: int) -> tuple[int, int]:
    """(length, window) in tokens. Only a window that was asked for can be too long for the rows: the default one is as
    short as they are."""
    length = parse_length(args.length, "--length", trained)
    if args.window is None:
        return length, min(trained, length)
    return length, parse_length(args.window, "--window", trained)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_options(args, "batch_tokens", rows=0)
    sizes(args, 1)
    loaded, reader = load_reader(args)
    trained = loaded.config.model.train_length
    length, window = sizes(args, trained)
    corpus = load_corpus(held_out(loaded.config.data, args.source), "validation", loaded.tokenizer)
    drop = (loaded.tokenizer.bos_id, loaded.tokenizer.eos_id) if args.cut == "across" else ()
    rows = rows_of(corpus, length, args.cut, limit=args.rows, drop=drop)
    print(f"{loaded.path}  {loaded.config.model.position}, trained at {trained} tokens, step {loaded.step}")
    print(f"{len(rows)} rows of {length:,} tokens from {corpus.info['source']} ({args.cut})")
    result = loss_by_position(reader, rows, window, batch_tokens=args.batch_tokens)
    facts = {"case": loaded.config.model.position, "checkpoint": str(loaded.path), "step": loaded.step}
    for row in (records := result.rows(**facts)):
        span = f"{row['start']:,} to {row['end']:,}"
        band = f"[{row['lower']:.3f}, {row['upper']:.3f}]" if len(rows) > 1 else "(no interval from one row)"
        print(f"{span:>20}  perplexity {row['perplexity']:9.3f} {band}")
    print(f"all {result.tokens:,} tokens: loss {result.mean_loss:.4f}, perplexity {math.exp(result.mean_loss):.3f}")
    if args.out:
        write_results(Path(args.out), environment(), records)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
