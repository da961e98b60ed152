"""How a command ends, and where it may write."""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TextIO, cast

FAILED, REFUSED, INTERRUPTED = 1, 2, 128 + signal.SIGINT  # exit statuses


def fail_gracefully(main: Callable[[Sequence[str]], object], argv: Sequence[str], stopped: str = "stopped") -> None:
    """Run `main(argv)` and end the process where it fails, with one line instead of a traceback.

    What was asked for and cannot be is status 2, as argparse has it for a wrong command line; a number that is not
    finite is status 1; Ctrl-C is 130, after the line `stopped` (how to go on, say). Any other exception is a mistake of
    this code: its traceback, and status 1.
    """
    print_anywhere()
    try:
        main(argv)
    except (ValueError, OSError, ImportError) as error:
        _end(f"error: {error}", REFUSED)
    except FloatingPointError as error:
        _end(f"error: {error}", FAILED)
    except KeyboardInterrupt:
        _end(f"\n{stopped}", INTERRUPTED)


def end_with_status(main: Callable[[], int]) -> NoReturn:
    """Run a `main` that gives its exit status, and end with it; with 130 and a line where Ctrl-C comes before `main`
    looks after it."""
    print_anywhere()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        _end("\nstopped", INTERRUPTED)


def print_anywhere() -> None:
    """Print what the output's encoding lacks (× and – in ASCII) as an escape, and go on when nobody reads any more,
    instead of ending the command for it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout = heedless(sys.stdout)


def heedless(stream: TextIO) -> TextIO:
    """The stream, where what is written after its reader has gone (`| head`) goes nowhere instead of raising."""
    return stream if isinstance(stream, _Heedless) else cast(TextIO, _Heedless(stream))


class _Heedless:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class Stop:
    """Remembers the first interrupt instead of dying of it; `by` is its number, 0 before. As a context manager it puts
    back at its end what signals did before."""

    def __init__(self) -> None:
        self.by = 0
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.by = number
        for either in (signal.SIGINT, signal.SIGTERM):
            signal.signal(either, signal.SIG_DFL)
        print("finishing this step and saving; interrupt again to stop at once", file=sys.stderr)


def file_to_write(path: str | Path, option: str) -> Path:
    """The absolute path of a file of results, which need not exist, nor its folder. ValueError, naming `option`, if it
    cannot be written: to be asked before the work whose results it is for."""
    path = Path(path).expanduser().absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if there == path and not path.is_file():
        raise ValueError(f"{option} {path} is not an ordinary file; choose another")
    folder = path.parent if there == path else there
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: {folder} is not a folder; choose another")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):  # the file is replaced as a whole
        raise ValueError(f"{option} {path}: {folder} has no permission to be written; choose another")
    return path


def folder_to_make(path: Path) -> None:
    """FileExistsError for a folder that has something in it, another OSError if it cannot be made or written: to be
    asked before the work whose results it is for."""
    if path.is_symlink() and not path.exists():
        raise FileExistsError(f"{path} is a link to what is not there; choose another folder")
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty; choose another folder")
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{path} cannot be made: {there} is not a folder; choose another")
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(f"{path}: {there} has no permission to be written; choose another folder")


def _end(line: str, status: int) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(status)
