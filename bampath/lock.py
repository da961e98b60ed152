"""One writer per run: a lock on a file in the run's folder, which the system releases however its owner ends."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

NAME = "lock"


class InUseError(OSError):
    """Another process is writing this run."""


class RunLock:
    """The lock of a run's folder, taken by `take`, released by leaving the context. `RUN/lock` names its last owner.

    It is an advisory lock of the whole file (flock(2)): within one machine always, between machines if the file system
    passes it on, as NFS 4, Lustre (mounted with flock) and GPFS do. option: what chooses the folder, for messages.
    """

    def __init__(self, run_dir: Path, option: str = "--run-dir") -> None:
        self._path, self._option = run_dir / NAME, option
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def take(self) -> None:
        """Lock the folder, which must exist. InUseError names the owner; OSError says why nothing can be written."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(self._path.parent, error, self._option) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            refusal = _refusal(self._path, file, error, self._option)
            os.close(file)
            raise refusal from None
        self._file = file
        owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}\n"
        try:
            os.ftruncate(file, 0)
            os.write(file, owner.encode())
        except OSError as error:
            raise _unwritable(self._path.parent, error, self._option) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)  # and with it the lock; the file stays, as removing it could remove another's
            self._file = None


def refuse_in_use(run_dir: Path, option: str = "--run-dir") -> None:
    """InUseError if another process writes this run; nothing is changed and nothing stays locked."""
    try:
        file = os.open(run_dir / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # nobody has ever written here, or nobody may
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        raise _refusal(run_dir / NAME, file, error, option) from None
    finally:
        os.close(file)


def _refusal(path: Path, file: int, error: OSError, option: str) -> OSError:
    """What to raise where the lock could not be had."""
    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
        return OSError(f"{path} cannot be locked ({error.strerror}): use another file system")
    owner = os.read(file, 1000).decode("utf-8", "replace").strip()
    return InUseError(
        f"{path.parent} is being written by {owner or 'another process'}: two would destroy each other's checkpoints. "
        f"Wait for it, end it, or choose another {option}"
    )


def _unwritable(run_dir: Path, error: OSError, option: str) -> OSError:
    return OSError(f"{run_dir} cannot be written ({error.strerror}): choose another {option}")
