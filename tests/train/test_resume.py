"""kill −9 at any moment: the run that continues has the losses of one that was never interrupted, bit for bit."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from bampath import checkpoint
from bampath.metrics import read
from tests.train.small import SMALL, text_file

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY = 12, 3


def run(home, moment, folder, *more):
    """One process; returns its exit status (−9 if it was killed) and what it printed."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(home / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    arguments = ["--config", "tiny", "--run-dir", str(home / folder), *SMALL, f"data.source={home / 'text'}"]
    arguments += [f"data.cache_dir={home / 'cache'}", f"train.steps={STEPS}", f"train.save_every={SAVE_EVERY}", *more]
    command = [sys.executable, "-m", "tests.train.killed", moment, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


def losses(folder):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read(folder / "metrics.jsonl")]


def test_killed_runs_continue_bit_for_bit(tmp_path):
    text_file(tmp_path)
    status, printed = run(tmp_path, "never", "whole")
    assert status == 0, printed
    draw = random.Random("resume")  # one moment here; other ones are for whoever changes the name
    moment = f"step:{draw.randint(1, SAVE_EVERY * 2 - 1)}:{draw.uniform(0, 0.01):.4f}"
    for number, when in enumerate([moment, f"save:{SAVE_EVERY * 3}"]):
        status, printed = run(tmp_path, when, "killed", *(["--resume"] if number else []))
        assert status == -signal.SIGKILL, f"{when}: {printed}"
    saved = checkpoint.latest(tmp_path / "killed", lambda _: None)
    assert saved is not None
    assert saved.name < f"{SAVE_EVERY * 3:08d}"  # the one that was being written does not count
    status, printed = run(tmp_path, "never", "killed", "--resume")
    assert status == 0, printed
    assert f"continuing after step {int(saved.name)}" in printed
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole"), moment
    assert [step for step, *_ in losses(tmp_path / "whole")] == list(range(1, STEPS + 1))
    a, b = (checkpoint.read_params(tmp_path / name) for name in ("killed", "whole"))
    assert checkpoint.index(a) == checkpoint.index(b)
