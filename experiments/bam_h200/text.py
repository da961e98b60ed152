"""The study's text: files of GPT-2 tokens, or any source that bampath.data reads, and a smaller vocabulary for both.

GPT-2's ids are in the order of its merges (bytes 0 … 255, then merge i at 256 + i, then the end of text), and a merge
only ever joins tokens of earlier merges. So the tokens of a BPE that stops after the first n merges are those of the
whole BPE with every later token cut into its two halves again and again: `cut` does that to a file of ids, and
`tokenizer_file` makes the tokenizer that gives the same ids.
"""

import hashlib
import json
import lzma
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bampath.data import DataConfig, TokenCorpus, load_corpus, tokenizer_of

BYTES = 256


def read(path: Path) -> bytes:
    """A file that may be packed with xz."""
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def tokenizer_file(gpt2: Path, vocab_size: int, out: Path) -> Path:
    """Write GPT-2's tokenizer with the first vocab_size - 257 of its merges to `out`, unless it is there already.

    gpt2: its tokenizer.json (or .json.xz). The last id is the end of text. ValueError for a size outside 257 … 50257
    (or what the file holds).
    """
    if not out.exists():
        whole: dict[str, Any] = json.loads(read(gpt2))
        model, merges = whole["model"], vocab_size - BYTES - 1
        if not 0 <= merges <= len(model["merges"]):
            most = BYTES + 1 + len(model["merges"])
            raise ValueError(f"vocab_size={vocab_size} must be between {BYTES + 1} and {most}, the size of {gpt2}")
        kept = {token: index for token, index in model["vocab"].items() if index < BYTES + merges}
        kept["<|endoftext|>"] = BYTES + merges
        model |= {"vocab": kept, "merges": model["merges"][:merges]}
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f"{out.name}.{os.getpid()}")
        partial.write_text(json.dumps(whole), encoding="utf-8")
        os.replace(partial, out)
    return out


def pieces(gpt2: Path, vocab_size: int) -> list[list[int]]:
    """For every GPT-2 id the ids, in a vocabulary of vocab_size, that it is cut into."""
    model = json.loads(read(gpt2))["model"]
    ids, last = model["vocab"], vocab_size - 1
    found = [[index] for index in range(BYTES)]
    for index, merge in enumerate(model["merges"], BYTES):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        found.append([index] if index < last else found[ids[left]] + found[ids[right]])
    return [*found, [last]]


def cut(tokens: np.ndarray, table: list[list[int]]) -> np.ndarray:
    """GPT-2 ids [N] as ids of the smaller vocabulary, uint16 [M], M >= N. table: `pieces`."""
    counts = np.array([len(entry) for entry in table])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    flat = np.array([index for entry in table for index in entry], np.uint16)
    own = counts[tokens]
    if (own == 1).all():
        return flat[starts[tokens]]
    ends = np.cumsum(own)
    within = np.arange(ends[-1]) - np.repeat(ends - own, own)
    return flat[np.repeat(starts[tokens], own) + within]


def corpus_of_file(path: Path, gpt2: Path, vocab_size: int) -> TokenCorpus:
    """A file of little-endian uint16 GPT-2 ids (.u16, or .u16.xz), an end of text after every document, as a corpus."""
    given, table = np.frombuffer(read(path), "<u2"), pieces(gpt2, vocab_size)
    if len(given) and given.max() >= len(table):
        raise ValueError(f"{path} has the token {given.max()}, but the last one of {gpt2} is {len(table) - 1}")
    tokens = cut(given, table)
    ends = np.flatnonzero(tokens == vocab_size - 1) + 1
    if not len(ends) or ends[-1] != len(tokens):
        raise ValueError(f"{path} must be documents of GPT-2 tokens with an end of text (its last id) after each")
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
    return TokenCorpus(tokens, offsets, digest, {"source": path.name, "part": "file"})


def is_tokens(source: str) -> bool:
    """Whether a source is a file of GPT-2 tokens."""
    return source.endswith((".u16", ".u16.xz"))


def corpus(config: DataConfig, source: str, gpt2: Path, vocab_size: int) -> TokenCorpus:
    """`source` (a file of GPT-2 tokens, or what bampath.data reads) as tokens of the smaller vocabulary."""
    if is_tokens(source):
        return corpus_of_file(Path(source), gpt2, vocab_size)
    whole = replace(config, source=source, validation_source="", split="none")
    return load_corpus(whole, "train", tokenizer_of(whole))
