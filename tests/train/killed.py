"""Runs `experiments.train` with the arguments given after a moment at which this process sends itself a signal:

python -m tests.train.killed step:4:0.003 --config tiny …     SIGKILL, 0.003 s after step 4 was logged
python -m tests.train.killed save:8 --config tiny …           SIGKILL while the checkpoint of step 8 is being written
python -m tests.train.killed term:4 --config tiny …           SIGTERM after step 4 was logged
python -m tests.train.killed never --config tiny …
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from bampath.checkpoint import Saver
from experiments.train import main


def kill_in_save(step: int) -> None:
    """So that a save which is over before `watch` has looked is killed at its end: its last file is still to come."""
    describe = Saver._describe_files

    def describe_or_die(saver: Saver) -> None:
        if saver._next is not None and saver._next[1]["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        describe(saver)

    Saver._describe_files = describe_or_die  # type: ignore[method-assign]


def watch(moment: str, run_dir: Path) -> None:
    kind, step, *wait = moment.split(":")
    log, saving = run_dir / "metrics.jsonl", run_dir / f"checkpoints/{int(step):08d}.orbax-checkpoint-tmp"
    logged = f'"step": {step},'
    while not (saving.exists() if kind == "save" else log.exists() and logged in log.read_text()):
        time.sleep(0.0002)
    time.sleep(float(wait[0]) if wait else 0)
    os.kill(os.getpid(), signal.SIGTERM if kind == "term" else signal.SIGKILL)


if __name__ == "__main__":
    moment, *arguments = sys.argv[1:]
    if moment != "never":
        run_dir = Path(arguments[arguments.index("--run-dir") + 1])
        if moment.startswith("save:"):
            kill_in_save(int(moment.removeprefix("save:")))
        threading.Thread(target=watch, args=(moment, run_dir), daemon=True).start()
    sys.exit(main(arguments))
