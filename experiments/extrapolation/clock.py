"""What a study took over all its calls: a call that only reads what is finished adds nothing."""

import time
from pathlib import Path
from typing import Any

from bampath.evaluation.results import write_json
from experiments.studies import read_kept


class Clock:
    """Seconds of the calls that measured something in `out`, kept there in seconds.json, one number per call.

    Use as a context manager: a call that is stopped in the middle of a cell counts too, but not what a killed one did
    since it last kept something. measures: whether this call is one of them.
    """

    def __init__(self, out: Path, measures: bool) -> None:
        self._path, self.measures, self._start = out / "seconds.json", measures, time.monotonic()
        self._before: list[float] = _kept(out)

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.keep()

    def keep(self) -> float:
        """Seconds of all calls so far, this one included; they are written down."""
        calls = list(self._before)
        if self.measures or not calls:
            calls.append(round(time.monotonic() - self._start, 1))
        if self.measures:
            write_json(self._path, {"calls": calls})
        return round(sum(calls), 1)


def _kept(out: Path) -> list[float]:
    """Of earlier calls; studies that were made before there was a seconds.json have their total in results.json.
    ValueError that names the file if it says something else."""
    for path, read in (
        (out / "seconds.json", lambda kept: [float(seconds) for seconds in kept["calls"]]),
        (out / "results.json", lambda kept: [float(kept["study"]["total_seconds"])]),
    ):
        if path.exists():
            try:
                return read(read_kept(path))
            except (KeyError, TypeError):
                raise ValueError(f"{path} does not say how long the study took: restore it, or delete it") from None
    return []
