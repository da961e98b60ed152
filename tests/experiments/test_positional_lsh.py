"""The study of positional LSH on a small plan: its rows respect their bounds, its figures and its report are made."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.positional_lsh import train, training
from experiments.positional_lsh.convergence import Plan, block_rows, mask_rows, output_rows, spectral_norm
from experiments.positional_lsh.report import of, write_report
from experiments.positional_lsh.report_runs import crossover

PLAN = Plan(length=64, sigmas=(4.0,), samples=(1, 20), laws=("integer", "fixed"), seeds=2)


def test_power_iteration_is_the_spectral_norm() -> None:
    x = np.random.default_rng(0).normal(size=(30, 30))
    assert float(spectral_norm(jnp.asarray(x + x.T, jnp.float32))) == pytest.approx(
        np.linalg.norm(x + x.T, 2), rel=2e-2
    )


def test_rows_figures_and_report(tmp_path) -> None:
    rows = list(mask_rows(PLAN)) + list(block_rows((64, 256), 4.0, 3, 0.1, 4))
    for row in of(rows, "mask", case="integer"):
        assert row["largest_max"] <= row["largest_bound"] * 1.2
        assert row["spectral_max"] <= row["spectral_bound"]
    few, many = (of(rows, "mask", case="integer", samples=s)[0]["spectral"] for s in PLAN.samples)
    assert many < few
    q, k, v = (jax.random.normal(key, (1, 64, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    rows += output_rows(q, k, v, PLAN, 0, [0.25, 0.5])
    error = lambda case, s: np.mean([r["error"] for r in of(rows, "output", case=case, samples=s)])
    assert error("shared", 20) < error("shared", 1)
    assert error("window", 20) < error("shared", 20) < error("fixed", 20)
    results = {"study": {"length": 64, "seeds": 2}, "rows": rows}
    text = write_report(tmp_path, results, {"runs": {"today": ENV}, "rows": SPEED}, TRAINED)
    assert len(list((tmp_path / "figures").glob("*.png"))) == 5
    assert "| 4 | integer | 20 |" in text
    assert "exact ALiBi, window of the longest block" in text
    assert "| LSH, s = 10 | 2.000 (0.5×) | 4.000 (4.0×) |" in text
    assert f"| LSH, s = 10 | exact ALiBi | {np.e:.2f}, {np.e:.2f} |" in text


ENV = {"device": "a GPU", "driver": "1", "date": "today", "commit": "abc"}
KEYS = (("lsh, s = 10", "pallas_triton", 2.0), ("alibi", "mosaic_gpu", 1.0), ("window, s = 10", "mosaic_gpu", 1.5))
KEYS += (("windows, s = 10", "mosaic_gpu", 9.0),)
MORE = (("lsh, s = 5", "pallas_triton", 1.0), ("lsh, s = 20", "pallas_triton", 3.0), ("fixed", "pallas_triton", 1.0))
SPEED = [
    {"case": case, "impl": impl, "pass": which, "T": length, "ms": ms * growth, "run": "one", "temp_bytes": 2**20}
    for case, impl, ms in (*KEYS, *MORE)
    for which in ("fwd", "fwd_bwd")
    for length, growth in ((1024, 1.0), (2048, 16.0 if case == "alibi" else 2.0))
]
TRAINED = {
    "plan": {"layers": 1, "dim": 8, "heads": 1, "length": 1024, "steps": 50, "batch": 1},
    "rows": [
        row
        for case in ("alibi", "lsh(samples=10)")
        for row in (
            {"case": case, "benchmark": "training", "tokens": 10, "seconds": 1.0},
            *({"case": case, "benchmark": "perplexity", "read": r, "window": 512, "loss": [1.0] * 4}
              for r in dict.fromkeys((case, "alibi"))),
        )
    ],
}  # fmt: skip


def test_crossover_is_where_it_stays_faster() -> None:
    assert crossover(SPEED, "fwd", "alibi") == "between 1,024 and 2,048 tokens"
    assert crossover(SPEED, "fwd", "windows, s = 10") == "at every length from 1,024 on"
    assert crossover(SPEED, "fwd", "window, s = 10") == "at none of the lengths up to 2,048"


# ---- Training ----


def test_all_cells_see_the_same_rows_inside_the_text() -> None:
    plan = training.Plan(length=8, batch=3, steps=50, rows=4, read_at_once=2)
    where = training.places(plan, 100)
    np.testing.assert_array_equal(where, training.places(plan, 100))
    assert where.min() >= 0
    assert where.max() + plan.length + 1 <= 100
    rows = training.held_out_rows(plan, np.arange(100, dtype=np.uint16))
    assert rows.shape == (4, 17)
    assert (rows[0, 0], rows[-1, -1]) == (0, 99)
    with pytest.raises(ValueError, match="4 rows of 17 tokens need 68, the text has 60"):
        training.held_out_rows(plan, np.arange(60, dtype=np.uint16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("step=50", "'step' is not one of"),
        ("steps=x", "'x' is no int"),
        ("steps=60", "steps=60 must be a multiple of 50"),
    ],
)
def test_wrong_changes_of_the_plan_are_refused(change: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train.plan_of([change])


def test_results_of_another_plan_are_not_continued(tmp_path) -> None:
    path = tmp_path / "training.json"
    path.write_text(json.dumps({"plan": {"steps": 50}, "text": ["a"], "rows": [{"case": "nope"}]}))
    facts = {"plan": {"steps": 50}, "text": ["a"]}
    assert train.finished(path, facts, True) == {"nope": [{"case": "nope"}]}
    with pytest.raises(ValueError, match="continue it with --resume"):
        train.finished(path, facts, False)
    with pytest.raises(ValueError, match="another plan or text"):
        train.finished(path, {"plan": {"steps": 100}, "text": ["a"]}, True)


@pytest.mark.slow
def test_a_cell_trains_and_is_read_under_other_schemes(tmp_path) -> None:
    np.random.default_rng(0).integers(0, 90, 2000).astype("<u2").tofile(tmp_path / "text.u16")
    text = ["--text", str(tmp_path / "text.u16"), "--held-out", str(tmp_path / "text.u16")]
    size = "length=64 batch=4 steps=50 rows=4 read_at_once=2 layers=1 dim=32 heads=4 vocab=128 dtype=float32"
    results = tmp_path / "training.json"
    train.main([*text, "--cells", "lsh(samples=10)", "--results", str(results), "--threads", "1", *size.split()])
    rows = json.loads(results.read_text())["rows"]
    assert rows[0]["curve"][-1] < rows[0]["curve"][0]
    read = {(row["read"], row["draw"]): row["loss"] for row in rows[1:]}
    assert len(read) == 3 + 1 + 3  # three draws of its own, exact ALiBi, three draws of twenty samples
    assert all(np.isfinite(loss).all() for loss in read.values())
    assert read["lsh(samples=10)", 0] != read["lsh(samples=10)", 1]
