"""Metrics as (total, weight) pairs, and the files that they are written to.

`metrics.jsonl` holds one JSON object per line, with its `step` and its `kind` ("train" or "eval"). A resumed run cuts
what was written after the step that it resumes from, so no step appears twice, and a line that a crash cut short is
dropped. TensorBoard shows the same numbers under the same names.
"""

import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp

from bampath.checkpoint import SaveError

Array = jax.Array
JSONL_NAME = "metrics.jsonl"


class Mean(NamedTuple):
    """A weighted mean that has not been divided yet: numerators and denominators add up, means do not."""

    total: Array
    weight: Array

    @classmethod
    def zero(cls) -> "Mean":
        return cls(jnp.float32(0), jnp.float32(0))

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        """total / weight; NaN if nothing was counted."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else math.nan


class Writer:
    """Appends records to `run_dir/metrics.jsonl` and, if asked, to TensorBoard event files beside it.

    `resumed_step`: records of later steps are removed first (0 keeps none). Each record is flushed to the operating
    system before `write` returns, so a killed process loses none. One that is not `active` writes nothing: of several
    processes one does.
    """

    def __init__(self, run_dir: Path, resumed_step: int = 0, tensorboard: bool = False, *, active: bool = True) -> None:
        self._path, self._board_path = Path(run_dir) / JSONL_NAME, Path(run_dir) / "tensorboard"
        self._file: TextIO | None = None
        self._board: _Board | None = None
        if not active:
            return
        if tensorboard:
            with _failures(self._board_path):
                self._board = _Board(self._board_path, resumed_step)
        try:
            with _failures(self._path):
                _cut_after(self._path, resumed_step)
                self._file = self._path.open("a", encoding="utf-8")
        except (SaveError, ValueError):
            self.close()
            raise

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record; NaN and infinity are written as null, as JSON has neither. SaveError if that fails."""
        if self._file is None:
            return
        plain = {name: _plain(value) for name, value in values.items()}
        try:
            with _failures(self._path):
                self._file.write(json.dumps({"kind": kind, "step": step, **plain}, allow_nan=False) + "\n")
                self._file.flush()
            if self._board is not None:
                with _failures(self._board_path):
                    self._board.add(kind, step, plain)
        except SaveError:
            self.close()
            raise

    def close(self) -> None:
        for opened in (self._file, self._board):
            with suppress(OSError):  # what has been flushed is there; closing tries again to write what could not be
                if opened is not None:
                    opened.close()
        self._file = self._board = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def read(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl` file, in order. A last line that was cut short is left out.

    ValueError that names the file and the line where another one is no record.
    """
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                continue
            try:
                record = json.loads(line)
                record["kind"], record["step"] + 0
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path}, line {number} is no record: {line[:60]!r}; delete the line") from None
            yield record


def _cut_after(path: Path, step: int) -> None:
    """Rewrite the file without records of later steps, by a rename, so that a crash leaves the old or the new one."""
    if not path.exists():
        return
    kept = [record for record in read(path) if record["step"] <= step]
    temporary = path.with_suffix(".jsonl.partial")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """Errors of the file system as SaveError, with the file's name."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{path} could not be written: {error.strerror or error}") from error


class _Board:
    """A new event file for TensorBoard, each record of which is with the operating system when `add` returns.
    tensorboardX's own writer has a thread for it, and when that has died of a full disk, whoever adds waits for ever.

    resumed_step: TensorBoard hides what earlier files have of later steps (0: nothing).
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # heavy, and only wanted when a run is really logged

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if resumed_step:
            begin = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=time.time(), step=resumed_step + 1, session_log=begin))
        try:
            self._write(events)
        except OSError:
            self._file.close()
            raise

    def add(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """The numbers among the values of one record."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        event = lambda name, value: Event(wall_time=time.time(), step=step, summary=scalar(f"{kind}/{name}", value))
        self._write([event(name, value) for name, value in numbers.items()])

    def _write(self, events: Sequence[Any]) -> None:
        """Records of the TFRecord format: length, its checksum, data, their checksum."""
        from tensorboardX.record_writer import masked_crc32c

        framed = b""
        for event in events:
            data: bytes = event.SerializeToString()
            length = struct.pack("<Q", len(data))
            framed += length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
        self._file.write(framed)

    def close(self) -> None:
        self._file.close()
