"""Tokenised text on disk: built once per (text, tokenizer, split), checksummed, opened as a memory map.

A cache entry is a folder `train.tokens`, `train.offsets`, the same for `validation`, and `meta.json`. It is written
under another name and renamed when complete, so an entry that exists is whole; opening it checks sizes and checksums,
and a damaged entry is built anew.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import socket
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from bampath.data.config import DataConfig
from bampath.data.formats import Document, Source
from bampath.data.shards import JoinedTokens
from bampath.data.sources import open_source, split_rule
from bampath.data.tokenizer import Tokenizer, load_tokenizer

Part = Literal["train", "validation"]
PARTS: tuple[Part, ...] = ("train", "validation")
VERSION = 1
_CHUNK = 16 << 20
_CHECKED_CHUNKS = 16
_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 1024
logger = logging.getLogger(__name__)


class DamagedCacheError(ValueError):
    """A cache entry that is not what its own `meta.json` says."""


@dataclass(frozen=True)
class TokenCorpus:
    """Documents as one array of token ids. tokens: uint16 or uint32 [N], in memory or read where they are asked for;
    offsets: int64 [documents + 1]. parts: of a mixture, each with its weight; their tokens end to end are `tokens`.

    Document i is tokens[offsets[i] : offsets[i + 1]], BOS and EOS included where the configuration adds them.
    fingerprint depends on the token ids and the document borders only, not on where the text lay.
    """

    tokens: np.ndarray | JoinedTokens
    offsets: np.ndarray
    fingerprint: str
    info: dict[str, Any]
    parts: tuple[tuple["TokenCorpus", float], ...] = ()

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def document(self, index: int) -> np.ndarray:
        """Token ids of one document, int32."""
        return np.asarray(self.tokens[self.offsets[index] : self.offsets[index + 1]], np.int32)


def corpus_of(documents: Sequence[Sequence[int]], name: str = "memory") -> TokenCorpus:
    """A corpus of token lists, in memory: for tests, small studies and synthetic text."""
    lengths = [len(document) for document in documents]
    if not lengths or min(lengths) == 0:
        raise ValueError(f"corpus_of needs at least one document and no empty one, got lengths {lengths[:8]}")
    tokens = np.concatenate([np.asarray(document, np.uint32) for document in documents])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    digest = hashlib.blake2b(tokens.tobytes() + offsets.tobytes(), digest_size=16).hexdigest()
    return TokenCorpus(tokens, offsets, digest, {"source": name, "part": "memory"})


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The tokenizer that a configuration names. Errors as in `load_tokenizer`."""
    names = (config.bos_token or None, config.eos_token or None, config.pad_token or None)
    return load_tokenizer(config.tokenizer, *names, single_digits=config.single_digits)


def load_corpus(config: DataConfig, part: Part = "train", tokenizer: Tokenizer | None = None) -> TokenCorpus:
    """The tokens of one part of the configured text, from the cache if it is there, else built now.

    ValueError if the part is empty, naming the reason; errors of sources and tokenizers pass through.
    """
    from bampath.data import prepared  # which is made of corpora

    tokenizer = tokenizer or tokenizer_of(config)
    other = config.validation_source if part == "validation" else ""
    if prepared.mixture_of(other or config.source):
        return prepared.open_mixture(config, part, tokenizer, load_corpus)
    if part == "validation" and config.validation_source:
        return load_corpus(
            replace(config, source=config.validation_source, validation_source="", split="none"), "train", tokenizer
        )
    if config.source.startswith(prepared.SHARDS):
        return prepared.open_shards(config, part, tokenizer)
    if config.validation_source:
        config = replace(config, split="none")
    source = open_source(config.source, config.read_options)
    entry = cache_folder(config, source, tokenizer)
    try:
        corpus = open_entry(entry, part)
    except DamagedCacheError as error:
        logger.warning("the token cache %s is damaged (%s): building it anew", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        corpus = None
    if corpus is None:
        build_entry(entry, config, source, tokenizer)
        corpus = open_entry(entry, part)
    assert corpus is not None
    if corpus.documents == 0:
        raise ValueError(_empty_part(config, source, part, corpus))
    return corpus


def _empty_part(config: DataConfig, source: Source, part: Part, corpus: TokenCorpus) -> str:
    if corpus.info["skipped"] + corpus.info["other_documents"] == 0:
        return f"source {source.name} has no documents"
    if corpus.info["other_documents"] == 0:
        return f"all {corpus.info['skipped']} documents of source {source.name} are empty"
    return (
        f"the {part} part of {source.name} is empty: split={config.split!r} with validation_fraction="
        f"{config.validation_fraction} puts all {corpus.info['other_documents']} documents on the other side. Use "
        "documents='blocks', another fraction, or validation_source"
    )


def cache_root(folder: str = "") -> Path:
    """`folder`, else $BAMPATH_CACHE, else ~/.cache/bampath. ValueError where there is no home."""
    try:
        return Path(folder or os.environ.get("BAMPATH_CACHE") or "~/.cache/bampath").expanduser()
    except RuntimeError:
        raise ValueError(
            "there is no home folder for tokens and prompts: name another with data.cache_dir=FOLDER or $BAMPATH_CACHE"
        ) from None


def cache_folder(config: DataConfig, source: Source, tokenizer: Tokenizer) -> Path:
    """The folder of the cache entry for this text, tokenizer, split and document marks."""
    root = cache_root(config.cache_dir)
    facts = (VERSION, source.identity, tokenizer.fingerprint, config.add_bos, config.add_eos, config.split)
    key = repr((*facts, config.validation_fraction, config.max_documents)).encode()
    name = "".join(c if c.isalnum() else "-" for c in source.name)[-40:].strip("-")
    return root / f"{name}-{hashlib.blake2b(key, digest_size=12).hexdigest()}"


def open_entry(entry: Path, part: Part, check_all: bool = False) -> TokenCorpus | None:
    """The part of a cache entry, or None if there is no such entry. DamagedCacheError if it is not whole.

    Up to 16 chunks of 16 MiB, evenly spread, are checked against their checksums; all of them with `check_all`.
    """
    if not entry.is_dir():
        return None
    meta = _read_meta(entry)
    facts = meta["parts"][part]
    offsets_path, tokens_path = entry / f"{part}.offsets", entry / f"{part}.tokens"
    dtype = np.dtype(meta["dtype"])
    for path, size in ((offsets_path, 8 * (facts["documents"] + 1)), (tokens_path, dtype.itemsize * facts["tokens"])):
        actual = path.stat().st_size if path.is_file() else -1
        if actual != size:
            raise DamagedCacheError(
                f"{path.name} has {'no file' if actual < 0 else f'{actual} bytes'}, expected {size}"
            )
    _check_chunks(offsets_path, facts["offsets_chunks"], check_all)
    _check_chunks(tokens_path, facts["tokens_chunks"], check_all)
    tokens = np.memmap(tokens_path, dtype, "r").view(np.ndarray) if facts["tokens"] else np.zeros(0, dtype)
    offsets = np.fromfile(offsets_path, "<i8")
    other = next(p for p in PARTS if p != part)
    info = {**meta["facts"], **facts, "part": part, "other_documents": meta["parts"][other]["documents"]}
    return TokenCorpus(tokens, offsets, facts["fingerprint"], info)


def _read_meta(entry: Path) -> dict[str, Any]:
    try:
        meta = json.loads((entry / "meta.json").read_text("utf-8"))
        checksum = meta.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCacheError(f"meta.json cannot be read: {error}") from error
    if checksum != digest(json.dumps(meta, sort_keys=True).encode()):
        raise DamagedCacheError("meta.json does not have its own checksum")
    return meta


def _check_chunks(path: Path, digests: list[str], check_all: bool) -> None:
    count = len(digests) if check_all else min(_CHECKED_CHUNKS, len(digests))
    with path.open("rb") as file:
        for chunk in np.unique(np.linspace(0, len(digests) - 1, count).astype(int)) if digests else []:
            file.seek(int(chunk) * _CHUNK)
            if digest(file.read(_CHUNK)) != digests[chunk]:
                raise DamagedCacheError(f"chunk {chunk} of {path.name} does not have its checksum")


def _chunk_digests(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [digest(chunk) for chunk in iter(lambda: file.read(_CHUNK), b"")]


def digest(data: bytes) -> str:
    """Checksum of some bytes, as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def build_entry(entry: Path, config: DataConfig, source: Source, tokenizer: Tokenizer) -> None:
    """Tokenise the text into `entry`. Another process may do the same at the same time: the first to finish wins.

    OSError that names the cache, and how to choose another one, if it cannot be written.
    """
    work = entry.with_name(f"{entry.name}.tmp-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(entry)
        work.mkdir()
    except OSError as error:
        raise _unwritable(entry, error) from error
    try:
        _write_entry(work, config, source, tokenizer)
        try:
            work.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
    except OSError as error:
        if error.errno in _FULL:
            raise _unwritable(entry, error) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # said of what is written, never of a text that is read


def _unwritable(entry: Path, error: OSError) -> OSError:
    return OSError(
        f"the token cache {entry.parent} cannot be written ({error.strerror}): choose another folder with "
        "data.cache_dir=FOLDER or $BAMPATH_CACHE"
    )


def _remove_abandoned(entry: Path) -> None:
    """Delete what builds of this entry that were killed on this machine have left behind."""
    prefix = f"{entry.name}.tmp-{socket.gethostname()}-"
    for path in entry.parent.glob(f"{prefix}*"):
        left = re.fullmatch(r"(\d+)-\d+", path.name.removeprefix(prefix))
        if left is None:  # of another machine, whose name begins as this one's
            continue
        pid = int(left[1])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except PermissionError:
            pass


def _write_entry(work: Path, config: DataConfig, source: Source, tokenizer: Tokenizer) -> None:
    dtype = dtype_of(tokenizer)
    held_out = split_rule(source, config.split, config.validation_fraction)
    marks = marks_of(config, tokenizer)
    skipped = 0
    clock = time.monotonic()
    with contextlib.ExitStack() as files:
        opened = {part: files.enter_context((work / f"{part}.tokens").open("wb")) for part in PARTS}
        writers = {part: _PartWriter(file, dtype) for part, file in opened.items()}
        documents = itertools.islice(source.read(), config.max_documents or None)
        for document, row in tokenised(documents, tokenizer, marks):
            if len(row):
                writers["validation" if held_out(document) else "train"].add(document, row)
            else:
                skipped += 1
            if time.monotonic() - clock > 5:
                clock = time.monotonic()
                logger.info("tokenising %s: %s", source.name, {part: w.describe() for part, w in writers.items()})
    facts = {
        "source": source.name,
        "licence": source.licence,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "split": config.split,
        "skipped": skipped,
    }
    parts = {part: writer.finish(work, part) for part, writer in writers.items()}
    meta = {"version": VERSION, "dtype": dtype.str, "facts": facts, "parts": parts}
    meta["checksum"] = digest(json.dumps(meta, sort_keys=True).encode())
    (work / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True), "utf-8")


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """How token ids are stored: 16 bits where the vocabulary allows it."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def marks_of(config: DataConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids in front of and behind each document. ValueError if the tokenizer lacks a mark that is asked for."""
    found = []
    for option, name, token in (("add_bos", "bos", tokenizer.bos_id), ("add_eos", "eos", tokenizer.eos_id)):
        if getattr(config, option) and token is None:
            hint = f"name it with {name}_token or set {option}=false"
            raise ValueError(f"{option}=true, but the tokenizer {tokenizer.name} has no {name} token: {hint}")
        found.append([token] if getattr(config, option) and token is not None else [])
    return found[0], found[1]


def tokenised(
    documents: Iterable[Document], tokenizer: Tokenizer, marks: tuple[list[int], list[int]]
) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its token ids between its marks, [n]; n = 0 if its text is empty."""
    dtype = dtype_of(tokenizer)
    before, after = (np.asarray(ids, dtype) for ids in marks)
    for group in _groups(documents):
        encoded = tokenizer.encode_batch([document.text for document in group])
        for document, ids in zip(group, encoded, strict=True):
            row = np.concatenate([before, ids.astype(dtype), after]) if document.text else np.zeros(0, dtype)
            yield document, row


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups that are worth tokenising together."""
    group: list[Document] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(group) >= _BATCH_DOCUMENTS:
            yield group
            group, characters = [], 0
    if group:
        yield group


class _PartWriter:
    """Appends documents of one part to its token file."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self._file = file
        self._dtype = dtype
        self._offsets = array("q", [0])
        self._characters = 0
        self._names: list[str] = []

    def add(self, document: Document, row: np.ndarray) -> None:
        self._file.write(row.tobytes())
        self._offsets.append(self._offsets[-1] + len(row))
        self._characters += len(document.text)
        if len(self._names) < 8:
            self._names.append(document.name)

    def describe(self) -> str:
        return f"{len(self._offsets) - 1:,} documents, {self._offsets[-1]:,} tokens"

    def finish(self, folder: Path, part: str) -> dict[str, Any]:
        """Write the offsets of the (closed) token file; the facts about this part for `meta.json`."""
        offsets = np.frombuffer(self._offsets, np.int64).astype("<i8")
        offsets.tofile(folder / f"{part}.offsets")
        chunks = {f"{kind}_chunks": _chunk_digests(folder / f"{part}.{kind}") for kind in ("tokens", "offsets")}
        return {
            "documents": len(offsets) - 1,
            "tokens": int(offsets[-1]),
            "characters": self._characters,
            "first_names": self._names,
            "fingerprint": digest(repr((self._dtype.str, chunks)).encode()),
            **chunks,
        }
