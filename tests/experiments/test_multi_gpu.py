"""The study of several GPUs: its cells, who is measured when, what a trace says, its tables, and tiny runs of it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from experiments.multi_gpu import attention, checks, report, run, step, trace
from experiments.multi_gpu import cells as study
from experiments.multi_gpu.cells import SCHEMES, SMOKE, Cell, cells, named


@pytest.mark.parametrize("counts", [(1, 2, 4), (1, 2, 4, 8), (1, 3)])
def test_cells_are_what_any_number_of_gpus_can_run(counts: tuple[int, ...]) -> None:
    found = cells(counts)
    assert len({cell.name for cell in found}) == len(found)
    assert {cell.gpus for cell in found} == set(counts)
    most = max(counts)
    train = [cell for cell in found if cell.what == "train"]
    assert {(cell.scheme, cell.strategy) for cell in train if cell.gpus == most} == {
        (scheme, strategy) for scheme in SCHEMES for strategy in ("fsdp", "tensor", "context")
    }
    if counts != (1, 3):  # 24 heads, but 4096 tokens, are not cut into three
        assert all(cell.config().mesh.size == cell.gpus for cell in train)
        assert all(named(cell.name) == cell for cell in found)
    weak = [cell for cell in train if cell.scaling == "weak" and cell.shape == "432m"]
    assert {cell.rows / cell.gpus for cell in weak} == {16}


@pytest.mark.parametrize(
    ("scheme", "carried"),
    [("path+fox", True), ("bam+path", True), ("fox+path+ssmax", True), ("3*rope,path", True), ("bam+ssmax", False)],
)
def test_path_is_known_wherever_it_stands(
    scheme: str, carried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("train", scheme, 1, "smoke")
    assert cell.carries_keys == carried
    model = cell.config().model
    assert (model.attention_impl == "mosaic_gpu") == model.scan == carried
    monkeypatch.setattr(checks, "_compiled", lambda config: (config, None))
    monkeypatch.setattr(checks, "_train", lambda config, *_: ([0.0], True))
    for backend in ("gpu", "cpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        dtypes = {row["dtype"] for row in checks.losses(Cell("losses", scheme, 2))["rows"]}
        fused = carried and backend == "gpu"
        assert dtypes == ({"bfloat16"} if fused else {"bfloat16", "float32"})

    def refuse(command: list[str], **_: Any) -> None:
        raise InterruptedError(command[0])

    monkeypatch.setattr(run.subprocess, "Popen", refuse)
    with pytest.raises(InterruptedError, match="^nice$" if carried else sys.executable):
        run.start(cell, (0,), tmp_path, "cpu")


@pytest.mark.parametrize(
    ("scheme", "has"),
    [
        ("rope", set()),
        ("bam+ssmax", {"prior", "sharpness"}),
        ("path+fox", {"w", "beta", "log_gates"}),
        ("bam+path", {"w", "beta", "prior"}),
        ("fox", {"log_gates"}),
    ],
)
def test_attention_alone_has_the_inputs_of_its_parts(
    scheme: str, has: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(attention.arrays_of(scheme, 8, 4, 16, "bfloat16")) == {"q", "k", "v", *has}
    monkeypatch.setattr(study, "FUSED_PATH", [])  # which a CPU lacks
    made = attention.prepare(Cell("attention", scheme, 1, "smoke"))
    x = made._make()
    out = made._passes["fwd"](x)
    assert out.shape == x["v"].shape
    assert jax.numpy.isfinite(out.astype("float32")).all()


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="no cell is called 'train 9b rope one x1'"):
        named("train 9b rope one x1")


def test_the_dry_run_lists_cells_with_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--dry-run", "--gpus", "2", "--cells", "no overlap", "losses"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["losses", "losses", "losses", "train"]
    assert lines[3].endswith("--xla_gpu_enable_latency_hiding_scheduler=false")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "2", "--cells", "llama"], "--cells llama matches none"),
        (["--gpus", "2", "--counts", "4"], "--counts 4 needs more GPUs than the 2"),
        (["--gpus", "2", "--counts", "1", "0"], "--counts 0 must be at least 1"),
        (["--gpus", "2", "--seconds", "-3"], "--seconds -3 must be positive"),
        (["--gpus", "0"], "no GPU was found here"),
    ],
)
def test_impossible_wishes_are_refused(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "gpus_here", lambda: 0)
    with pytest.raises(ValueError, match=message):
        run.main([*arguments, "--dry-run"])


def test_cells_of_one_size_share_the_gpus_by_what_they_cost() -> None:
    sizes = [(1, 4.0), (2, 1.0), (1, 1.0), (4, 1.0), (2, 1.0), (2, 1.0), *[(1, 1.0)] * 3]
    found = run.places([SimpleNamespace(gpus=n, cost=cost) for n, cost in sizes], 4)  # type: ignore[misc]
    assert found == [(0,), (0, 1), (1,), (0, 1, 2, 3), (2, 3), (0, 1), (2,), (3,), (1,)]


def test_nobody_overtakes_on_gpus_that_an_earlier_cell_waits_for() -> None:
    job = lambda *gpus, busy=False, waits=False: SimpleNamespace(gpus=gpus, busy=busy, waits=waits)
    running, first, second, third = job(0, busy=True), job(0, 1, waits=True), job(1, waits=True), job(2, waits=True)
    assert run.startable([running, first, second, third]) == [third]
    assert run.startable([job(3), first, second, third]) == [first, third]


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _kernel(pid: int, tid: int, name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur}


def test_a_trace_says_what_collectives_hide() -> None:
    events = [
        *(_thread(pid, tid, f"Stream #{tid}(Compute)") for pid in (1, 2) for tid in (7, 8)),
        _thread(1, 9, "python"),
        _kernel(1, 9, "nccl on the host", 0, 9000),
        _kernel(1, 7, "nvjet_gemm", 0, 4000),
        _kernel(1, 8, "ncclDevKernel_AllGather", 3000, 3000),
        _kernel(1, 7, "attention_forward", 7000, 1000),
        _kernel(2, 7, "nvjet_gemm", 0, 8000),
        _kernel(2, 8, "ncclDevKernel_AllGather", 2000, 4000),
    ]
    found = trace.summary(events, steps=2)
    assert found["gpus"] == 2
    # GPU 1: 8 ms, of which 7 busy, 3 sent, 2 of them alone; GPU 2: 8 ms, all busy, 4 sent, none alone; over 2 steps.
    assert (found["step"], found["busy"]) == (4.0, (7 + 8) / 4)
    assert (found["collectives"], found["exposed"]) == ((3 + 4) / 4, 2 / 4)
    assert found["kinds"] == {"matrix products": 12 / 4, "collectives": 7 / 4, "attention": 1 / 4}
    assert next(iter(found["longest"])) == "nvjet_gemm"
    assert trace.summary(events[:5], steps=2) == {}


def _row(gpus: int, strategy: str, scaling: str, rate: float, losses: list[float], rows: int = 16) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": f"{strategy} {gpus}", "pass": "train_step", "shape": "432m", "case": "rope"}
    row |= {"variant": "", "gpus": gpus, "strategy": strategy, "scaling": scaling, "B": rows, "T": 2048}
    row |= {"ms": 10.0, "ms_min": 9.0, "ms_max": 11.0, "tokens_per_second": rate, "mfu": 0.4, "memory_bytes": [2**30]}
    where = {"step": 10.0, "collectives": 2.0, "exposed": 0.5}
    return row | {"losses": losses, "where": where}


def test_tables_compare_with_one_gpu(tmp_path: Path) -> None:
    rows = [
        _row(1, "one", "both", 100.0, [3.0, 2.0, 1.0]),
        _row(4, "fsdp", "weak", 380.0, [3.1, 2.1, 1.1], rows=64),
        _row(4, "tensor", "strong", 300.0, [3.0001, 2.0, 1.01]),
    ]
    assert report.efficiency(rows[1], rows) == pytest.approx(0.95)
    assert report.apart(rows[1], rows) is None  # other rows
    assert report.apart(rows[2], rows) == pytest.approx((1e-4, 1e-2))
    lost = {"cell": "trainer rope x4", "pass": "trainer", "failed": "out of memory"}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"runs": {"some day": {"jax": "1"}}, "rows": [*rows, lost]}))
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\n".join(report.MARKS) + "\nafter\n")
    report.write_tables(results, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "some day: None, driver None, jax 1" in text
    line = next(line for line in text.splitlines() if "| 64 × 2,048 |" in line)
    assert "| 95.0% | 1.0 | 20.0% | 5.0% |" in line
    assert "- out of memory: `trainer rope x4`" in text
    assert "Tensor parallel" in text
    assert "Context parallel" not in text


def test_losses_stand_by_mesh_and_what_fails_stands_out() -> None:
    row = {"pass": "losses", "case": "rope", "dtype": "float32", "tolerance": 1e-4}
    rows = [row | {"mesh": "one"}, row | {"mesh": "fsdp", "apart": 2e-7, "passed": True}]
    rows += [row | {"mesh": "tensor", "apart": 0.25, "passed": False}]
    rows += [row | {"mesh": "fsdp", "case": "fox", "failed": "it broke", "passed": False}]
    lines = report.loss_table(rows).splitlines()
    assert lines[0] == "| scheme | type | tolerance | fsdp | tensor |"
    assert lines[2] == "| `rope` | float32 | 0.0001 | 2.0e-07 | **2.5e-01** |"
    assert lines[3] == "| `fox` | float32 | 0.0001 | **it broke** |  |"


WORKER = """
import json, sys
name = sys.argv[1]
if name.endswith("x1"):
    sys.exit("this one breaks")
print("READY", flush=True)
sys.stdin.readline()
print("FREE", flush=True)
print(json.dumps({"pass": "fwd", "ms": 1.0, "tflops_per_gpu": 1.0, "memory_bytes": [], "where": {}}), flush=True)
"""


def test_a_cell_that_breaks_leaves_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(run, "WORKER", (sys.executable, str(worker)))
    monkeypatch.setattr(run.Study, "_look", lambda self: None)
    out = tmp_path / "results.json"
    kept = {"cell": "an older one", "pass": "fwd", "ms": 2.0, "run": "then"}
    again = {"cell": SMOKE[3].name, "pass": "fwd", "ms": 3.0, "run": "before"}
    out.write_text(json.dumps({"env": {}, "runs": {"then": {"jax": "0"}, "before": {}}, "rows": [kept, again]}))
    with pytest.raises(SystemExit):
        run.main(["--platform", "cpu", "--out", str(out), "--seconds", "60"])
    results = json.loads(out.read_text())
    rows = {row["cell"]: row for row in results["rows"]}
    assert results["runs"]["then"] == {"jax": "0"}
    assert set(results["runs"]) == {"then", rows[SMOKE[1].name]["run"]}
    assert set(rows) == {"an older one", *(cell.name for cell in SMOKE)}
    assert "this one breaks" in rows[SMOKE[0].name]["failed"]
    assert all(rows[cell.name]["ms"] == 1.0 for cell in SMOKE[1:])


def test_a_train_step_and_attention_are_measured_on_a_mesh() -> None:
    ((row, where),) = step.prepare(SMOKE[2]).measure()
    assert (row["gpus"], row["B"], len(row["losses"])) == (2, 2, 4)
    assert row["losses"][3] < row["losses"][0]
    assert {one["axes"] for one in row["program"]["collectives"]} == {"context"}
    assert row["tokens_per_second"] == pytest.approx(2 * 128 / row["ms"] * 1e3)
    assert where() == {}  # no kernels of a GPU in the trace
    passes = attention.prepare(SMOKE[3]).measure()
    assert [row["pass"] for row, _ in passes] == ["fwd", "fwd_bwd"]
    assert all(row["ms_min"] <= row["ms"] <= row["ms_max"] for row, _ in passes)


TINY = (
    *("model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=2", "model.head_dim=16", "model.mlp_dim=32"),
    *("model.vocab_size=64", "data.document_mask=false", "train.accumulate=1", "optim.name=adamw"),
)


def test_losses_on_a_mesh_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SMALL", TINY)
    monkeypatch.setattr(checks, "meshes", lambda gpus: {"fsdp × context": ("mesh.fsdp=2", f"mesh.context={gpus // 2}")})
    monkeypatch.setattr(checks, "TOLERANCE", {"float32": 1e-5})
    one, spread = checks.losses(Cell("losses", "bam+ssmax", 4), rows=4, length=32)["rows"]
    assert (one["mesh"], spread["mesh"], spread["passed"]) == ("one", "fsdp × context", True)
    assert len(set(one["losses"])) == len(spread["losses"]) == checks.STEPS
    monkeypatch.setattr(checks, "TOLERANCE", {"float32": -1.0})
    monkeypatch.setattr(checks, "_compiled", lambda config: (None, None))
    monkeypatch.setattr(checks, "_train", lambda config, *_: ([1.0 + config.mesh.size], config.mesh.size > 1))
    one, spread = checks.losses(Cell("losses", "bam+ssmax", 4), rows=4, length=32)["rows"]
    assert (one["passed"], spread["apart"], spread["passed"]) == (False, 3.0, False)


def test_ways_to_spread_use_all_gpus() -> None:
    for gpus in (2, 4, 8):
        for overrides in checks.meshes(gpus).values():
            sizes = [int(entry.partition("=")[2]) for entry in overrides]
            assert jax.numpy.prod(jax.numpy.array(sizes)) == gpus


@pytest.mark.slow
def test_the_whole_study_runs_on_cpu_devices(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    run.main(["--platform", "cpu", "--out", str(out), "--seconds", "500"])
    results = json.loads(out.read_text())
    assert {row["cell"] for row in results["rows"]} == {cell.name for cell in SMOKE}
    assert "failed" not in str(results["rows"])
    assert results["env"]["jax"] == jax.__version__
