"""How a command ends."""

import sys
from collections.abc import Callable, Sequence


def fail_gracefully(main: Callable[[Sequence[str]], object], argv: Sequence[str], stopped: str = "stopped") -> None:
    """Run `main(argv)`; a mistake of the user is one line and status 1, not a traceback, and so is Ctrl-C.

    stopped: what to say when it is interrupted, such as how to go on.
    """
    try:
        main(argv)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\n{stopped}")
