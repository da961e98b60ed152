"""How a command ends."""

import signal
import sys
from collections.abc import Callable, Sequence

FAILED, REFUSED, INTERRUPTED = 1, 2, 128 + signal.SIGINT  # exit statuses


def fail_gracefully(main: Callable[[Sequence[str]], object], argv: Sequence[str], stopped: str = "stopped") -> None:
    """Run `main(argv)` and end the process where it fails, with one line instead of a traceback.

    What was asked for and cannot be is status 2, as argparse has it for a wrong command line; a number that is not
    finite is status 1; Ctrl-C is 130, after the line `stopped` (how to go on, say). Any other exception is a mistake of
    this code: its traceback, and status 1.
    """
    try:
        main(argv)
    except (ValueError, OSError, ImportError) as error:
        _end(f"error: {error}", REFUSED)
    except FloatingPointError as error:
        _end(f"error: {error}", FAILED)
    except KeyboardInterrupt:
        _end(f"\n{stopped}", INTERRUPTED)


def _end(line: str, status: int) -> None:
    print(line, file=sys.stderr)
    sys.exit(status)
