"""The arithmetic and the table of the study of what a sweep saves."""

import pytest

from experiments.sweep import speed as study


def row(case: str, way: str, alone: float) -> dict:
    facts = {"alone_s": alone, "cached_s": alone / 2, "alone_cpu_s": 1.5 * alone}
    times = [{"wall_s": 20.0, "cpu_s": 30.0}, {"wall_s": 30.0, "cpu_s": 30.0}]
    same = {"bitwise_equal": 8, "loss_relative_error": 0.0, "parameter_absolute_error": 0.0, "load_before": 0.04}
    return {
        "case": case,
        "way": way,
        "env": {"platform": "P", "jax": "J"},
        **facts,
        **same,
        **study.ratios(facts, times),
    }


def test_ratios_are_of_the_runs_to_the_sweep():
    found = study.ratios(
        {"alone_s": 100.0, "cached_s": 50.0}, [{"wall_s": 20.0, "cpu_s": 1}, {"wall_s": 30.0, "cpu_s": 1}]
    )
    assert found["ratio"] == pytest.approx(4)
    assert found["ratio_least"] == pytest.approx(3.33)
    assert found["ratio_cached"] == pytest.approx(2)


def test_rows_measured_again_take_the_place_of_old_ones():
    spread, vmapped = study.WAYS
    old = [row("dim 32, rows of 64", spread, 100), row("tiny", vmapped, 100), row("tiny", spread, 100)]
    rows = study.merged(old, [row("tiny", spread, 90)])
    assert [(one["case"], one["way"], one["alone_s"]) for one in rows] == [
        ("tiny", spread, 90),
        ("tiny", vmapped, 100),
        ("dim 32, rows of 64", spread, 100),
    ]
    text = study.table(rows)
    assert f"| tiny | {spread} | 0.0 | 90 | 45 | 20.0, 30.0 | **3.6** | 1.8 | 4.5 | 8 of 8 |" in text
    assert f"| tiny | {spread} | – | 90 | – |" in study.table([{**rows[0], "load_before": None, "cached_s": None}])
