"""Tokens in ArrayRecord shards: written once by many processes, read at random by the loader.

A prepared data set is a folder. Its text was cut into units (`sources.units_of`); unit 3 gave

    train-00003.array_record    its tokens, 4,096 per record (uint16 or uint32, little endian), fewer in the last
    train-00003.lengths         tokens of each document, uint32
    unit-00003.json             counts and checksums of the unit's files; it comes last, so a unit that has it is whole

and the same for `validation`. `dataset.json` comes when all units are there. Which process made a unit, and in which
order, changes nothing. ArrayRecord is the format that grain reads (github.com/google/array_record).
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 4096
DATASET_NAME, PLAN_NAME = "dataset.json", "plan.json"
_READER_OPTIONS = "readahead_buffer_size:0,index_storage_option:in_memory"
_WRITER_OPTIONS = "group_size:1,uncompressed"


class ShardTokens:
    """The tokens of one shard, as an array that is read where it is asked. Any number of threads may read."""

    def __init__(self, path: Path, count: int, dtype: np.dtype) -> None:
        self.path, self.dtype, self._count = path, dtype, count
        self._reader: Any = None
        self._opening = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def spans(self, starts: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        """tokens[start : start + count] for each pair; each record that they touch is read once.

        ValueError names the file if a record is damaged.
        """
        first, last = starts // BLOCK, (starts + np.maximum(counts, 1) - 1) // BLOCK
        touched = (range(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True))
        needed = sorted(set().union(*touched))
        records = dict(zip(needed, self._records(needed), strict=True))
        found = []
        for start, count, a, b in zip(starts.tolist(), counts.tolist(), first.tolist(), last.tolist(), strict=True):
            blocks = records[a] if a == b else np.concatenate([records[block] for block in range(a, b + 1)])
            found.append(blocks[start - a * BLOCK : start - a * BLOCK + count])
        return found

    def _records(self, blocks: list[int]) -> list[np.ndarray]:
        try:
            read = self._open().read(blocks) if blocks else []
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"{self.path} is damaged: {str(error).splitlines()[0]}") from error
        return [np.frombuffer(record, self.dtype) for record in read]

    def _open(self) -> Any:
        with self._opening:
            if self._reader is None:
                from array_record.python.array_record_module import ArrayRecordReader

                self._reader = ArrayRecordReader(str(self.path), _READER_OPTIONS)
            return self._reader


class JoinedTokens:
    """Arrays of tokens end to end, without a copy: shards of a data set, or the parts of a mixture."""

    def __init__(self, pieces: Sequence[Any], dtype: np.dtype) -> None:
        self.pieces, self.dtype = list(pieces), dtype
        self._borders = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._borders[-1])

    def __getitem__(self, where: slice | np.ndarray) -> np.ndarray:
        """A slice with step 1, or places int64 [n]; those that follow each other are read together."""
        if isinstance(where, slice):
            start, stop, step = where.indices(len(self))
            if step != 1:
                raise ValueError(f"tokens[{where}] has step {step}; only 1 is supported")
            return self.spans(np.asarray([start]), np.asarray([max(0, stop - start)]))[0]
        places = np.asarray(where, np.int64)
        begins = np.flatnonzero(np.diff(places, prepend=places[:1] - 2) != 1)
        lengths = np.diff(np.append(begins, len(places)))
        return np.concatenate([np.zeros(0, self.dtype), *self.spans(places[begins], lengths)])

    def spans(self, starts: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        """tokens[start : start + count] for each pair, every piece asked once. IndexError outside the array."""
        if len(starts) and (starts.min() < 0 or (starts + counts).max() > len(self)):
            raise IndexError(f"tokens [{starts.min()}, {(starts + counts).max()}) of {len(self)}")
        asked: dict[int, list[tuple[int, int, int]]] = {}
        at = np.searchsorted(self._borders, starts, side="right") - 1
        for span, (start, count, piece) in enumerate(zip(starts.tolist(), counts.tolist(), at.tolist(), strict=True)):
            while count > 0:
                low, high = int(self._borders[piece]), int(self._borders[piece + 1])
                taken = min(count, high - start)
                if taken:
                    asked.setdefault(piece, []).append((span, start - low, taken))
                start, count, piece = start + taken, count - taken, piece + 1
        parts: list[list[np.ndarray]] = [[] for _ in starts]
        for piece in sorted(asked):
            spans, local, taken_here = (np.asarray(column, np.int64) for column in zip(*asked[piece], strict=True))
            read = spans_of(self.pieces[piece], local, taken_here)
            for span, tokens in zip(spans.tolist(), read, strict=True):
                parts[span].append(tokens)
        return [_one(found, self.dtype) for found in parts]


def _one(found: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, dtype), *found])


def spans_of(tokens: Any, starts: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """tokens[start : start + count] for each pair, of an array or of what has `spans`."""
    if isinstance(tokens, np.ndarray):
        return [tokens[start : start + count] for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]
    return tokens.spans(starts, counts)


class ShardWriter:
    """Writes the tokens of documents into records of BLOCK tokens. Closed with `finish`, or thrown away. OSError names
    the file if it cannot be written."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        self._path, self._dtype = path, dtype
        self._writer: Any = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
        self._rest = np.zeros(0, dtype)
        self._digest = hashlib.blake2b(digest_size=16)
        self._lengths: list[int] = []

    def add(self, row: np.ndarray) -> None:
        """One document."""
        self._lengths.append(len(row))
        self._rest = np.concatenate([self._rest, row])
        full = len(self._rest) // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            self._write(self._rest[start : start + BLOCK])
        self._rest = self._rest[full:]

    def _write(self, block: np.ndarray) -> None:
        data = block.astype(self._dtype).tobytes()
        self._digest.update(data)
        with _failures(self._path):
            self._writer.write(data)

    def finish(self) -> dict[str, Any]:
        """Write what is left, and the lengths beside the shard; counts and checksums."""
        if len(self._rest):
            self._write(self._rest)
        lengths = np.asarray(self._lengths, "<u4")
        with _failures(self._path):
            self._writer.close()
            lengths.tofile(self._path.with_suffix(".lengths"))
        return {
            "documents": len(lengths),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "digest": self._digest.hexdigest(),
            "files": {path.name: file_facts(path) for path in (self._path, self._path.with_suffix(".lengths"))},
        }


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """A write that failed as OSError with the file's name: ArrayRecord raises RuntimeError, numpy has no name."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise OSError(
            f"{path} could not be written: {str(error).split(';')[0]}. Finished units stay: when there is room, the "
            "same command goes on from there"
        ) from error


def file_facts(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(16 << 20), b""):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()}


def write_json(path: Path, value: Any) -> None:
    """Write JSON with a checksum of its own, so that a crash leaves the old file or the new one."""
    text = json.dumps({**value, "checksum": _checksum(value)}, indent=1, sort_keys=True)
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}")
    temporary.write_text(text + "\n", "utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None if there is no such file or it is not what was written."""
    try:
        value = json.loads(path.read_text("utf-8"))
        checksum = value.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return value if checksum == _checksum(value) else None


def _checksum(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
