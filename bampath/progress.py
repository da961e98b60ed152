"""What a person watches: a bar in a terminal, plain lines everywhere else; tokens per second, MFU, loss, time left."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from bampath.flops import Flops


class Speed:
    """Tokens per second and MFU between two marks, without the time spent in `paused` blocks.

    peak: FLOP/s of all devices together, None if unknown (then there is no MFU).
    """

    def __init__(self, tokens_per_step: int, flops: Flops, peak: float | None) -> None:
        self._tokens, self._flops, self._peak = tokens_per_step, flops, peak
        self._mark: tuple[int, float] | None = None
        self.seconds_per_step: float | None = None

    def at(self, step: int) -> dict[str, float]:
        """Rates since the last call; nothing at the first call, whose step also paid for compilation."""
        now = time.perf_counter()
        before, self._mark = self._mark, (step, now)
        if before is None or step == before[0]:
            return {}
        self.seconds_per_step = (now - before[1]) / (step - before[0])
        rate = self._tokens / self.seconds_per_step
        rates = {"tokens_per_second": rate}
        if self._peak is not None:
            rates |= {"mfu": rate * self._flops.causal / self._peak, "mfu_full": rate * self._flops.full / self._peak}
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in the block does not count, for evaluation and the like."""
        start = time.perf_counter()
        yield
        if self._mark is not None:
            self._mark = (self._mark[0], self._mark[1] + time.perf_counter() - start)


class Progress:
    """Shows how a run of `steps` steps goes on. Use as a context manager, so that the terminal is left in order."""

    def __init__(self, steps: int, out: TextIO) -> None:
        self._steps, self._out = steps, out
        self._bar = _bar(steps, out) if out.isatty() else None

    def show(self, step: int, values: Mapping[str, Any], seconds_per_step: float | None) -> None:
        """One line (or the bar's state) after `step` steps."""
        text = summary(values)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, text=text, refresh=True)
        else:
            left = f"  {duration((self._steps - step) * seconds_per_step)} left" if seconds_per_step else ""
            self._print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}{left}")

    def say(self, text: str) -> None:
        """A message, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


def summary(values: Mapping[str, Any]) -> str:
    """Loss, gradient norm, rate, tokens per second and MFU in words; what is missing is left out."""
    parts = []
    for name, label, form in (
        ("loss", "loss", ".4f"),
        ("grad_norm", "grad", ".3g"),
        ("lr", "lr", ".2e"),
        ("tokens_per_second", "tok/s", ",.0f"),
        ("mfu", "MFU", ".1%"),
    ):
        if values.get(name) is not None:
            parts.append(f"{label} {values[name]:{form}}")
    if values.get("mfu_full") is not None:
        parts.append(f"({values['mfu_full']:.1%} counting all pairs)")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bar(steps: int, out: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    whole = Column(no_wrap=True, min_width=2 * len(str(steps)) + 1)  # a narrow terminal cuts the text, which is last
    text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = [MofNCompleteColumn(table_column=whole), BarColumn(bar_width=12), TimeRemainingColumn(), text]
    bar = Progress(*columns, console=Console(file=out))
    bar.add_task("train", total=steps, text="compiling")
    return bar
