"""Data sets of shards: made in parallel from real files, stopped and continued, damaged, mixed, read by the loader."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bampath.data import ByteTokenizer, DataConfig, TokenCorpus, load_corpus, make_loader, validation_batches
from bampath.data.build import build, make_unit
from bampath.data.prepare import check_shards, main
from bampath.data.prepared import mixture_of
from bampath.data.rows import shares
from bampath.data.shards import BLOCK, JoinedTokens
from bampath.data.sources import open_source, read_unit, units_of
from tests.data.test_sources import fineweb_columns, write_jsonl, write_parquet

TEXTS = [f"Document {i}. " + "Words follow words, é and 三. " * (i * 7 % 41) for i in range(60)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parquet files as FineWeb has them (row groups of 5) and a jsonl file."""
    folder = tmp_path_factory.mktemp("text")
    write_parquet(folder / "a.parquet", fineweb_columns(TEXTS[:25]), 5)
    write_parquet(folder / "b.parquet", fineweb_columns(TEXTS[25:45]), 5)
    write_jsonl(folder / "c.jsonl", *(json.dumps({"text": t}) for t in [*TEXTS[45:], ""]))
    return folder


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "set"
    build(config_of(text), folder, workers=1, shard_bytes=3000)
    return folder


def config_of(source: object, **options: object) -> DataConfig:
    return DataConfig(source=str(source), validation_fraction=0.25, workers=0, **options)  # type: ignore[arg-type]


def shards_config(folder: Path, **options: object) -> DataConfig:
    return DataConfig(source=f"shards:{folder}", sequence_length=64, batch_size=4, workers=0, **options)  # type: ignore[arg-type]


def documents(corpus: TokenCorpus) -> list[str]:
    return [ByteTokenizer().decode(corpus.document(i).tolist()) for i in range(corpus.documents)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_units_are_the_source_cut_into_pieces(text: Path):
    source = open_source(str(text))
    options = config_of(text).read_options
    for size in (1, 3000, 10**9):
        units = units_of(source, size)
        read = [document for unit in units for document in read_unit(source, options, unit)]
        assert read == list(source.read())
        assert len(units) == {1: 10, 10**9: 1}.get(size, len(units))
    with pytest.raises(ValueError, match="is not made of text files"):
        units_of(dataclasses.replace(source, files=()), 1)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_shards_hold_what_the_token_cache_holds(text: Path, made: Path, part: str):
    cached = load_corpus(config_of(text), part)  # type: ignore[arg-type]
    sharded = load_corpus(shards_config(made), part)  # type: ignore[arg-type]
    assert len(list(made.glob("train-*.array_record"))) > 3
    assert documents(sharded) == documents(cached)
    np.testing.assert_array_equal(sharded.offsets, cached.offsets)
    np.testing.assert_array_equal(sharded.tokens[:], cached.tokens)
    for fact in ("skipped", "characters", "other_documents", "tokenizer"):
        assert sharded.info[fact] == cached.info[fact]


def test_no_document_is_on_both_sides(made: Path):
    train, held_out = (documents(load_corpus(shards_config(made), part)) for part in ("train", "validation"))
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 5 < len(held_out) < 30


@pytest.mark.parametrize("packing", ["split", "whole"])
def test_the_loader_gives_the_same_batches_from_shards_as_from_the_cache(text: Path, made: Path, packing: str):
    options = {"packing": packing, "sequence_length": 96, "batch_size": 8}
    sharded = dataclasses.replace(shards_config(made), **options)  # type: ignore[arg-type]
    cached = dataclasses.replace(config_of(text), **options)  # type: ignore[arg-type]
    with make_loader(sharded) as a, make_loader(cached) as b:
        for step in range(60):  # several epochs, so that rows cross the end of the text
            left, right = next(a), next(b)
            for name in left:
                np.testing.assert_array_equal(left[name], right[name], err_msg=f"{name} of step {step}")


def test_grain_reads_the_shards(made: Path):
    import grain

    tokens = load_corpus(shards_config(made)).tokens[:]
    paths = sorted(str(path) for path in made.glob("train-*.array_record"))
    source = grain.sources.ArrayRecordDataSource(paths)
    read = np.concatenate([np.frombuffer(source[i], "<u2") for i in range(len(source))])
    np.testing.assert_array_equal(read, tokens)


def test_parallel_workers_make_the_same_bytes(text: Path, made: Path, tmp_path: Path):
    build(config_of(text), tmp_path / "two" / "set", workers=2, shard_bytes=3000)
    assert contents(tmp_path / "two" / "set") == contents(made)


# Makes a data set and kills itself with SIGKILL while the unit given is being written.
KILLED = """
import os, signal, sys
from pathlib import Path
from bampath.data import DataConfig, build as module
folder, source, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
finish = module.ShardWriter.finish
def killed(writer):
    if f"-{last:05d}." in writer._path.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(writer)
module.ShardWriter.finish = killed
module.build(DataConfig(source=source, validation_fraction=0.25), folder, 1, 3000)
"""


def test_a_killed_build_goes_on(text: Path, made: Path, tmp_path: Path):
    folder = tmp_path / "killed" / "set"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(text), "3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(ValueError, match=r"is not finished \(3 of \d+ units\)"):
        load_corpus(shards_config(folder))
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("*-0000[012].*")}
    assert len(kept) > 6
    build(config_of(text), folder, workers=1, shard_bytes=3000)
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept  # not made again
    assert contents(folder) == contents(made)


class Deadly:
    """A task that ends the process which receives it, at once, as a kill does."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (9,)


def test_a_killed_worker_is_one_line(text: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "worker" / "set"
    monkeypatch.setattr("bampath.data.build.make_unit", Deadly())
    with pytest.raises(ChildProcessError, match=r"one of 2 worker processes was killed.*the same command goes on"):
        build(config_of(text), folder, workers=2, shard_bytes=3000)
    monkeypatch.undo()
    build(config_of(text), folder, workers=1, shard_bytes=3000)
    assert contents(folder) == contents(made)


def test_an_empty_part_says_where_the_documents_are(text: Path, tmp_path: Path):
    config = DataConfig(source=str(text), split="none", workers=0)
    build(config, tmp_path / "set", workers=1)
    with pytest.raises(
        ValueError, match=r"the validation part .* is empty: its split puts all 60 documents on the other"
    ):
        load_corpus(shards_config(tmp_path / "set"), "validation")


def test_damage_is_found_and_mended(text: Path, made: Path, tmp_path: Path):
    folder = tmp_path / "damaged" / "set"
    build(config_of(text), folder, workers=1, shard_bytes=3000)
    shard = folder / "train-00002.array_record"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"train-00002\.array_record is damaged"):
        load_corpus(shards_config(folder)).tokens[:]
    with pytest.raises(ValueError, match=r"unit\(s\) \[2\] are damaged"):
        check_shards(folder, 5)
    build(config_of(text), folder, workers=1, shard_bytes=3000)
    assert contents(folder) == contents(made)
    (folder / "train-00001.lengths").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-00001\.lengths has 0 bytes of \d+"):
        load_corpus(shards_config(folder))


def test_what_does_not_go_together_is_refused(text: Path, made: Path, tmp_path: Path):
    class Other(ByteTokenizer):
        fingerprint, name = "other", "other"

    with pytest.raises(ValueError, match="was made with the tokenizer bytes, not with other"):
        load_corpus(shards_config(made), "train", Other())
    for options, message in (
        ({"add_bos": False}, "made with data.add_bos=True, not False"),
        ({"validation_fraction": 0.5}, "made with data.validation_fraction=0.25, not 0.5"),
        ({"max_documents": 3}, "max_documents=3 does not work on shards"),
    ):
        with pytest.raises(ValueError, match=message):
            load_corpus(shards_config(made, **options))
    with pytest.raises(FileNotFoundError, match="holds no data set"):
        load_corpus(shards_config(tmp_path))
    with pytest.raises(ValueError, match=r"holds another data set.*\n  options: there .*'add_eos': True"):
        build(config_of(text, add_eos=False), made, workers=1, shard_bytes=3000)
    (tmp_path / "something").write_text("")
    with pytest.raises(ValueError, match="is not empty and holds no data set"):
        build(config_of(text), tmp_path, workers=1)
    with pytest.raises(ValueError, match="is tokens already"):
        build(shards_config(made), tmp_path / "new")
    with pytest.raises(ValueError, match="do not go with --shards"):
        build(config_of(text, max_documents=4), tmp_path / "new")


def test_the_command_writes_a_card_with_counts(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = tmp_path / "mine"
    main([f"source=fineweb:{text}", "validation_fraction=0.25", "--shards", str(folder), "--workers", "1", "--check"])
    card = (folder / "README.md").read_text("utf-8")
    assert card in capsys.readouterr().out
    train, held_out = (load_corpus(shards_config(folder), part) for part in ("train", "validation"))
    assert train.documents + held_out.documents == 45  # the jsonl file is no FineWeb
    assert f"| train | {train.documents} | {len(train.tokens):,} | {train.info['characters']:,} |" in card
    assert "ODC-By 1.0" in card
    dataset = json.loads((folder / "dataset.json").read_text("utf-8"))
    assert dataset["parts"]["validation"]["fingerprint"] == held_out.fingerprint


# -- tokens that are read where they are asked for ------------------------------------------------------------------


def test_a_unit_of_many_records(tmp_path: Path):
    path = write_jsonl(tmp_path / "long.jsonl", *(json.dumps({"text": "x" * n}) for n in (3 * BLOCK, 10, BLOCK - 14)))
    config = DataConfig(source=str(path), split="none")
    folder = tmp_path / "set"
    build(config, folder, workers=1)
    tokens, expected = load_corpus(shards_config(folder)).tokens, load_corpus(config).tokens
    assert len(tokens) == len(expected)
    for start, stop in (
        (0, 0),
        (5, 5),
        (0, 7),
        (BLOCK - 1, BLOCK + 1),
        (17, 3 * BLOCK + 5),
        (len(expected) - 1, len(expected)),
    ):
        np.testing.assert_array_equal(tokens[start:stop], expected[start:stop])
    ring = np.arange(len(expected) - 3, len(expected) + BLOCK) % len(expected)
    np.testing.assert_array_equal(tokens[ring], expected[ring])


def test_joined_tokens_are_the_concatenation():
    rng = np.random.default_rng(3)
    pieces = [rng.integers(0, 99, n).astype(np.uint16) for n in (5, 0, 1, 17, 0, 3)]
    joined, whole = JoinedTokens(pieces, np.dtype(np.uint16)), np.concatenate(pieces)
    starts = rng.integers(0, 26, 200)
    counts = np.minimum(rng.integers(0, 27, 200), 26 - starts)
    for start, count, got in zip(starts, counts, joined.spans(starts, counts), strict=True):
        np.testing.assert_array_equal(got, whole[start : start + count])
    places = rng.integers(0, 26, 50)
    np.testing.assert_array_equal(joined[places], whole[places])
    assert joined[places[:0]].shape == (0,)
    with pytest.raises(IndexError, match=r"tokens \[20, 30\) of 26"):
        joined.spans(np.asarray([20]), np.asarray([10]))
    with pytest.raises(ValueError, match="has step 2"):
        joined[0:4:2]


# -- mixtures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("sotu", []),
        ("text,more", []),
        ("0.7*shards:/a,0.3*sotu", [(0.7, "shards:/a"), (0.3, "sotu")]),
        ("1*a,b.jsonl, 2*c", [(1.0, "a,b.jsonl"), (2.0, "c")]),
        ("1e-3*A,+2.5E1*B", [(0.001, "A"), (25.0, "B")]),
        ("9*.txt", []),
        ("1*a", []),
    ],
)
def test_mixtures_are_written_as_weights_and_sources(source: str, parts: list[tuple[float, str]]):
    assert mixture_of(source) == parts


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("0*a,1*b", "weight 0 .* must be finite and greater than 0"),
        ("1*a,1e999*b", "weight 1e999 .* must be finite and greater than 0"),
        ("-1e-3*a,1*b", "weight -1e-3 .* must be finite and greater than 0"),
        ("1.2.3*a,1*b", "is not a number"),
        ("1*a,2*", "a part of .* has a weight and no source"),
    ],
)
def test_wrong_mixtures_are_refused(source: str, message: str):
    with pytest.raises(ValueError, match=message):
        mixture_of(source)


def test_shares_are_exact_at_every_place_and_lose_nothing():
    weights = [0.5, 0.2, 0.3]
    found = shares(weights, np.arange(5000))
    assert sorted(np.concatenate([where for _, where, _ in found]).tolist()) == list(range(5000))
    for index, where, own in found:
        np.testing.assert_array_equal(own, np.arange(len(own)))  # each stream goes on where it was
        for upto in (10, 100, 1000, 5000):
            assert abs((where < upto).sum() - weights[index] * upto) < 2
    later = shares(weights, np.arange(4000, 4100))  # from any place on, the same
    for (_, where, own), (_, all_where, all_own) in zip(later, found, strict=True):
        inside = (all_where >= 4000) & (all_where < 4100)
        np.testing.assert_array_equal(where + 4000, all_where[inside])
        np.testing.assert_array_equal(own, all_own[inside])


@pytest.fixture(scope="module")
def mixed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A quarter digits, from a file; three quarters the shards."""
    path = tmp_path_factory.mktemp("digits") / "digits.jsonl"
    write_jsonl(path, *(json.dumps({"text": f"{i:03d}" * 30}) for i in range(30)))
    source = f"0.75*shards:{made},0.25*{path}"
    return dataclasses.replace(config_of(source), sequence_length=64, batch_size=8)


def is_digits(batch: dict[str, np.ndarray]) -> np.ndarray:
    ids = np.where(batch["tokens"] < 256, batch["tokens"], ord("0"))
    return ((ids >= ord("0")) & (ids <= ord("9"))).all(axis=1)


def test_a_mixture_has_its_weights_and_all_of_its_parts(mixed: DataConfig):
    corpus = load_corpus(mixed)
    digits = corpus.parts[1][0]
    rows = -(-len(digits.tokens) // 64)
    steps = -(-rows // 2)  # two rows of digits in a batch of eight: one epoch of them
    with make_loader(mixed) as loader:
        batches = [next(loader) for _ in range(steps)]
        state = loader.state()
    assert [int(is_digits(batch).sum()) for batch in batches] == [2] * steps
    read = Counter(
        t for batch in batches for t in batch["tokens"][is_digits(batch) & (batch["segment_ids"][:, 0] >= 0)].ravel()
    )
    wanted = Counter(digits.tokens[:].tolist())
    assert all(read[token] >= count for token, count in wanted.items())
    other = dataclasses.replace(mixed, source=mixed.source.replace("0.75", "0.7"))
    with make_loader(other) as loader, pytest.raises(ValueError, match=r"Different are\n  corpus: saved"):
        loader.restore(state)


def test_a_mixture_holds_out_what_its_parts_do_and_a_few_batches_have_all(mixed: DataConfig):
    held_out = load_corpus(mixed, "validation")
    parts = [documents(part) for part, _ in held_out.parts]
    assert documents(held_out) == [text for part in parts for text in part]
    batches = list(validation_batches(mixed))
    assert sum(int((batch["segment_ids"] >= 0).sum()) for batch in batches) == len(held_out.tokens)
    few = list(validation_batches(mixed, batches=3))
    assert 0 < sum(int(is_digits(batch).sum()) for batch in few) < 24


def test_making_a_unit_twice_at_the_same_time_does_no_harm(text: Path, made: Path, tmp_path: Path):
    folder = tmp_path / "twice" / "set"
    build(config_of(text), folder, workers=1, shard_bytes=3000)
    left = folder / f".unit-00001-{os.getpid()}"
    left.mkdir()
    (left / "train-00001.array_record").write_bytes(b"half")  # of a killed process that had this number
    start = time.monotonic()
    make_unit(config_of(text), folder, 1)
    assert time.monotonic() - start < 20
    assert contents(folder) == contents(made)


def test_a_shard_that_finds_no_room_is_named_and_made_when_there_is_some(text: Path, tmp_path: Path):
    folder = tmp_path / "full" / "set"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"array_record could not be written: .*File too large.*same command"):
            build(config_of(text), folder, workers=1, shard_bytes=10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (folder / "dataset.json").exists()
    assert build(config_of(text), folder, workers=1, shard_bytes=10**6)["parts"]["train"]["documents"] > 0
