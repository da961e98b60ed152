"""The supervisor: what is started again and what is not, several processes together, signals, logs."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from bampath.watch import LOST
from experiments import train
from launch.supervise import FINAL, Supervisor, main, verdict

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
        ("3 0", 3, "0", "not started again, since"),
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
    time.sleep(120)
"""


def test_one_lost_process_restarts_all(tmp_path: Path):
    command = [sys.executable, "-c", PAIR, str(tmp_path / "marker")]
    start = time.monotonic()
    assert Supervisor(command, tmp_path / "logs", processes=2, pause=0, patience=2).run() == 0
    assert time.monotonic() - start < 100
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


# What a test runner in the background ignores, its children would ignore as well.
NOTICES = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
NOTICING = (sys.executable, "-c", NOTICES)


@contextmanager
def watched(logs: Path, program: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A supervisor of `python -c program words` in a session of its own, and its output."""
    process = subprocess.Popen(
        [*NOTICING, "-m", "launch.supervise", "--logs", str(logs), "--", sys.executable, "-c", program, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        process.stdout.close()
        process.kill()
        process.wait()
        watchdog.cancel()


def until(output: IO[str], text: str) -> str:
    """Read to the first line that has this text."""
    return next(line for line in output if text in line)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_supervisor_lets_the_run_save_and_starts_nothing(tmp_path: Path, sent: signal.Signals):
    with watched(tmp_path, SAVES) as (process, output):
        until(output, "ready")
        os.kill(process.pid, sent)
        output.read()
        assert process.wait() == 143
    log = (tmp_path / "log").read_text()
    assert "saved" in log
    assert f"attempt 0 ended with 143; stopped by signal {int(sent)}" in log


# Waits for an interrupt and takes half a second to save, as a step and a checkpoint do.
TRAINS = """
import sys, time
from bampath.command import Stop
stop = Stop()
print("ready", flush=True)
while not stop.by:
    time.sleep(0.01)
time.sleep(0.5)
print("saved", flush=True)
sys.exit(128 + stop.by)
"""


def test_an_interrupt_from_the_keyboard_reaches_the_run_once(tmp_path: Path):
    """The terminal sends it to the whole process group; the supervisor, stopped until then, comes second."""
    with watched(tmp_path, TRAINS) as (process, output):
        until(output, "ready")
        os.kill(process.pid, signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGCONT)
        output.read()
        assert process.wait() == 130
    log = (tmp_path / "log").read_text()
    assert "saved\n" in log
    assert "attempt 0 ended with 130; stopped by signal 2" in log


def test_a_signal_between_attempts_ends_the_pause_and_starts_nothing(tmp_path: Path):
    with watched(tmp_path, "import os; os.kill(os.getpid(), 9)") as (process, output):
        until(output, "starting again")
        start = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        rest = output.read()
        assert process.wait() == 143
    assert time.monotonic() - start < 9  # the pause is 10 s
    assert "stopped by signal 15 before attempt 1" in rest
    assert (tmp_path / "status").read_text() == "143\n"
    assert len(list(tmp_path.glob("attempt*"))) == 1


def test_a_run_goes_on_when_nobody_watches_any_more(tmp_path: Path):
    chatty = "import time\nfor i in range(60):\n    print('line', i, flush=True)\n    time.sleep(0.005)"
    with watched(tmp_path, chatty) as (process, output):
        until(output, "line 1")
        output.close()
        assert process.wait() == 0
    log = (tmp_path / "log").read_text()
    assert re.findall(r"^line (\d+)$", log, re.MULTILINE) == [str(i) for i in range(60)]
    assert log.endswith("attempt 0 ended with 0; done\n")
    assert (tmp_path / "status").read_text() == "0\n"


def test_what_a_killed_process_leaves_behind_does_not_keep_it_from_being_started_again(tmp_path: Path):
    leaves = """
import os, subprocess, sys
if os.path.exists(sys.argv[1]): sys.exit(0)
open(sys.argv[1], "w").close()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"])
os.kill(os.getpid(), 9)
"""
    start = time.monotonic()
    command = [sys.executable, "-c", leaves, str(tmp_path / "marker")]
    assert Supervisor(command, tmp_path / "logs", pause=0).run() == 0
    assert time.monotonic() - start < 80


def test_one_supervisor_at_a_time_keeps_a_folder_of_logs(tmp_path: Path, capsys: pytest.CaptureFixture):
    with watched(tmp_path, SAVES) as (process, output):
        until(output, "ready")
        pid = (tmp_path / "pid").read_text()
        assert main(["--logs", str(tmp_path), "--", "true"]) == 2
        said = capsys.readouterr().err
        assert f"--logs {tmp_path} is kept by another supervisor, process {process.pid} on" in said
        assert (tmp_path / "pid").read_text() == pid
        assert not (tmp_path / "status").exists()
        os.kill(process.pid, signal.SIGTERM)
        output.read()
        assert process.wait() == 143
    assert main(["--logs", str(tmp_path), "--", "true"]) == 0


def test_logs_that_cannot_be_written_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "lock").mkdir()
    assert main(["--logs", str(tmp_path), "--", "true"]) == 2
    assert "choose another --logs" in capsys.readouterr().err


def test_a_command_that_cannot_be_started_has_a_status(tmp_path: Path):
    assert main(["--logs", str(tmp_path), "--", "no-such-program-here"]) == 2
    assert (tmp_path / "status").read_text() == "2\n"


def test_final_statuses_are_those_of_training():
    final = (train.NOT_FINITE, train.REFUSED, train.DOES_NOT_FIT, train.UNWRITTEN)
    assert sorted(FINAL) == sorted(final)
    assert LOST not in FINAL


def test_verdicts():
    assert verdict([0, 0]) == 0
    assert verdict([-9, 4]) == 137
    assert verdict([4, 2]) == 2
    assert verdict([0, 4]) == 4


def test_a_wrong_command_line_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["--logs", str(tmp_path)]) == 2
    assert main(["--logs", str(tmp_path), "--processes", "0", "--", "true"]) == 2
    assert main(["--logs", str(tmp_path), "--max-restarts", "-1", "--", "true"]) == 2
    assert main(["--logs", __file__, "--", "true"]) == 2
    assert main(["--logs", str(tmp_path), "--", "no-such-program-here"]) == 2
    said = capsys.readouterr().err
    assert "--max-restarts -1 must be at least 0" in said
    assert f"--logs {__file__} is a file, must be a folder" in said
    assert "there is no command to run; write it after --" in said
    assert "processes=0 must be at least 1" in said
    assert "no-such-program-here" in said


def test_a_full_disk_under_the_logs_does_not_stop_the_run(tmp_path: Path, capfd: pytest.CaptureFixture):
    """What a pipe holds is 64 kB: a program that prints more waits until somebody reads it."""
    for name in ("log", "attempt-00-process-0.log"):
        (tmp_path / name).symlink_to("/dev/full")
    (tmp_path / "again").touch()
    chatty = f"import os; [print('x' * 1000) for _ in range(300)]; os.remove({str(tmp_path / 'again')!r})"
    assert main(["--logs", str(tmp_path), "--", sys.executable, "-c", chatty]) == 0
    said = capfd.readouterr().out
    assert said.count("x" * 1000) == 300
    assert said.count("is incomplete from here on (No space left on device)") == 1
    assert (tmp_path / "status").read_text() == "0\n"
