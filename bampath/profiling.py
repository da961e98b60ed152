"""A window of steps under JAX's profiler: what ran on the devices and on the host, for TensorBoard and Perfetto."""

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

FOLDER = "profile"
STEP_NAME = "train_step"


@dataclass(frozen=True)
class Window:
    """Steps `first` to `last`, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(
                f"the profile's window {self.first}:{self.last} must be FIRST:LAST with 1 <= FIRST <= LAST"
            )

    @classmethod
    def parse(cls, text: str) -> "Window":
        """The window of `10:13`. ValueError for anything else."""
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if not match:
            raise ValueError(f"--profile {text!r} must be FIRST:LAST, such as 10:13 for the steps 10, 11, 12 and 13")
        return cls(int(match.group(1)), int(match.group(2)))

    def check(self, done: int, steps: int) -> None:
        """ValueError unless a run that continues after step `done` reaches the whole window."""
        if self.first <= done or self.last > steps:
            raise ValueError(
                f"the profile's steps {self.first} to {self.last} are not all among {done + 1} to {steps}, which this "
                "run does"
            )


class Profiler:
    """Traces the steps of a window into RUN/profile; without a window it does nothing.

    Use as a context manager, so that a run that ends inside the window still writes its trace.
    """

    def __init__(self, window: Window | None, run_dir: Path) -> None:
        self._window, self.folder = window, run_dir / FOLDER
        self._running = False

    def step(self, number: int, before: Any) -> AbstractContextManager[Any]:
        """Around the work of step `number`. before: arrays of the step before, which are waited for so that its work is
        not in the trace."""
        if self._window is None or not self._window.first <= number <= self._window.last:
            return nullcontext()
        if number == self._window.first:
            jax.block_until_ready(before)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of every Python function would bury the rest
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True, profiler_options=options)
            self._running = True
        return jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=number)

    def ends_with(self, number: int) -> bool:
        """Whether the trace is to be written after step `number`; the caller waits for its arrays first."""
        return self._running and self._window is not None and number >= self._window.last

    def stop(self) -> None:
        """Write the trace."""
        self._running = False
        jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            self.stop()
