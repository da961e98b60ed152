"""The study of positional LSH on a small plan: its rows respect their bounds, its figures and its report are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.positional_lsh.convergence import Plan, block_rows, mask_rows, output_rows, spectral_norm
from experiments.positional_lsh.report import of, report, write_figures

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
    write_figures(tmp_path, rows)
    assert len(list(tmp_path.glob("*.png"))) == 3
    text = report({"study": {"length": 64, "seeds": 2}, "rows": rows})
    assert "| 4 | integer | 20 |" in text
    assert "exact ALiBi, window of the longest block" in text
