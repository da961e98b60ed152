"""Keep a run going: start its processes, write their logs, and start them again when they were killed.

    python -m launch.supervise --logs logs/NAME --max-restarts 50 -- python -m experiments.train … --resume

The command must continue by itself where it stopped (`experiments.train --resume` does, from nothing too). With
`--processes N` it is started N times, as processes of one run on this machine; when one of them ends badly, all are
stopped and started again together. What an exit status means is said by `experiments.train`: what would only fail
again is not repeated.

    0               done
    1, 2, 3, 5      a loss that is not finite, a refused run, a dry run that does not fit, a file that cannot be
                    written: ends, with this status
    4, 128 + n, −n  another process is gone, stopped or killed by signal n: again, at most --max-restarts times

An interrupt of the supervisor (SIGINT, SIGTERM, a closed terminal) goes to the processes, which save, and nothing is
started again; a second one stops them at once. Each process has a session of its own, so that an interrupt from the
keyboard, which goes to everything in the terminal, does not reach it twice. Nobody needs to read the output: when
whoever watched it is gone, only the logs go on. One supervisor at a time keeps a folder of logs.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from bampath.lock import NAME as LOCK_NAME
from bampath.lock import InUseError, RunLock

FINAL = (1, 2, 3, 5)  # exit statuses of experiments.train after which trying again is no use
STATUS_NAME, PID_NAME, LOG_NAME = "status", "pid", "log"
_AT_ONCE = 10.0  # seconds; a process that ends sooner is not started again at once
_FAILED = 2  # the supervisor's own status if something cannot be started or written
_POLL = 0.05  # seconds
_FORWARDED = {  # what goes to the processes; they save on SIGTERM, and know nothing of terminals
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGQUIT: signal.SIGQUIT,
    signal.SIGHUP: signal.SIGTERM,
}


class Supervisor:
    """Runs a command until it is done.

    logs: folder for `log` (all output and what the supervisor did), `attempt-NN-process-I.log`, `pid`, `lock` and, at
    the end, `status`. processes: how many of the command make one run; restarts: at most so many; patience: seconds
    that the others get to end after one process ended badly; pause: seconds before a start after a very short attempt.
    """

    def __init__(
        self,
        command: Sequence[str],
        logs: Path,
        *,
        processes: int = 1,
        restarts: int = 50,
        patience: float = 120.0,
        pause: float = 10.0,
    ) -> None:
        if not command:
            raise ValueError("there is no command to run; write it after --")
        if processes < 1:
            raise ValueError(f"processes={processes} must be at least 1")
        if restarts < 0:
            raise ValueError(f"--max-restarts {restarts} must be at least 0")
        if logs.exists() and not logs.is_dir():
            raise ValueError(f"--logs {logs} is a file, must be a folder")
        self.command, self.logs, self.processes, self.restarts = list(command), logs, processes, restarts
        self.patience, self.pause = patience, pause
        self.stopped_by = 0
        self._pending: list[signal.Signals] = []  # to be sent to the processes
        self._running: list[subprocess.Popen[bytes]] = []
        self._lock, self._incomplete = threading.Lock(), False

    def run(self) -> int:
        """The exit status of the last attempt: 0 done, 128 + n where a process or the supervisor was stopped by n.

        InUseError if another supervisor keeps the folder; OSError if a process cannot be started or a log written.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        with RunLock(self.logs, "--logs") as lock:
            self._take(lock)
            (self.logs / STATUS_NAME).unlink(missing_ok=True)
            (self.logs / PID_NAME).write_text(f"{os.getpid()}\n", encoding="utf-8")
            # A signal that is ignored, as SIGHUP is under nohup, stays so.
            caught = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
            before = {number: signal.signal(number, self._note) for number in caught}
            status = _FAILED
            try:
                with (self.logs / LOG_NAME).open("ab", buffering=0) as log:
                    status = self._attempts(log)
            finally:
                self._signal(signal.SIGTERM)  # of an attempt that could not be started or logged completely
                for number, handler in before.items():
                    signal.signal(number, handler)
                self._leave(status)
            return status

    def _leave(self, status: int) -> None:
        try:
            (self.logs / STATUS_NAME).write_text(f"{status}\n", encoding="utf-8")
        except OSError as error:  # the run's own status counts
            print(f"supervisor: {self.logs / STATUS_NAME} could not be written ({error.strerror})", file=sys.stderr)

    def _take(self, lock: RunLock) -> None:
        try:
            lock.take()
        except InUseError:
            owner = (self.logs / LOCK_NAME).read_text(encoding="utf-8").strip()
            what = f"--logs {self.logs} is kept by another supervisor, {owner}"
            raise InUseError(f"{what}: wait for it, end it, or choose another folder") from None

    def _attempts(self, log: IO[bytes]) -> int:
        first = len(list(self.logs.glob("attempt-*-process-0.log")))  # of earlier supervisors of this run
        for attempt in range(self.restarts + 1):
            if self.stopped_by:
                self._say(log, f"stopped by signal {self.stopped_by} before attempt {first + attempt}")
                return 128 + self.stopped_by
            start = time.monotonic()
            statuses = self._attempt(first + attempt, log)
            status = verdict(statuses)
            what = ", ".join(str(one) for one in statuses)
            if status == 0 or status in FINAL or self.stopped_by or attempt == self.restarts:
                self._say(log, f"attempt {first + attempt} ended with {what}; {self._why(status)}")
                return status
            self._say(log, f"attempt {first + attempt} ended with {what}; starting again from the last checkpoint")
            if time.monotonic() - start < _AT_ONCE:
                self._rest()
        raise AssertionError("the last attempt returns")

    def _rest(self) -> None:
        """Wait before the next start, but not longer than until a signal comes."""
        end = time.monotonic() + self.pause
        while not self.stopped_by and time.monotonic() < end:
            time.sleep(_POLL)

    def _why(self, status: int) -> str:
        if status == 0:
            return "done"
        if self.stopped_by:
            return f"stopped by signal {self.stopped_by}"
        if status in FINAL:
            return "not started again, since it would end so again"
        return f"not started again after {self.restarts} restart(s)"

    def _attempt(self, number: int, log: IO[bytes]) -> list[int]:
        """Start all processes and wait for them; one that ends badly takes the others with it."""
        readers = []
        port = free_port() if self.processes > 1 else 0
        for index in range(self.processes):
            process = subprocess.Popen(
                self.arguments(index, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.append(process)
            own = self.logs / f"attempt-{number:02d}-process-{index}.log"
            reader = threading.Thread(target=self._copy, args=(process, own, log, index), daemon=True)
            reader.start()
            readers.append(reader)
        pids = " ".join(str(process.pid) for process in self._running)
        self._say(log, f"attempt {number}: process {pids}")
        self._wait()
        for process in self._running:  # what it has left behind would hold its output open
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join()
        statuses = [process.returncode for process in self._running]
        self._running.clear()
        return statuses

    def arguments(self, index: int, port: int) -> list[str]:
        """The command of process `index`."""
        if self.processes == 1:
            return self.command
        several = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(self.processes), "--process", str(index)]
        return [*self.command, *several]

    def _wait(self) -> None:
        """Until all have ended, passing on signals; after a bad end of one, the others are asked to stop and at last
        killed."""
        deadlines = [(self.patience, signal.SIGTERM), (2 * self.patience, signal.SIGKILL)]
        bad_since: float | None = None
        while None in (statuses := [process.poll() for process in self._running]):
            if bad_since is None and any(statuses):
                bad_since = time.monotonic()
            if bad_since is not None and deadlines and time.monotonic() - bad_since > deadlines[0][0]:
                self._signal(deadlines.pop(0)[1])
            while self._pending:
                self._signal(self._pending.pop(0))
            time.sleep(_POLL)

    def _copy(self, process: subprocess.Popen[bytes], own: Path, log: IO[bytes], index: int) -> None:
        """Output of a process, line by line: into its own log, the common one, and to whoever watches."""
        mark = f"[{index}] ".encode() if self.processes > 1 else b""
        assert process.stdout is not None
        with own.open("ab", buffering=0) as file, process.stdout:
            for line in process.stdout:
                self._log(file, line)
                self._show(log, mark + line)

    def _say(self, log: IO[bytes], text: str) -> None:
        self._show(log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} supervisor: {text}\n".encode())

    def _show(self, log: IO[bytes], line: bytes) -> None:
        with self._lock:
            self._log(log, line)
            self._print(line)

    def _log(self, file: IO[bytes], line: bytes) -> None:
        """Write to a log. A disk that is full stops neither the run nor the reading of what it prints, which it would
        wait for; it is said once."""
        try:
            file.write(line)
        except OSError as error:
            if not self._incomplete:
                self._incomplete = True
                self._print(f"supervisor: {file.name} is incomplete from here on ({error.strerror})\n".encode())

    def _print(self, line: bytes) -> None:
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except OSError:  # nobody reads it any more; what is left in the buffer must not fail at the end, either
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Only remembers the signal: `_wait` sends it once all processes are there, to each of them once."""
        self.stopped_by = number
        self._pending.append(_FORWARDED[signal.Signals(number)])

    def _signal(self, number: int) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def verdict(statuses: Sequence[int]) -> int:
    """One exit status for the processes of an attempt: 0 if all are, else a final one, else the first bad one; of a
    process killed by signal n, 128 + n."""
    shell = [128 - status if status < 0 else status for status in statuses]
    bad = [status for status in shell if status]
    return next((status for status in bad if status in FINAL), bad[0] if bad else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is that of the last attempt."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.supervise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=Path, required=True, metavar="DIR", help="where output and status go")
    parser.add_argument("--max-restarts", type=int, default=50, metavar="N", help="default 50")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of one run on this machine")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        supervisor = Supervisor(command, options.logs, processes=options.processes, restarts=options.max_restarts)
        return supervisor.run()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main())
