"""The benchmark of the train step: its cells exist, its trace is read right, its rows say what ran."""

from typing import Any

import pytest

from bampath.config import get
from experiments.bam_h200 import speed, step_jax


def test_every_cell_is_a_configuration() -> None:
    for cell in speed.CELLS:
        if cell.what != "torch":
            config = cell.shape.config(cell.what)
            assert config.model.head_dim in (48, 64)
            assert config.data.batch_size * config.data.sequence_length in (49_152, 32_768, 16_384)
        assert speed.named(cell.name) == cell
    with pytest.raises(ValueError, match="no cell is called '120m'"):
        speed.named("120m")


def test_a_step_is_measured() -> None:
    runner = step_jax.build(get("tiny", "data.batch_size=2", "data.sequence_length=16", "data.document_mask=false"))
    runner.steps(2)
    assert 4 < runner.loss() < 9
    assert runner.parameters > 1e5


def test_kernels_are_told_apart_by_name() -> None:
    name = lambda pid, tid, text: {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": text}}
    run = lambda tid, kernel, ms: {"ph": "X", "pid": 1, "tid": tid, "name": kernel, "dur": 3e3 * ms}
    events: list[dict[str, Any]] = [
        name(1, 7, "Stream #7(Compute)"),
        name(1, 8, "python host thread"),
        run(7, "attention_forward_d64", 2.0),
        run(7, "nvjet_hsh_128x256", 5.0),
        run(7, "nvjet_hsh_128x256", 1.0),
        run(7, "loop_multiply_fusion", 0.5),
        run(8, "jit_step", 100.0),
    ]
    found = step_jax.summary(events)
    assert found["kinds"] == pytest.approx({"attention": 2.0, "matrix products": 6.0, "elementwise and the rest": 0.5})
    assert next(iter(found["longest"])) == "nvjet_hsh_128x256"


def test_ratios_compare_the_same_shape() -> None:
    row = lambda shape, case, rate: {"shape": shape, "case": case, "tokens_per_second": rate, "ratio": {}}
    rows = speed.with_ratios([row("a", "torch", 10.0), row("a", "rope", 20.0), row("b", "rope", 5.0)])
    assert rows[1]["ratio"] == {"torch": 2.0, "rope": 1.0}
    assert rows[2]["ratio"] == {"rope": 1.0}
