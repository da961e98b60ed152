"""The named models' train steps compiled for TPU topologies with libtpu, and what is recorded of them."""

import importlib.util
import json
from typing import Any

import pytest

from bampath.step import build_model, declare
from experiments.pod_compile import run as study
from launch.compile import resolve

LANE = [case for case in study.CASES if case.lane]
DEVICES = {"v5e:4x4": 16, "v5p:2x2x2": 8, "v6e:4x4": 16}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -r requirements-tpu.txt"
)


@needs_libtpu
@pytest.mark.aot
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", LANE, ids=lambda case: case.name)
def test_the_train_step_compiles_and_fits(case: study.Case) -> None:
    row = study.run(case)
    assert row["fits"], row
    assert row["devices"] == DEVICES[case.topology]
    assert set(row["kernels"]) == {"attention_forward", "attention_backward_keys_queries"}
    # Parameters, two moments and the batch are cut over all chips of the fsdp axis, and donated. Layouts pad narrow
    # arrays: 142 MiB a chip for path-760m on eight v5p.
    share = 12 * row["parameters"] / row["mesh"]["fsdp"]
    assert share <= row["argument_bytes"] < 1.1 * share + 2**26


ROWS = json.loads(study.RESULTS.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_recorded_rows_are_of_the_cases_as_they_are(row: dict[str, Any]) -> None:
    case = next(case for case in study.CASES if case.name == row["case"])
    config, chosen = resolve(case.config, case.overrides, row["devices"])
    assert row["overrides"] == [*case.overrides, *chosen]
    facts = row if row["fits"] else row["at_largest_batch"]
    assert facts["parameters"] == declare(build_model(config)).count
    assert facts["memory_bytes"] <= row["hbm_bytes"]
