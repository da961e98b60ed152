"""Weight files that hold nothing but numbers: safetensors, one file or several, read one tensor at a time.

Files that can run code when read (`pytorch_model.bin` and other pickles) are never opened.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bampath.convert.families import ConversionError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 1000**3  # at most so many per file, as transformers writes them


class Tensors(Protocol):
    """Named tensors of one model. shapes: name -> shape; read gives one tensor as the file holds it."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...


class SafetensorsFolder:
    """The safetensors of a folder. Headers are read and checked against the files' sizes at once."""

    def __init__(self, folder: Path) -> None:
        self._where: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _files(folder):
            for name, shape in _header(path).items():
                if name in self._where:
                    raise ConversionError(f"tensor {name} is in {self._where[name].name} and in {path.name}")
                self._where[name], self.shapes[name] = path, shape
        self._check_index(folder)

    def read(self, name: str) -> np.ndarray:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._where[name], framework="numpy") as file:
                return file.get_tensor(name)
        except (SafetensorError, TypeError, AttributeError) as error:
            raise ConversionError(f"{self._where[name]}: tensor {name} cannot be read: {error}") from None

    def _check_index(self, folder: Path) -> None:
        for name, file in _index(folder).items():
            found = self._where.get(name)
            if found is None or found.name != file:
                raise ConversionError(f"tensor {name} should be in {file} by {INDEX}, and is not")


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {name: file + "" for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} has no weight_map of files by tensor: {error!r}") from None


def _files(folder: Path) -> list[Path]:
    names = sorted(set(_index(folder).values())) or [SINGLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        pickles = [path.name for path in folder.glob("*.bin")] + [path.name for path in folder.glob("*.pt")]
        hint = f"; {pickles[0]} is a pickle, which can run code and is not read" if pickles else ""
        raise ConversionError(f"{folder} has no {missing[0]}{hint}")
    return [folder / name for name in names]


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor. ConversionError naming the first tensor that the file is too short for."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if 8 + length > size:
            raise ConversionError(f"{path} is cut short: its {size} bytes do not hold its header")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = {name: 8 + length + int(entry["data_offsets"][1]) for name, entry in header.items()}
            shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConversionError(f"{path} is not a safetensors file: {error}") from None
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > size:
            raise ConversionError(f"{path} is cut short: tensor {name} ends at byte {end} of a file of {size}")
    return shapes


def write_safetensors(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors to one file, or to several of at most `shard_bytes` with their index; one file's worth is in memory
    at a time."""
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        if held:
            shards.append(list(held))
            part = folder / f"part-{len(shards):05d}"
            part.touch()
            mode = part.stat().st_mode  # as the user's other files; safetensors' own is the owner's alone
            save_file(held, part, metadata={"format": "pt"})
            part.chmod(mode)
            held.clear()

    for name, array in tensors:
        if held and sum(a.nbytes for a in held.values()) + array.nbytes > shard_bytes:
            flush()
        held[name] = np.ascontiguousarray(array)
        total += array.nbytes
    flush()
    if len(shards) == 1:
        (folder / "part-00001").replace(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number:05d}").replace(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
