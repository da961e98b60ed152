"""The speed command at its smallest, and what it refuses."""

import json
from pathlib import Path

import pytest

from bampath.evaluation import speed, speed_checks
from tests.model.test_scheme_matrix import build

SMALL = ("model.dim=8", "model.heads=2", "model.mlp_dim=8", "model.layers=1", "model.attention_impl=reference")


def test_every_case_is_timed(tmp_path, capsys):
    out = tmp_path / "speed.json"
    options = (
        "--config tiny --lengths 64 --far 128,192 --samples 3 --depths 4 --new-tokens 2 --chunk 64 --batch-tokens 128"
    )
    speed.main([*SMALL, "position=nope", *options.split(), "--repeats", "2", "--out", str(out)])
    results = json.loads(out.read_text(encoding="utf-8"))
    rows = results["rows"]
    assert [(row["case"], row["length"], row["batch"]) for row in rows] == [
        ("forward", 64, 2),
        ("prefill", 64, 2),
        ("scored prompts", 64, 2),
        ("answers of 2 tokens", 64, 1),  # two would not divide three
        ("scored prompts", 128, 1),
        ("scored prompts", 192, 1),
    ]
    assert [len(row["seconds"]) for row in rows] == [2, 2, 1, 1, 1, 1]
    assert rows[1]["tokens_per_second"] == pytest.approx(2 * 64 / (sum(rows[1]["seconds"]) / 2))
    assert rows[2]["samples_per_second"] == pytest.approx(4 / rows[2]["seconds"][0])
    assert len(results["checks"]) == 4
    assert all(check["error"] <= check["bound"] for check in results["checks"])
    shown = capsys.readouterr().out
    assert shown.index("prepared 64") < shown.index("timing") < shown.index("of forward")
    assert "of forward" in shown


def test_far_lengths_alone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(speed, "checks", lambda model, params, length: asked.append(length) or [])
    options = ["--config", "tiny", "--lengths", "none", "--far", "96", "--chunk", "64", "--batch-tokens", "64", "--out"]
    speed.main([*SMALL, "position=nope", *options, str(tmp_path / "speed.json")])
    rows = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["case"], row["length"]) for row in rows] == [("scored prompts", 96)]
    assert asked == [2048]
    with pytest.raises(ValueError, match="--lengths none leaves nothing to time"):
        speed.main(["--config", "tiny", "--lengths", "none"])


def test_no_case_begins_after_its_time(capsys):
    case = speed.Case("forward", 8, 1, "tokens_per_second", 8, lambda: None, lambda: None, 1)
    assert len(list(speed.timed([case, case], speed.Sizes(), seconds=60))) == 2
    assert not list(speed.timed([case], speed.Sizes(), seconds=-1))
    assert "left out" in capsys.readouterr().out


def test_a_wrong_fast_path_is_not_timed(monkeypatch):
    """A prefill that forgets its last token is found before anything is timed."""
    model, params = build("rope")
    assert {row["error"] <= row["bound"] for row in speed_checks.checks(model, params, 40, new_tokens=2)} == {True}
    real = speed_checks.prefill
    short = lambda model, params, tokens, mask, cache, chunk: real(
        model, params, tokens[:, :-1], mask[:, :-1], cache, 99
    )
    monkeypatch.setattr(speed_checks, "prefill", short)
    with pytest.raises(FloatingPointError, match="prefill, left-padded"):
        speed_checks.checks(model, params, 40, new_tokens=2)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="--repeats 0"):
        speed.main(["--repeats", "0"])
    with pytest.raises(ValueError, match="--seconds -1 must be positive"):
        speed.main(["--seconds", "-1"])
    with pytest.raises(ValueError, match="--new-tokens"):
        speed.main(["--config", "tiny", *SMALL, "--lengths", "100"])
    with pytest.raises(ValueError, match="--far 64"):
        speed.main(["--config", "tiny", *SMALL, "--lengths", "256", "--chunk", "64", "--far", "64"])


def test_the_documentation_shows_the_committed_results():
    docs = Path(__file__).parent.parent.parent / "docs"
    results = json.loads((docs / "evaluation_speed.json").read_text(encoding="utf-8"))
    text = (docs / "evaluation.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- speed -->\n")[2].partition("\n<!-- end of speed -->")[0]
    assert shown.strip() == speed.page(results)
    rates = {(row["case"], row["length"]): row.get("tokens_per_second") for row in results["rows"]}
    assert all(rates["prefill", n] > 0.5 * rates["forward", n] for n in (4096, 8192, 16_384, 32_768))
