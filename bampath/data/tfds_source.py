"""Text from tensorflow-datasets, read as array_record files without TensorFlow."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bampath.data.formats import Document, ReadOptions, Source, decode

_AT_ONCE = 256


def open_tfds(spec: str, options: ReadOptions, split: str = "train") -> Source:
    """The source `NAME[@DATA_DIR]` or a prepared data set's folder.

    Reading needs `pip install tensorflow-datasets array_record`; a data set must have been prepared with
    file_format="array_record" (docs/data.md has the lines for FineWeb). ImportError without the package; ValueError for
    an unknown data set, another file format, a missing split or a missing text feature.
    """
    builder = _builder(spec)
    records = _records(builder, spec, split)
    feature = options.text_field
    if feature not in builder.info.features:
        raise ValueError(
            f"tfds:{spec} has no feature {feature!r}; it has {', '.join(map(repr, builder.info.features))}"
        )

    def read() -> Iterator[Document]:
        for start in range(0, len(records), _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, len(records)))
            for number, record in zip(numbers, records.__getitems__(list(numbers)), strict=True):
                where = f"tfds:{spec} record {number}"
                yield Document(decode(bytes(record[feature]), options.invalid_utf8, where), f"{split}:{number}")

    info = builder.info.splits[split]
    facts = (builder.info.full_name, split, info.num_examples, list(info.shard_lengths), info.num_bytes, options)
    identity = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    return Source(f"tfds:{spec}", identity, read, licence=str(builder.info.redistribution_info.license or ""))


def _builder(spec: str) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            f"source='tfds:{spec}' needs tensorflow-datasets: pip install tensorflow-datasets array_record"
        ) from error
    name, _, data_dir = spec.partition("@")
    if Path(name).expanduser().is_dir():
        return tfds.builder_from_directory(str(Path(name).expanduser()))
    try:
        return tfds.builder(name, data_dir=data_dir or None, file_format="array_record")
    except Exception as error:  # DatasetNotFoundError's text is a list of every data set there is
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"tfds:{name} cannot be opened: {first_line}") from error


def _records(builder: Any, spec: str, split: str) -> Any:
    if not builder.info.splits:
        raise ValueError(f"tfds:{spec} is not prepared in {builder.data_path}: run its download_and_prepare() first")
    if split not in builder.info.splits:
        raise ValueError(f"tfds:{spec} has no split {split!r}; it has {', '.join(builder.info.splits)}")
    try:
        return builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise ValueError(
            f"tfds:{spec} is not stored as array_record: prepare it with file_format='array_record'"
        ) from error
