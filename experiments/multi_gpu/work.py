"""The process of one cell: prepare, say READY, wait for a line, measure, say FREE, print the row.

    python -m experiments.multi_gpu.work "train 432m rope fsdp weak x4"

A cell that is not timed prints its row without waiting.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.multi_gpu.cells import Cell, named

WINDOWS, WINDOW_SECONDS, MOST_STEPS = 3, 0.5, 10
LOSSES = 4  # first steps whose losses are kept
SLOW = 1.0  # seconds; steps that take longer are timed one by one, few of them
PROFILED = 2


def main(arguments: Sequence[str]) -> None:
    cell = named(arguments[0])
    begin = time.monotonic()
    if not cell.timed:
        from experiments.multi_gpu import checks

        print(json.dumps({"cell": cell.name, **checks.run(cell)}), flush=True)
        return
    from experiments.multi_gpu import attention, step

    runner: Any = (step if cell.what == "train" else attention).prepare(cell)
    prepared = time.monotonic() - begin
    print("READY", flush=True)
    sys.stdin.readline()
    print("GO", flush=True)
    rows = runner.measure()
    finish(cell, rows, {"prepare_seconds": prepared, "turn_seconds": time.monotonic() - begin - prepared})


def finish(cell: Cell, rows: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]], more: dict[str, Any]) -> None:
    """Let the GPUs go, then read the traces and print the rows."""
    print("FREE", flush=True)
    for row, where in rows:
        try:
            row |= {"where": where()}
        except Exception as problem:  # the times are good without it
            row |= {"where": {}, "trace_failed": words(problem)}
        print(json.dumps({"cell": cell.name, **row, **more}), flush=True)


def words(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"[:600]


def timed(run: Callable[[int], None], first: float) -> dict[str, Any]:
    """Median, least and greatest ms of one of `run(count)`'s calls, over windows. first: seconds that one took."""
    count = 1 if first > SLOW else max(1, min(MOST_STEPS, round(WINDOW_SECONDS / max(first, 1e-4))))
    windows = 2 if first > SLOW else WINDOWS
    samples = []
    for _ in range(windows):
        begin = time.perf_counter()
        run(count)
        samples.append(1e3 * (time.perf_counter() - begin) / count)
    samples.sort()
    middle = samples[len(samples) // 2] if windows % 2 else sum(samples) / windows
    return {"ms": middle, "ms_min": samples[0], "ms_max": samples[-1], "windows": windows, "steps_per_window": count}


def profiled(run: Callable[[int], None], steps: int) -> Callable[[], dict[str, Any]]:
    """Trace `run(steps)` now; the function that is returned reads the trace."""
    import jax

    from experiments.multi_gpu.trace import read_trace, summary

    folder = Path(tempfile.mkdtemp(prefix="multi-gpu-"))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        run(steps)
    finally:
        jax.profiler.stop_trace()
    return lambda: summary(read_trace(folder), steps)


def memory() -> list[int | None]:
    """Most bytes that were in use at one time, on each GPU."""
    import jax

    return [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.devices()]


def program(compiled: Any, mesh: Any) -> dict[str, Any]:
    """What a compiled program says of itself: bytes per GPU, its collectives, its fused kernels."""
    from launch.hlo import collectives, summary

    text, size = compiled.as_text(), compiled.memory_analysis()
    found: dict[str, Any] = {"kernels": text.count('custom_call_target="mosaic_gpu_v2"')}
    if size is not None:
        found |= {"argument_bytes": size.argument_size_in_bytes, "temporary_bytes": size.temp_size_in_bytes}
    try:
        found["collectives"] = [] if mesh is None else summary(collectives(text, dict(mesh.shape)))
    except ValueError as problem:  # a form of HLO that launch.hlo does not know is no reason to lose the row
        found["collectives_failed"] = words(problem)
    return found


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(sys.argv[1:])
