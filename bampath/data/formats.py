"""Readers of text files: `.txt`, `.jsonl` and `.parquet`, one document at a time, every error with its place."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

InvalidUtf8 = Literal["error", "replace", "keep"]
_POLICIES = {"error": "strict", "replace": "replace", "keep": "surrogateescape"}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_LONE_SURROGATE_NOT_KEPT = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_PARQUET_ROWS = 1024


@dataclass(frozen=True)
class Document:
    """One text and a name for it (file, line or row), for messages and cards."""

    text: str
    name: str


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order. `identity` changes when the text may have changed; it is not kept in checkpoints.

    years: whether a document's name starts with its year, which the split rule "years" needs. files: what is read, in
    order, if it is files; required: columns that their parquet files must have beside the text.
    """

    name: str
    identity: str
    read: Callable[[], Iterator[Document]]
    licence: str = ""
    years: bool = False
    files: tuple[Path, ...] = ()
    required: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents.

    documents: "file" (a `.txt` file is one document) or "blocks" (blank lines separate documents);
    text_field: key of a `.jsonl` object, column of a `.parquet` file, feature of a tfds data set;
    invalid_utf8: "error", "replace" (by U+FFFD) or "keep" (byte for byte, for the byte tokenizer only).
    """

    documents: Literal["file", "blocks"] = "file"
    text_field: str = "text"
    invalid_utf8: InvalidUtf8 = "error"


def decode(data: bytes, policy: InvalidUtf8, where: str) -> str:
    """UTF-8 bytes as text, without a byte order mark. For policy "error", ValueError names `where` and the byte."""
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", _POLICIES[policy])
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8; "
            "set invalid_utf8 to 'replace' or, with the byte tokenizer, to 'keep'"
        ) from error


def read_txt(path: Path, options: ReadOptions) -> Iterator[Document]:
    """The file as one document, or, streamed, its blocks between blank lines."""
    if options.documents == "file":
        yield Document(decode(path.read_bytes(), options.invalid_utf8, str(path)), path.stem)
        return
    for start, block in _blocks(path):
        text = decode(block, options.invalid_utf8, f"{path}, block that starts in line {start}")
        yield Document(text.rstrip("\r\n"), f"{path.stem}:{start}")


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, bytes) of each run of lines that are not blank."""
    lines: list[bytes] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                lines.append(line)
            elif lines:
                yield number - len(lines), b"".join(lines)
                lines = []
    if lines:
        yield number - len(lines) + 1, b"".join(lines)


def read_jsonl(path: Path, options: ReadOptions) -> Iterator[Document]:
    """One document per line; empty lines are skipped. ValueError names the line that is not as it should be."""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            line = decode(raw, options.invalid_utf8, f"{path} line {number}").strip()
            if line:
                yield Document(_json_text(line, options, f"{path} line {number}"), f"{path.stem}:{number}")


def _json_text(line: str, options: ReadOptions, where: str) -> str:
    field, policy = options.text_field, options.invalid_utf8
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object with a field {field!r}, not a {type(record).__name__}")
    if field not in record:
        raise ValueError(f"{where} has no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}")
    if not isinstance(record[field], str):
        raise ValueError(f"{where}: field {field!r} is a {type(record[field]).__name__}, not a string")
    return _no_lone_surrogates(record[field], policy, where)


def _no_lone_surrogates(text: str, policy: InvalidUtf8, where: str) -> str:
    r"""JSON can spell half a character, as in "\ud800"; those that stand for kept bytes are let through."""
    pattern = _LONE_SURROGATE_NOT_KEPT if policy == "keep" else _LONE_SURROGATE
    if text.isascii() or not pattern.search(text):
        return text
    if policy == "error":
        raise ValueError(f"{where}: the text holds a lone surrogate, which is not text; set invalid_utf8 to 'replace'")
    return pattern.sub("\ufffd", text)


def read_parquet(
    path: Path, options: ReadOptions, required: tuple[str, ...] = (), groups: range | None = None
) -> Iterator[Document]:
    """One document per row, streamed a part of a row group at a time.

    required: columns that must exist as well; groups: only these row groups.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    with file:
        column = options.text_field
        _check_columns(path, file.schema_arrow, (column, *required))
        groups = range(file.num_row_groups) if groups is None else groups
        row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
        try:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=list(groups), columns=[column]):
                for value in batch.column(0).cast(pyarrow.large_binary()):
                    yield _parquet_document(value.as_py(), path, row, options)
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged after row {row}: {error}") from error


def _check_columns(path: Path, schema: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(map(repr, schema.names))}")
    kind = str(schema.field(names[0]).type)
    if kind not in ("string", "large_string", "string_view", "binary", "large_binary"):
        raise ValueError(f"{path}: column {names[0]!r} holds {kind}, not text")


def _parquet_document(data: bytes | None, path: Path, row: int, options: ReadOptions) -> Document:
    return Document(decode(data or b"", options.invalid_utf8, f"{path} row {row}"), f"{path.stem}:{row}")


def parquet_group_bytes(path: Path) -> list[int]:
    """Uncompressed size of each row group. ValueError if the file cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


READERS: dict[str, Callable[[Path, ReadOptions], Iterator[Document]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
