"""Full disks, folders that cannot be written, two writers, leftovers: the last good checkpoint outlives all."""

import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath import checkpoint
from bampath.checkpoint import SaveError, Saver
from bampath.lock import InUseError, RunLock
from bampath.metrics import Writer, read
from bampath.train import fit
from experiments import train
from tests.train.small import SMALL, small, text_file

ROOT = Path(__file__).parents[2]
FACTS = {"config": {}, "data": {"step": 0}, "tokenizer": "bytes-259-v1", "elapsed": 0.0}


def arrays(step, size=40_000):
    return {"w": jnp.asarray(np.random.default_rng(step).normal(size=size), jnp.float32)}


def save(run, *steps, keep=2):
    with Saver(run, keep=keep) as saver:
        for step in steps:
            saver.save(step, arrays(step), {}, FACTS)


def assert_holds(run, step):
    """The run's last complete checkpoint is that of `step`, and it can be read."""
    assert checkpoint.latest(run, lambda _: None).name == f"{step:08d}"
    np.testing.assert_array_equal(checkpoint.read_params(run)["w"], arrays(step)["w"])


@pytest.fixture
def programs(tmp_path_factory):
    """A folder for compiled programs, so that several runs of one configuration compile once. `train.main` changes what
    signals do."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for name, value in options.items():
        jax.config.update(name, value)
    yield options["jax_compilation_cache_dir"]
    for name, value in before.items():
        jax.config.update(name, value)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def no_large_files():
    """Until the test ends no file may grow beyond 20 kB: a full disk for whoever has no right to mount one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_finds_no_room_says_so_and_costs_nothing(tmp_path, no_large_files):
    save(tmp_path, 10, 20, keep=1)
    saver = Saver(tmp_path, keep=1)
    no_large_files()
    saver.save(30, arrays(30), {}, FACTS)
    what = r"00000030 could not be written: .*File too large.*the last complete checkpoint is .*00000020"
    with pytest.raises(SaveError, match=what):
        saver.wait()
    saver.close()
    assert_holds(tmp_path, 20)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB, which is really full when it is full."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting needs privileges")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_a_message_and_goes_on_when_there_is_room(tmp_path, small_disk, programs):
    text_file(tmp_path)
    options = [f"data.source={tmp_path / 'text'}", f"data.cache_dir={tmp_path / 'cache'}"]
    arguments = ["--config", "tiny", *SMALL, *options, "train.save_every=2", "train.steps=6"]
    assert train.main([*arguments, "--run-dir", str(tmp_path / "whole")]) == 0
    size = sum(path.stat().st_size for path in (tmp_path / "whole/checkpoints/00000006").rglob("*"))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2**20 - 2 * size))  # room for one checkpoint, not for two
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs), "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    command = [sys.executable, "-m", "experiments.train", *arguments, "--run-dir", str(small_disk / "run")]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    error = ended.stderr
    assert ended.returncode == train.UNWRITTEN, error
    assert "stopped: " in error
    assert "could not be written: " in error
    assert "No space left on device" in error
    assert f"the last complete checkpoint is {small_disk / 'run/checkpoints/00000002'}" in error
    ballast.unlink()
    assert train.main([*arguments, "--resume", "--run-dir", str(small_disk / "run")]) == 0
    runs = tmp_path / "whole", small_disk / "run"
    records = [[(r["step"], r["loss"]) for r in read(run / "metrics.jsonl")] for run in runs]
    assert records[0] == records[1]


def test_metrics_that_cannot_be_written_name_their_file(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr("bampath.metrics._cut_after", lambda path, step: None)  # reading /dev/full has no end
    writer = Writer(tmp_path)
    with pytest.raises(SaveError, match=r"metrics\.jsonl could not be written: No space left on device"):
        writer.write("train", 1, {"loss": 1.0})
    writer.close()


@pytest.fixture
def nobody():
    """A folder that everyone may enter and, inside the returned context, a user who may write nothing there."""
    if os.geteuid():
        become = lambda _: None
    else:
        become = os.seteuid
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder), become
        become(0)
        for path in Path(folder).rglob("*"):
            os.chmod(path, 0o755)


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(nobody):
    folder, become = nobody
    save(folder / "run", 10)
    text_file(folder)
    config = small("train.steps=2")
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    for path in (folder, folder / "run", *before):
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    become(65534)
    try:
        with pytest.raises(OSError, match=r"run cannot be written \(Permission denied\): choose another --run-dir"):
            fit(config, folder / "run", resume=True, out=io.StringIO())
        with pytest.raises(OSError, match=r"has no permission to be written, so .*a/new cannot be .*another --run-dir"):
            fit(config, folder / "a/new", out=io.StringIO())
        with pytest.raises(OSError, match=r"text/00\.txt is not a folder, so"):
            fit(config, folder / "text/00.txt/new", out=io.StringIO())
        assert_holds(folder / "run", 10)  # reading needs no right to write
    finally:
        become(0)
        os.chmod(folder, 0o755)
    assert {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")} == before


HOLD = """
import sys, time
from pathlib import Path
from bampath.lock import RunLock
with RunLock(Path(sys.argv[1])) as lock:
    lock.take()
    print("held", flush=True)
    time.sleep(600)
"""


def test_two_writers_of_a_run_are_refused_until_the_first_has_ended_in_whatever_way(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, run], cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InUseError, match=rf"run is being written by process {other.pid} on \S+ since .*--run-dir"):
            fit(small(), run, resume=True, out=io.StringIO())
        other.send_signal(signal.SIGKILL)
    with RunLock(run) as lock:
        lock.take()


def test_two_that_begin_in_the_same_empty_folder(tmp_path):
    """The second one is refused when it wants to write, whether the first is still there or has come and gone."""
    from bampath import runs

    with RunLock(tmp_path / "run") as first, RunLock(tmp_path / "run") as second:
        runs.claim(tmp_path / "run", first, resume=False)
        with pytest.raises(InUseError, match="is being written by process"):
            runs.claim(tmp_path / "run", second, resume=False)
        (tmp_path / "run/config.json").write_text("{}")
    with RunLock(tmp_path / "run") as late, pytest.raises(FileExistsError, match="is not empty"):
        runs.claim(tmp_path / "run", late, resume=False)


def test_leftovers_of_killed_runs_are_passed_over_by_readers_and_removed_by_the_next_writer(tmp_path):
    save(tmp_path, 10, 20)
    folder = tmp_path / "checkpoints"
    for name in ("00000020", "00000030", "notes"):  # one of a step that is complete, too: a save that was repeated
        (folder / f"{name}.orbax-checkpoint-tmp/params").mkdir(parents=True)
        (folder / f"{name}.orbax-checkpoint-tmp/params/part").write_bytes(b"half")
    (folder / "00000040").mkdir()  # a name without what makes it complete
    heard = []
    assert checkpoint.latest(tmp_path, heard.append).name == "00000020"
    assert len(heard) == 1
    assert "00000040: it has no checkpoint.json" in heard[0]
    assert len(list(folder.iterdir())) == 6
    save(tmp_path, 30, 40)
    assert sorted(path.name for path in folder.iterdir()) == ["00000030", "00000040", "notes.orbax-checkpoint-tmp"]
    assert_holds(tmp_path, 40)


def test_one_that_was_being_removed_is_not_taken_for_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 10)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: None)  # killed just before
    save(tmp_path, 20, 30, keep=1)
    assert [path.name for path in checkpoint.steps(tmp_path / "checkpoints")] == ["00000030"]
    monkeypatch.undo()
    Saver(tmp_path).close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000030"]


SAVE = """
import sys
from bampath import checkpoint
from bampath.checkpoint import Saver
from tests.train.test_faults import FACTS, arrays
last = checkpoint.latest(sys.argv[1], lambda _: None)
first = 1 if last is None else int(last.name) + 1
with Saver(sys.argv[1], keep=2) as saver:
    for step in range(first, first + 500):
        saver.save(step, arrays(step), {}, FACTS)
        print(step, flush=True)
"""


@pytest.mark.slow
def test_saving_is_killed_at_random_moments(tmp_path):
    rng = np.random.default_rng(list(b"killed while saving"))
    for _ in range(6):
        command = [sys.executable, "-c", SAVE, tmp_path]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
            for _ in range(3):
                started = int(other.stdout.readline())
            delay = rng.uniform(0, 0.2)
            threading.Event().wait(delay)
            other.kill()
            started = max([started, *map(int, other.stdout.read().split())])
        last = int(checkpoint.latest(tmp_path, lambda _: None).name)
        assert last >= started - 1, f"killed {delay:.4f} s after step {started}"  # at most the one under way is lost
        assert_holds(tmp_path, last)


def test_saved_on_one_device_restored_on_more(tmp_path):
    save(tmp_path, 5)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    like = {"w": jax.ShapeDtypeStruct((40_000,), jnp.float32, sharding=where)}
    got = checkpoint.read_params(tmp_path, like=like)["w"]
    assert got.sharding.is_equivalent_to(where, 1)
    np.testing.assert_array_equal(got, arrays(5)["w"])
