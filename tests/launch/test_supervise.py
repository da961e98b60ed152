"""The supervisor: what is started again and what is not, several processes together, signals, logs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch.supervise import Supervisor, main, verdict

ROOT = Path(__file__).parents[2]

# Ends with the next status of the list in a file; a status below 0 kills the process with that signal.
PROGRAM = """
import os, sys
path, index = sys.argv[1], (sys.argv[-1] if "--process" in sys.argv else "0")
lines = open(path).read().split()
open(path, "w").write(" ".join(lines[1:]))
print("attempt of process", index, flush=True)
status = int(lines[0])
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""


def supervise(folder: Path, statuses: str, **options: float) -> tuple[int, str]:
    (folder / "statuses").write_text(statuses)
    command = [sys.executable, "-c", PROGRAM, str(folder / "statuses")]
    supervisor = Supervisor(command, folder / "logs", pause=0, **options)  # type: ignore[arg-type]
    return supervisor.run(), (folder / "logs/log").read_text()


@pytest.mark.parametrize(
    ("statuses", "status", "left", "why"),
    [
        ("0 0", 0, "0", "attempt 0 ended with 0; done"),
        ("-9 4 143 0", 0, "", "attempt 2 ended with 143; starting again"),
        ("-9 1 0", 1, "0", "attempt 1 ended with 1; not started again, since it would end so again"),
        ("2 0", 2, "0", "not started again, since"),
        ("5 0", 5, "0", "not started again, since"),
        ("-9 -9 -9 -9 0", 137, "0", "not started again after 3 restart(s)"),
    ],
)
def test_what_is_started_again(tmp_path: Path, statuses: str, status: int, left: str, why: str):
    got, log = supervise(tmp_path, statuses, restarts=3)
    assert got == status
    assert (tmp_path / "statuses").read_text() == left
    assert why in log
    assert (tmp_path / "logs/status").read_text() == f"{status}\n"


def test_logs_of_a_later_supervisor_do_not_replace_those_of_an_earlier_one(tmp_path: Path):
    supervise(tmp_path, "-9 2", restarts=3)
    supervise(tmp_path, "0", restarts=3)
    names = sorted(path.name for path in (tmp_path / "logs").glob("attempt*"))
    assert names == [f"attempt-0{n}-process-0.log" for n in range(3)]
    assert (tmp_path / "logs" / names[2]).read_text() == "attempt of process 0\n"


# Process 1 kills itself in the first attempt while process 0 waits; both end well in the second one.
PAIR = """
import os, sys, time
marker, index = sys.argv[1], int(sys.argv[-1])
assert sys.argv[-6:-1] == ["--coordinator", sys.argv[-5], "--processes", "2", "--process"], sys.argv
print("hello", flush=True)
own = f"{marker}-{index}"
if not os.path.exists(own):
    open(own, "w").close()
    if index:
        os.kill(os.getpid(), 9)
    time.sleep(60)
"""


def test_one_lost_process_restarts_all(tmp_path: Path):
    command = [sys.executable, "-c", PAIR, str(tmp_path / "marker")]
    start = time.monotonic()
    assert Supervisor(command, tmp_path / "logs", processes=2, pause=0, patience=2).run() == 0
    assert time.monotonic() - start < 30
    log = (tmp_path / "logs/log").read_text()
    assert "attempt 0 ended with -15, -9; starting again" in log
    assert "[1] hello" in log
    assert len(list((tmp_path / "logs").glob("attempt*"))) == 4


# Saves on SIGTERM, as training does, and ends with 128 + 15.
SAVES = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_stopped_supervisor_lets_the_run_save_and_starts_nothing(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.supervise", "--logs", str(tmp_path), "--", sys.executable, "-c", SAVES],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    for line in process.stdout:
        if line == "ready\n":
            os.kill(process.pid, signal.SIGTERM)
    process.stdout.close()
    assert process.wait() == 143
    watchdog.cancel()
    log = (tmp_path / "log").read_text()
    assert "saved" in log
    assert "attempt 0 ended with 143; stopped by signal 15" in log


def test_verdicts():
    assert verdict([0, 0]) == 0
    assert verdict([-9, 4]) == 137
    assert verdict([4, 2]) == 2
    assert verdict([0, 4]) == 4


def test_a_wrong_command_line_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["--logs", str(tmp_path)]) == 2
    assert main(["--logs", str(tmp_path), "--processes", "0", "--", "true"]) == 2
    assert main(["--logs", str(tmp_path), "--", "no-such-program-here"]) == 2
    said = capsys.readouterr().err
    assert "there is no command to run; write it after --" in said
    assert "processes=0 must be at least 1" in said
    assert "no-such-program-here" in said
