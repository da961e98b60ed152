"""What a batch and a corpus look like, in text for people."""

from typing import Any

import numpy as np

from bampath.data.corpus import TokenCorpus
from bampath.data.packing import Batch
from bampath.data.tokenizer import Tokenizer


def describe(batch: Batch, row: int = 0, tokenizer: Tokenizer | None = None, characters: int = 28) -> str:
    """One row of a batch, a line per segment: places, positions, how many targets carry loss, both ends of the text.

    The last column says what the segment's last input predicts: it must be "nothing" or a token of its own document.
    ValueError for a row that the batch does not have.
    """
    rows, length = batch["tokens"].shape
    if not 0 <= row < rows:
        raise ValueError(f"row={row} is not in this batch of {rows} rows")
    line = {name: np.asarray(array)[row] for name, array in batch.items()}
    edges = np.flatnonzero(np.diff(line["segment_ids"], prepend=line["segment_ids"][0] - 1))
    isolated = "on" if len({int(line["segment_ids"][e]) for e in edges} - {-1}) > 1 else "one document in this row"
    weighted = line["weights"] > 0
    head = f"row {row} of {rows}: {length} places, {int(weighted.sum())} with loss, document mask: {isolated}"
    out = [
        head,
        f"{'segment':>7} {'places':>13} {'positions':>13} {'loss':>6} {'weight':>9}  text, → target of the last place",
    ]
    for start, end in zip(edges, [*edges[1:], length], strict=True):
        out.append(_segment_line(line, int(start), int(end), tokenizer, characters))
    return "\n".join(out)


def _segment_line(line: dict[str, Any], start: int, end: int, tokenizer: Tokenizer | None, characters: int) -> str:
    segment = int(line["segment_ids"][start])
    weights = line["weights"][start:end]
    used = weights[weights > 0]
    span = (
        f"{used.min():g}–{used.max():g}"
        if len(used) and used.min() < used.max()
        else f"{used.max() if len(used) else 0:g}"
    )
    positions = f"{line['positions'][start]}–{line['positions'][end - 1]}"
    if segment < 0:
        return f"{'padding':>7} {f'{start}–{end - 1}':>13} {'':>13} {len(used):>6} {span:>9}"
    last = _text(line["targets"][end - 1 : end], tokenizer, 12) if weights[-1] > 0 else "nothing"
    text = _text(line["tokens"][start:end], tokenizer, characters)
    return f"{segment:>7} {f'{start}–{end - 1}':>13} {positions:>13} {len(used):>6} {span:>9}  {text} → {last}"


def _text(ids: np.ndarray, tokenizer: Tokenizer | None, characters: int) -> str:
    if tokenizer is None:
        shown = [str(int(i)) for i in ids]
        return " ".join(shown if len(shown) <= 8 else [*shown[:4], "…", *shown[-4:]])
    text = repr(tokenizer.decode(ids.tolist()))[1:-1]
    half = characters // 2
    return f"'{text}'" if len(text) <= characters else f"'{text[:half]} … {text[-half:]}'"


def card(corpus: TokenCorpus, sequence_length: int = 0) -> str:
    """A data set card: source, licence, tokenizer, counts, document lengths, rows per epoch at `sequence_length`."""
    info, lengths = corpus.info, corpus.lengths
    quantiles = [int(q) for q in np.quantile(lengths, [0, 0.1, 0.5, 0.9, 1])]
    facts = {
        "source": f"{info.get('source')} ({info.get('part')})",
        "of which": "; ".join(info.get("mixture", [])),
        "licence": info.get("licence"),
        "tokenizer": info.get("tokenizer"),
        "held out by": info.get("split"),
        "documents": f"{corpus.documents:,}"
        + (f" ({info['skipped']:,} empty ones left out)" if info.get("skipped") else ""),
        "first": ", ".join(info.get("first_names", [])[:5]),
        "tokens": f"{len(corpus.tokens):,}",
        "characters per token": f"{info['characters'] / len(corpus.tokens):.2f}" if "characters" in info else "",
        "tokens per document": "min {:,} · 10 % {:,} · median {:,} · 90 % {:,} · max {:,}".format(*quantiles),
        "rows per epoch": f"{-(-len(corpus.tokens) // sequence_length):,} of {sequence_length}"
        if sequence_length
        else "",
        "fingerprint": corpus.fingerprint,
    }
    return "\n".join(f"{name:>21}  {value}" for name, value in facts.items() if value)
