"""Several real processes over loopback: they train as one, notice when one ends, and any number of them continues."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bampath import checkpoint, config
from bampath.metrics import read
from bampath.train import fit
from bampath.watch import LOST
from tests.train.small import SMALL, text_file

ROOT = Path(__file__).parents[2]
STEPS = 14
OVERRIDES = [entry for entry in SMALL if not entry.startswith("data.batch_size")]
OVERRIDES += ["data.batch_size=8", f"train.steps={STEPS}", "train.save_every=3", "train.eval_every=7"]
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a text, and `alone`: the run that nothing ever disturbed, in one process on one device."""
    home = tmp_path_factory.mktemp("processes")
    text_file(home)
    fit(config.get("tiny", *OVERRIDES, *places(home)), home / "alone", out=io.StringIO())
    return home


def places(home):
    return [f"data.source={home / 'text'}", f"data.cache_dir={home / 'cache'}"]


def last_ones(arguments):
    """Of several values of a key the last one."""
    return list({entry.partition("=")[0]: entry for entry in arguments}.values())


def free_address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def start(home, folder, count, devices, *arguments, moments=None, each=None):
    """`count` processes of `experiments.train` with so many devices each; moments: {process: see tests.train.killed},
    each: {process: overrides of its own}."""
    coordinator = free_address()
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_COMPILATION_CACHE_DIR": str(home / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    common = ["--config", "tiny", "--run-dir", str(home / folder)]
    running = []
    for process in range(count):
        who = ["--coordinator", coordinator, "--processes", str(count), "--process", str(process), "--heartbeat", "60"]
        moment = (moments or {}).get(process, "never")
        own = last_ones([*OVERRIDES, *places(home), *arguments, *(each or {}).get(process, [])])
        command = [sys.executable, "-m", "tests.train.killed", moment, *common, *(who if count > 1 else []), *own]
        with (home / f"{folder}.{process}.log").open("w") as log:
            running.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    return running


def end(home, folder, running, seconds=120):
    """(exit statuses, what each printed); a process that still runs after `seconds` fails the test."""
    last = time.monotonic() + seconds
    try:
        statuses = [process.wait(max(0.1, last - time.monotonic())) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return statuses, [(home / f"{folder}.{i}.log").read_text() for i in range(len(running))]


def run(home, folder, count, devices, *arguments, **options):
    return end(home, folder, start(home, folder, count, devices, *arguments, **options))


def numbers(folder):
    return [(r["kind"], r["step"], r["loss"]) for r in read(folder / "metrics.jsonl")]


def assert_same_run(home, folder):
    """Every loss, of training and of evaluation, within 1e-5 of the undisturbed run's, each step once and in order."""
    got, want = numbers(home / folder), numbers(home / "alone")
    assert [(kind, step) for kind, step, _ in got] == [(kind, step) for kind, step, _ in want]
    assert [loss for *_, loss in got] == pytest.approx([loss for *_, loss in want], rel=1e-5, abs=0)


def test_a_signal_to_one_a_killed_one_and_other_counts_and_meshes_change_no_loss(home):
    statuses, printed = run(home, "run", 2, 2, "mesh.fsdp=2", "mesh.tensor=2", moments={1: "term:4"})
    assert statuses == [128 + signal.SIGTERM] * 2, printed
    assert "saved after step" in printed[0]
    assert "loss" not in printed[1]  # process 0 speaks for all
    stopped = checkpoint.describe(home / "run")
    assert {len(list((stopped.path / "params").glob("ocdbt.process_*")))} == {2}

    running = start(
        home, "run", 4, 2, "--resume", "mesh.data=4", "mesh.context=2", moments={2: f"step:{stopped.step + 2}"}
    )
    assert running[2].wait(120) == -signal.SIGKILL
    since = time.monotonic()
    statuses, printed = end(home, "run", running, seconds=55)
    assert time.monotonic() - since < 50  # before the heartbeat of 60 s
    assert statuses[0] == LOST
    assert all(status in (LOST, -signal.SIGABRT) for i, status in enumerate(statuses) if i != 2), printed
    assert f"continuing after step {stopped.step}" in printed[0]
    for i in (0, 1, 3):
        assert "process 2 of 4 is gone" in printed[i] or "of 4 has lost another one" in printed[i], printed[i]

    statuses, printed = run(home, "run", 2, 1, "--resume", "mesh.data=2")
    assert statuses == [0, 0], printed
    assert_same_run(home, "run")
    assert checkpoint.describe(home / "run").step == STEPS


def test_process_0_is_killed_during_a_save_and_one_process_goes_on_alone(home):
    statuses, printed = run(home, "saving", 2, 1, "mesh.data=2", moments={0: "save:9"})
    assert statuses[0] == -signal.SIGKILL
    assert statuses[1] in (LOST, -signal.SIGABRT)  # JAX's own end comes at the same moment
    assert "process 0 of 2 is gone" in printed[1] or "another task died" in printed[1]
    last = checkpoint.latest(home / "saving", lambda _: None)
    assert last.name == "00000006"
    statuses, printed = run(home, "saving", 1, 1, "--resume")
    assert statuses == [0], printed
    assert "continuing after step 6" in printed[0]
    assert_same_run(home, "saving")


def together(module, devices, *arguments):
    """(exit statuses, what each printed) of two processes of a module here, given COORDINATOR PROCESS arguments."""
    command = [sys.executable, "-m", module, free_address()]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    running = [subprocess.Popen([*command, str(i), *arguments], env=environment, **options) for i in range(2)]
    printed = [process.communicate(timeout=120)[0] for process in running]
    return [process.returncode for process in running], printed


def test_rows_are_made_once_unless_devices_of_two_processes_hold_them(home):
    meshes = ["mesh.data=4", "mesh.data=2,mesh.tensor=2", "mesh.fsdp=2,mesh.context=2", "mesh.context=4"]
    shares = [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3 + [[list(range(8))] * 2]
    statuses, printed = together("tests.scale.rows", 2, home / "text", home / "cache", *meshes)
    assert statuses == [0, 0], printed
    made = [[json.loads(line[5:]) for line in text.splitlines() if line.startswith("ROWS ")] for text in printed]
    assert [list(pair) for pair in zip(*made, strict=True)] == shares


def test_an_error_in_one_ends_both_although_a_save_is_under_way(home):
    overrides = last_ones([*OVERRIDES, *places(home), "mesh.data=2", "train.save_every=2", "train.eval_every=2"])
    since = time.monotonic()
    statuses, printed = together("tests.scale.hook", 1, home / "hook", *overrides)
    assert time.monotonic() - since < 90
    assert statuses == [LOST, 9], printed
    assert "the hook of process 1 failed" in printed[1]
    assert "process 1 of 2 is gone" in printed[0] or "process 0 of 2 has lost another one" in printed[0]


def test_processes_that_were_started_differently_refuse_and_leave_nothing(home):
    statuses, printed = run(home, "differ", 2, 1, "mesh.data=2", each={1: ["optim.lr=0.5"]})
    assert statuses == [2, 2], printed
    for text in printed:
        assert "error: the processes disagree about the configuration: 1 of 2 differ from process 0" in text
    assert not (home / "differ").exists()


def test_one_that_is_refused_ends_the_others(home):
    statuses, printed = run(home, "refused", 2, 1, "mesh.data=2", each={1: ["data.source=nowhere"]})
    assert statuses == [LOST, 2], printed
    assert "nowhere" in printed[1]
    assert "process 1 of 2 is gone" in printed[0] or "process 0 of 2 has lost another one" in printed[0]


def test_a_loss_that_is_not_finite_ends_all_alike_and_keeps_the_last_sound_state(home):
    statuses, printed = run(home, "bad", 2, 1, "mesh.fsdp=2", "optim.lr=1e17", "train.eval_every=0")
    assert statuses == [1, 1], printed
    for text in printed:
        assert "stopped: step 2: the loss is" in text
        assert "the state after step 1 is kept" in text
    assert checkpoint.describe(home / "bad").step == 1


def test_a_mesh_that_leaves_devices_out_is_refused_by_all(home):
    statuses, printed = run(home, "mesh", 2, 2, "mesh.data=2")
    assert set(statuses) <= {2, LOST}
    assert 2 in statuses
    assert any("is a mesh of 2 devices, but there are 4" in text for text in printed), printed
