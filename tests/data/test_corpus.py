"""The token cache: same tokens from disk, damage noticed and repaired, nothing half-written left behind."""

import dataclasses
import errno
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bampath.data import ByteTokenizer, DataConfig, load_corpus
from bampath.data import corpus as corpus_module
from bampath.data.corpus import build_entry, cache_folder, cache_root, open_entry
from bampath.data.sources import open_source

TEXTS = [f"document {i}: " + "words and more words " * (i % 7) for i in range(80)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in [*TEXTS, ""]), "utf-8")
    return DataConfig(source=str(path), validation_fraction=0.2, cache_dir=str(tmp_path / "cache"))


def entry_of(config: DataConfig) -> Path:
    return cache_folder(config, open_source(config.source, config.read_options), ByteTokenizer())


def decoded(config: DataConfig, part: str) -> list[str]:
    corpus = load_corpus(config, part)  # type: ignore[arg-type]
    return [ByteTokenizer().decode(corpus.document(i).tolist()) for i in range(corpus.documents)]


def test_both_parts_hold_all_documents_with_their_marks(config: DataConfig):
    train, validation = decoded(config, "train"), decoded(config, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert not set(train) & set(validation)
    assert 4 < len(validation) < 30
    corpus = load_corpus(config)
    assert corpus.tokens.dtype == np.uint16
    for i in range(corpus.documents):
        ids = corpus.document(i)
        assert (ids[0], ids[-1]) == (256, 257)
        assert (ids[1:-1] < 256).all()
    assert corpus.lengths.sum() == len(corpus.tokens)
    assert corpus.info["skipped"] == 1
    assert corpus.info["characters"] == sum(map(len, train))


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (False, False)])
def test_marks_are_options(config: DataConfig, bos: bool, eos: bool):
    ids = load_corpus(dataclasses.replace(config, add_bos=bos, add_eos=eos)).document(0)
    assert ((ids[0] == 256), (ids[-1] == 257)) == (bos, eos)


def test_the_second_time_nothing_is_tokenised(config: DataConfig, monkeypatch: pytest.MonkeyPatch):
    first = load_corpus(config)
    monkeypatch.setattr(corpus_module, "build_entry", None)
    second = load_corpus(config)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_is_about_tokens_not_about_places(config: DataConfig, tmp_path: Path):
    moved = tmp_path / "elsewhere" / "other_name.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(Path(config.source).read_bytes())
    other = dataclasses.replace(config, source=str(moved))
    assert entry_of(other) != entry_of(config)
    assert load_corpus(other).fingerprint == load_corpus(config).fingerprint
    shorter = dataclasses.replace(config, max_documents=40)
    assert load_corpus(shorter).fingerprint != load_corpus(config).fingerprint
    assert load_corpus(shorter).documents + load_corpus(shorter, "validation").documents == 40


def truncate(entry: Path) -> None:
    path = entry / "train.tokens"
    path.write_bytes(path.read_bytes()[:-2])


def flip_a_bit(entry: Path) -> None:
    path = entry / "train.tokens"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def break_offsets(entry: Path) -> None:
    path = entry / "train.offsets"
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(bytes(data))


def lose_tokens(entry: Path) -> None:
    (entry / "train.tokens").unlink()


def lose_meta(entry: Path) -> None:
    (entry / "meta.json").unlink()


def edit_meta(entry: Path) -> None:
    path = entry / "meta.json"
    path.write_text(path.read_text("utf-8").replace('"skipped": 1', '"skipped": 0'), "utf-8")


def cut_meta(entry: Path) -> None:
    path = entry / "meta.json"
    path.write_text(path.read_text("utf-8")[:100], "utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"train\.tokens has \d+ bytes, expected \d+"),
        (flip_a_bit, r"chunk 0 of train\.tokens does not have its checksum"),
        (break_offsets, r"chunk 0 of train\.offsets does not have its checksum"),
        (lose_tokens, r"train\.tokens has no file"),
        (lose_meta, r"meta\.json cannot be read"),
        (edit_meta, r"meta\.json does not have its own checksum"),
        (cut_meta, r"meta\.json cannot be read"),
    ],
)
def test_damage_is_noticed_and_repaired(
    config: DataConfig, damage: Callable[[Path], None], message: str, caplog: pytest.LogCaptureFixture
):
    before = load_corpus(config)
    tokens = before.tokens.copy()
    del before
    damage(entry_of(config))
    with caplog.at_level(logging.WARNING):
        after = load_corpus(config)
    np.testing.assert_array_equal(after.tokens, tokens)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().endswith(": building it anew")
    caplog.clear()
    load_corpus(config)
    assert not caplog.records
    damage(entry_of(config))
    with pytest.raises(corpus_module.DamagedCacheError, match=message):
        open_entry(entry_of(config), "train")


def test_all_chunks_are_checked_on_demand(config: DataConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_module, "_CHUNK", 64)
    monkeypatch.setattr(corpus_module, "_CHECKED_CHUNKS", 4)
    load_corpus(config)
    path = entry_of(config) / "train.tokens"
    data = bytearray(path.read_bytes())
    data[64 * 3] ^= 1
    path.write_bytes(bytes(data))
    assert open_entry(entry_of(config), "train") is not None
    with pytest.raises(corpus_module.DamagedCacheError, match=r"chunk 3 of train\.tokens"):
        open_entry(entry_of(config), "train", check_all=True)


def test_a_failed_build_leaves_nothing(config: DataConfig):
    with Path(config.source).open("a", encoding="utf-8") as file:
        file.write("not json\n")
    with pytest.raises(ValueError, match=r"text\.jsonl line 82 is not JSON"):
        load_corpus(config)
    assert list(Path(config.cache_dir).iterdir()) == []


def test_what_a_killed_build_left_is_removed_and_a_running_one_is_not(config: DataConfig):
    entry = entry_of(config)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, running = (entry.with_name(f"{entry.name}.tmp-{socket.gethostname()}-{pid}-1") for pid in (dead.pid, 1))
    for folder in (left, running):
        folder.mkdir(parents=True)
    load_corpus(config)
    assert not left.exists()
    assert running.exists()


def test_the_slower_of_two_builds_gives_way(config: DataConfig):
    corpus = load_corpus(config)
    source = open_source(config.source, config.read_options)
    build_entry(entry_of(config), config, source, ByteTokenizer())
    assert [p.name for p in Path(config.cache_dir).iterdir()] == [entry_of(config).name]
    assert load_corpus(config).fingerprint == corpus.fingerprint


def test_validation_from_another_source(config: DataConfig, tmp_path: Path):
    (tmp_path / "held_out.txt").write_text("other text", "utf-8")
    both = dataclasses.replace(config, validation_source=str(tmp_path / "held_out.txt"))
    assert sorted(decoded(both, "train")) == sorted(TEXTS)
    assert decoded(both, "validation") == ["other text"]


def test_empty_parts_say_why(config: DataConfig, tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("", "utf-8")
    with pytest.raises(ValueError, match=r"source .*empty\.jsonl has no documents"):
        load_corpus(dataclasses.replace(config, source=str(empty)))
    empty.write_text('{"text": ""}\n' * 3, "utf-8")
    with pytest.raises(ValueError, match=r"all 3 documents of source .* are empty"):
        load_corpus(dataclasses.replace(config, source=str(empty)))
    with pytest.raises(ValueError, match=r"the validation part of .* is empty: split='none' .* puts all 80 documents"):
        load_corpus(dataclasses.replace(config, split="none"), "validation")


def test_large_vocabularies_take_four_bytes_and_missing_marks_are_refused(config: DataConfig):
    class Large(ByteTokenizer):
        vocab_size = 100_000
        fingerprint = "large"
        eos_id = None

    with pytest.raises(ValueError, match="add_eos=true, but the tokenizer bytes has no eos token"):
        load_corpus(config, tokenizer=Large())
    corpus = load_corpus(dataclasses.replace(config, add_eos=False), tokenizer=Large())
    assert corpus.tokens.dtype == np.uint32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": ""}, r"data\.source must not be empty"),
        ({"sequence_length": 0}, r"data\.sequence_length=0 must be at least 1"),
        ({"workers": -1}, r"data\.workers=-1 must be at least 0"),
        ({"packing": "best"}, r"data\.packing='best' is not one of split, whole"),
        ({"split": "year"}, r"data\.split='year' is not one of auto, years, hash, none"),
        ({"validation_fraction": 1.0}, r"data\.validation_fraction=1\.0 must be in \[0, 1\)"),
        ({"invalid_utf8": "keep", "tokenizer": "a.json"}, r"needs data\.tokenizer='bytes', not 'a\.json'"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)  # type: ignore[arg-type]


def test_what_another_machine_builds_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of two machines that share a cache the name of one may begin as the other's."""
    (tmp_path / "a.txt").write_text("some text")
    config = DataConfig(source=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), split="none")
    entry = cache_folder(config, open_source(config.source), ByteTokenizer())
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    monkeypatch.setattr("os.kill", lambda pid, number: (_ for _ in ()).throw(ProcessLookupError))
    others = [entry.with_name(f"{entry.name}.tmp-{end}") for end in ("node-2-77-5", "node-b-77-5")]
    mine = entry.with_name(f"{entry.name}.tmp-node-77-5")
    for folder in (*others, mine):
        folder.mkdir(parents=True)
    load_corpus(config)
    assert all(folder.exists() for folder in others)
    assert not mine.exists()


def test_a_cache_that_cannot_be_written_says_how_to_choose_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text("some text")
    config = DataConfig(source=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "a.txt"), split="none")
    with pytest.raises(OSError, match=r"the token cache .*a\.txt cannot be written \(.*data\.cache_dir=FOLDER"):
        load_corpus(config)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("bampath.data.corpus._write_entry", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match=r"cache cannot be written \(No space left on device\)"):
        load_corpus(dataclasses.replace(config, cache_dir=str(tmp_path / "cache")))
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(ValueError, match="there is no home folder"):
        cache_root()
