"""What is kept of the trained comparison's rows: fewer bytes, and everything that is told of them."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bampath import step
from bampath.analysis import read_heads
from experiments.bam_h200 import kept, merge, report, slim
from experiments.bam_h200.config import Cell

FACTS = {"case": "bam+ssmax", "seed": 3, "mix": "retrieval", "size": "small"}


def _rows() -> list[dict[str, Any]]:
    """Rows of two cells in the forms that the study has."""
    random = np.random.default_rng(0)
    sample = lambda: {"depth": round(float(random.random()), 4), "correct": bool(random.random() < 0.5)}
    keys = lambda n: {"benchmark": "passkey", "length": n, "accuracy": 0.7, "depths": [sample() for _ in range(3)]}
    look = lambda n: {"benchmark": "attention", "length": n, "needle": float(random.random())}
    budget = {"train_length": 128, "steps": 50, "tokens": 9}
    own = [
        {"benchmark": "training", **budget, "loss": 2.5, "curve": [{"step": n, "loss": 1 / n} for n in (50, 100)]},
        *(keys(n) for n in (512, 1024)),
        look(512),
        {**look(512), "row": [0.25, 0.5], "nothing": [], "objects": [{}, {}], "mixed": [{"a": 1}, {"b": 2}]},
        *(look(n) for n in (512, 8192)),
        {"benchmark": "prior", "layer": 0, "head": 0, "parameters": {"x": 1.5}},
        {"benchmark": "prior", "layer": 0, "head": 1, "parameters": {"x": 2.5}},
        {"benchmark": "prior", "layer": 1, "head": 0, "parameters": {}},
        keys(32768),
    ]
    return [{**FACTS, "seed": seed, **row} for seed in (0, 1) for row in own]


def test_packed_rows_come_back_as_they_were(tmp_path: Path) -> None:
    """In their order; rows that differ in a fact or a name are not joined."""
    rows = _rows()
    made = kept.packed(rows)
    assert kept.unpacked(made) == rows
    assert len(made) == 2 * 7  # training, passkeys, attention without, with and without a row, priors, a far passkey
    assert made[1]["columns"]["length"] == [512, 1024]
    assert made[0]["curve"] == {"columns": {"step": [50, 100], "loss": [1 / 50, 1 / 100]}}
    results = {"env": {"jax": "1"}, "runs": [{"jax": "0"}], "rows": rows}
    kept.write(tmp_path / "results.json", results)
    assert kept.read(tmp_path / "results.json") == results
    lines = (tmp_path / "results.json").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith('{"case"') for line in lines) == len(made)


def test_files_with_a_row_per_object_are_read_and_damaged_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"env": {}, "rows": _rows()}), encoding="utf-8")
    assert kept.read(path)["rows"] == _rows()
    kept.write(path, {"env": {}, "rows": [{**FACTS, "benchmark": "training", "loss": float("nan")}]})
    assert kept.read(path)["rows"][0]["loss"] is None
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    with pytest.raises(ValueError, match=r"results\.json is damaged"):
        kept.read(path)
    for text in ("[]", "null", "{}", '{"rows": null}', '{"rows": [5]}', '{"rows": [{"columns": {"a": [1], "b": []}}]}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"results\.json holds no results of this study"):
            kept.read(path)


def _heads(case: str, keys: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of the heads of a model of two layers, with random parameters."""
    shape = ("model.layers=2", "model.dim=12", "model.heads=6", "model.kv_heads=3", "model.mlp_dim=16")
    config = Cell(case, seed, size="tiny").config(Path("tokenizer.json"), "text", (*shape, "model.scan=false"))
    shapes = step.declare(step.build_model(config)).shapes
    random = np.random.default_rng(seed)
    params = jax.tree.map(lambda leaf: random.normal(0.1, 0.3, leaf.shape).astype(np.float32), shapes)
    facts = {**FACTS, "case": case, "seed": seed, "size": "tiny"}
    return [head.row(**facts) for head in read_heads(config.model, params, keys)]


@pytest.mark.parametrize("change", [{"case": "bam @ model.heads=5"}, {"case": "nosuch"}, {"size": "99b"}, {"mix": "?"}])
def test_what_this_version_cannot_make_again_stays(change: dict[str, str]) -> None:
    """A cell that was trained is kept, whatever its name says here."""
    rows = [{**row, **change} for row in _heads("bam", 64)]
    assert [row["curve"] for row in slim.slim(rows)] == [slim._rounded(row["curve"]) for row in rows]
    assert slim.slim([{**FACTS, "benchmark": "attention", "row": [None, 0.5, 1e-9]}])[0]["row"] == [None, 0.5, 0.0]


CASES = (
    *("alibi", "alibi+ssmax", "bam", "bam+ssmax", "bam+ssmax(inside=false)", "bam(mu=trainable)+ssmax(bias=true)"),
    *("path+bam+ssmax", "bam(scope=global)+ssmax @ clamped", "bam+window(50)", "rope,bam+ssmax", "kerple"),
)


@pytest.mark.parametrize("case", CASES)
def test_curves_of_priors_follow_from_what_the_heads_have_learned(case: str) -> None:
    rows = [*_heads(case, 777), *_heads(case, 777, seed=1)]
    small = slim.slim(json.loads(json.dumps(rows)))
    assert rows
    assert not any("curve" in row for row in small)
    back = slim.with_curves(json.loads(json.dumps(small)))
    for row, again in zip(rows, back, strict=True):
        assert again["parameters"] == row["parameters"]
        assert again["curve"]["distance"] == row["curve"]["distance"]
        np.testing.assert_allclose(again["curve"]["p"], row["curve"]["p"], rtol=3e-5)


def test_a_curve_is_that_of_the_formula() -> None:
    rows = slim.with_curves(slim.slim(_heads("bam+ssmax", 555)))
    distance = np.arange(555.0)
    for row in rows:
        alpha, beta, scale = (row["parameters"][name] for name in ("bam/theta_alpha", "bam/theta_beta", "ssmax/scale"))
        logits = -np.log(555) * scale * np.exp(alpha) * (distance + 1e-5) ** beta
        p = np.exp(logits - logits.max())
        at = row["curve"]["distance"]
        np.testing.assert_allclose(row["curve"]["p"], (p / p.sum())[at], rtol=2e-4, atol=1e-12)


def test_figures_of_priors_draw_the_same_curves() -> None:
    training, passkey = _rows()[:2]
    heads = _heads("bam+ssmax", 1024)
    asked = [{**row, "size": "tiny", "samples": 3, "correct": 2} for row in (training, passkey)]
    drawn = []
    for rows in ([*asked, *heads], slim.slim([*asked, *heads])):
        ((_, part),) = report.parts_of(rows).items()
        figures = dict(report.figures_of(part))
        drawn.append([line.get_ydata() for panel in figures["priors-bam-ssmax"].axes for line in panel.get_lines()])
    assert len(drawn[0]) >= 12
    for line, again in zip(*drawn, strict=True):
        np.testing.assert_allclose(again, line, rtol=3e-5)


def test_curves_that_do_not_follow_are_kept() -> None:
    """Those of another formula, of heads that are not all there, and of parameters that are missing."""
    rows = _heads("bam+ssmax", 300)
    rows[1]["curve"]["p"][5] *= 1.01
    assert ["curve" in row for row in slim.slim(rows)] == [True] * 6 + [False] * 6
    assert all("curve" in row for row in slim.slim(_heads("alibi", 300)[1:6]))
    for row in rows:
        del row["parameters"]["ssmax/scale"]
    assert all("curve" in row for row in slim.slim(rows))
    assert slim.with_curves(rows) == rows


def test_rows_keep_what_is_told_and_lose_what_is_not() -> None:
    share, loss = 18 / 35, 3.753141248229152
    sample = {"depth": 0.0556, "key": "76771", "correct": True, "right": 5, "scored": 5}
    asked = {**FACTS, "benchmark": "niah", "tokens": 1234567890123, "token_accuracy": share, "depths": [sample]}
    look = {**FACTS, "benchmark": "attention", "row": [0.1234, 9.9e-7, 1e-6]}
    made = slim.slim([{**asked, "answer_loss": loss}, look])
    assert made[0]["answer_loss"] == 3.75314125
    assert {name: made[0][name] for name in ("tokens", "token_accuracy")} == {"tokens": 1234567890123} | {
        "token_accuracy": share
    }
    assert made[0]["depths"] == [{name: value for name, value in sample.items() if name != "key"}]
    assert made[1]["row"] == [0.1234, 0.0, 1e-6]
    assert slim.slim(made) == made
    assert asked["depths"][0]["key"] == "76771"  # the rows that were given stay as they were


def test_merging_shrinks_a_file_of_an_earlier_study(tmp_path: Path) -> None:
    rows = [*_rows(), *_heads("bam+ssmax", 2000)]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"env": {"jax": "1"}, "rows": rows}), encoding="utf-8")
    before = path.stat().st_size
    merge.main([str(path), str(path)])
    assert path.stat().st_size < before / 2
    made = kept.read(path)
    assert made["env"] == {"jax": "1"}
    assert made["rows"] == slim.slim(rows)
