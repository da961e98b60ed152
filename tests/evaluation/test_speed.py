"""The speed command at its smallest, and what it refuses."""

import json

import pytest

from bampath.evaluation import speed

SMALL = ("model.dim=8", "model.heads=2", "model.mlp_dim=8", "model.layers=1", "model.attention_impl=reference")


def test_every_case_is_timed(tmp_path, capsys):
    out = tmp_path / "speed.json"
    options = "--config tiny --lengths 64 --samples 3 --new-tokens 2 --chunk 32 --batch-tokens 128 --repeats 2"
    speed.main([*SMALL, "position=nope", *options.split(), "--out", str(out)])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    cases = ["forward", "prefill", "scored prompts", "answers of 2 tokens"]
    assert [row["case"] for row in rows] == cases
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 and row["batch"] == 2 for row in rows)
    middle = sum(rows[1]["seconds"]) / 2
    assert rows[1]["tokens_per_second"] == pytest.approx(2 * 64 / middle)
    assert rows[2]["samples_per_second"] == pytest.approx(2 / (sum(rows[2]["seconds"]) / 2))  # whole batches only
    shown = capsys.readouterr().out
    assert all(case in shown for case in cases)
    assert "of forward" in shown


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="--repeats 0"):
        speed.main(["--repeats", "0"])
    with pytest.raises(ValueError, match="--new-tokens"):
        speed.main(["--config", "tiny", *SMALL, "--lengths", "100"])
