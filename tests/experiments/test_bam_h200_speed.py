"""The benchmark of the train step: its cells exist, its trace is read right, its rows say what ran."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from bampath.config import get
from experiments.bam_h200 import report, speed, step_jax


def test_every_cell_is_a_configuration() -> None:
    for cell in speed.CELLS:
        if cell.what != "torch":
            config = cell.shape.config(cell.what)
            assert config.model.head_dim in (48, 64)
            assert config.data.batch_size * config.data.sequence_length in (49_152, 32_768, 16_384)
        assert speed.named(cell.name) == cell
    with pytest.raises(ValueError, match="no cell is called '120m'"):
        speed.named("120m")


def test_a_step_is_measured_and_nothing_is_on_the_device_before() -> None:
    there = {id(array) for array in jax.live_arrays()}
    runner = step_jax.build(get("tiny", "data.batch_size=2", "data.sequence_length=16", "data.document_mask=false"))
    new = sum(array.nbytes for array in jax.live_arrays() if id(array) not in there)
    assert new < 1e3  # a constant, perhaps
    runner.start()
    state = sum(leaf.nbytes for leaf in jax.tree.leaves((runner._state, runner._batch)))
    assert state > 1.2e6  # parameters and two moments of each, in float32
    assert runner.needed is not None
    assert runner.needed["state"] == pytest.approx(state, rel=0.01)
    assert runner.needed["temporary"] > 0
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


def test_a_step_larger_than_the_device_is_refused() -> None:
    needed = {"state": 5 << 30, "temporary": 48 << 30}
    step_jax.refuse_large(needed, 53 << 30)
    step_jax.refuse_large(needed, None)
    with pytest.raises(
        MemoryError, match=r"needs 5\.0 GiB state \+ 48\.0 GiB temporary, and the device gives 52\.0 GiB"
    ):
        step_jax.refuse_large(needed, 52 << 30)


FAKE = """
import json, pathlib, sys, time
busy, what, row = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
if what == "bam+ssmax":
    sys.exit("Traceback\\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory\\n" + 20 * "-" + "\\nframes")
print("READY", flush=True)
sys.stdin.readline()
busy.touch(exist_ok=False)  # an error if the cell before has not ended
time.sleep(0.1)
if what == "path+fox":
    busy.unlink()
    sys.exit("MemoryError: a train step needs more")
print(json.dumps({"row": row, "env": {"jax": "1"}}), flush=True)
sys.stdout.close()
time.sleep(0.1)
busy.unlink()
"""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the cells that were started; their processes take their turn, or fail, and measure nothing."""
    started: list[str] = []

    def command_of(cell: speed.Cell) -> list[str]:
        started.append(cell.name)
        timed = {"tokens_per_second": 10.0, "mfu": None, "memory_bytes": None}
        return [sys.executable, "-c", FAKE, str(tmp_path / "busy"), cell.what, json.dumps(speed.facts(cell) | timed)]

    monkeypatch.setattr(speed, "command_of", command_of)
    return started


def test_cells_that_fail_have_a_row_with_the_reason(
    fakes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, own = tmp_path / "speed.json", [cell for cell in speed.CELLS if cell.shape.name == "432m"]
    assert [cell.what for cell in own] == ["torch", "rope", "bam+ssmax", "path+fox"]
    speed.run(own, out, minutes=1)
    made = json.loads(out.read_text())["rows"]
    why = {"bam+ssmax": "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"}
    why |= {"path+fox": "MemoryError: a train step needs more"}
    assert {row["case"]: row["failed"] for row in made if "failed" in row} == why
    assert [row["ratio"] for row in made if "failed" not in row] == [{"torch": 1.0, "rope": 1.0}] * 2
    assert [(row["shape"], row["B"], row["T"], row["D"]) for row in made] == [("432m", 16, 2048, 64)] * 4
    said = capsys.readouterr().out
    assert "432m path+fox                    failed: MemoryError: a train step needs more" in said
    table = report.speed_table({"rows": made})
    assert "| 432m | 16 × 2,048 | `path+fox` | failed |  |  |  |  |" in table
    assert "- `path+fox` at 432m failed: MemoryError: a train step needs more" in table.splitlines()
    speed.run(own, out, minutes=1)
    assert len(fakes) == 4  # nothing was run again
    speed.run(own, out, minutes=1, retry=True)
    assert len(fakes) == 8
    assert len(json.loads(out.read_text())["rows"]) == 4


def test_rows_of_an_earlier_call_stay_until_all_new_ones_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A call that is killed midway leaves what it found; where it found nothing of the shape, what it has made."""
    out, own = tmp_path / "speed.json", [cell for cell in speed.CELLS if cell.shape.name == "432m"]
    timed = lambda cell, rate: speed.facts(cell) | {"tokens_per_second": rate, "mfu": None, "memory_bytes": None}
    other, failed = timed(speed.CELLS[0], 5.0), speed.facts(own[3]) | {"failed": "MemoryError"}
    older = [other, *(timed(cell, 10.0) for cell in own[:3]), failed]

    def call(cells_before_the_kill: int, retry: bool = True) -> None:
        def side_by_side(cells: list[speed.Cell]) -> Any:
            yield from ((timed(cell, 20.0), {"jax": "new"}) for cell in cells[:cells_before_the_kill])
            if cells_before_the_kill < len(cells):
                raise KeyboardInterrupt

        monkeypatch.setattr(speed, "side_by_side", side_by_side)
        speed.run(own, out, minutes=1, retry=retry)

    rates = lambda: [row.get("tokens_per_second") for row in json.loads(out.read_text())["rows"]]
    for count in range(len(own)):
        out.write_text(json.dumps({"env": {"jax": "old"}, "rows": older}))
        with pytest.raises(KeyboardInterrupt):
            call(count)
        assert json.loads(out.read_text()) == {"env": {"jax": "old"}, "rows": older}
    call(len(own))
    assert rates() == [5.0, 20.0, 20.0, 20.0, 20.0]
    assert json.loads(out.read_text())["env"] == {"jax": "new"}
    out.write_text(json.dumps({"env": {}, "rows": [other]}))
    with pytest.raises(KeyboardInterrupt):
        call(2, retry=False)
    assert rates() == [5.0, 20.0, 20.0]


def test_rows_stay_where_a_measured_case_fails_now(
    fakes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the processes of `fakes` bam+ssmax and path+fox fail. Another shape of the same call is not held up."""
    out, own = tmp_path / "speed.json", [cell for cell in speed.CELLS if cell.shape.name == "432m"]
    timed = lambda cell: speed.facts(cell) | {"tokens_per_second": 5.0}
    failed = [speed.facts(own[3]) | {"failed": "MemoryError"}]
    older = {"env": {"jax": "0"}, "rows": [*map(timed, own[:3]), *failed]}
    out.write_text(json.dumps(older))
    speed.run(own, out, minutes=1, retry=True)
    assert len(fakes) == 4
    assert json.loads(out.read_text()) == older
    why = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    told = [line for line in capsys.readouterr().out.splitlines() if "older rows stay" in line]
    stay = "432m: older rows stay and none of the new ones is taken, since "
    assert told == [f"{stay}bam+ssmax, which was measured before, failed now: {why}"]
    other = next(cell for cell in speed.CELLS if cell.name == "1.1b rope")
    speed.run([*own, other], out, minutes=1, retry=True)
    now = json.loads(out.read_text())["rows"]
    assert now[:-1] == older["rows"]
    assert (now[-1]["shape"], now[-1]["tokens_per_second"]) == ("1.1b", 10.0)


def test_a_shape_is_not_run_again_without_cells_that_were_measured(fakes: list[str], tmp_path: Path) -> None:
    out, own = tmp_path / "speed.json", [cell for cell in speed.CELLS if cell.shape.name == "432m"]
    row = speed.facts(own[0]) | {"tokens_per_second": 10.0}
    failed = [speed.facts(cell) | {"failed": "MemoryError"} for cell in own[2:]]
    out.write_text(json.dumps({"env": {}, "rows": [row, *failed]}))
    with pytest.raises(ValueError, match=r"rows of torch at 432m.*name them in --cases"):
        speed.run(own[3:], out, minutes=1, retry=True)
    assert json.loads(out.read_text())["rows"] == [row, *failed]
    assert fakes == []
    speed.run([own[0], own[3]], out, minutes=1, retry=True)
    assert fakes == [own[0].name, own[3].name]


def test_a_reason_is_a_line() -> None:
    assert speed.reason("", -9) == "ended with status -9"
    assert speed.reason("Killed\n\n", 1) == "Killed"
    assert speed.reason("a.b.OddError: first\nE1130 12 log: Error\n", 1) == "a.b.OddError: first"
    assert speed.reason("error: no torch\n", 2) == "error: no torch"
    assert speed.reason("ValueError: " + 1000 * "x", 1) == "ValueError: " + 388 * "x"


def test_ratios_compare_the_same_shape() -> None:
    row = lambda shape, case, rate: {"shape": shape, "case": case, "tokens_per_second": rate, "ratio": {}}
    rows = speed.with_ratios([row("a", "torch", 10.0), row("a", "rope", 20.0), row("b", "rope", 5.0)])
    assert rows[1]["ratio"] == {"torch": 2.0, "rope": 1.0}
    assert rows[2]["ratio"] == {"rope": 1.0}
