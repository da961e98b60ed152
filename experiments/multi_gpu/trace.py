"""Where the time of a few steps goes on each GPU, from JAX's trace: kernels by kind, collectives and what they hide."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
# What a kernel's name says it does; the first match counts.
KINDS = (
    ("collectives", re.compile(r"nccl|memcpyp2p", re.I)),
    ("attention", re.compile(r"attention|flash|path_|mosaic", re.I)),
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|cublas|dot|xmma", re.I)),
    ("copies", re.compile(r"memcpy|memset|copy|transpose", re.I)),
)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "elementwise and the rest")


def read_trace(folder: Path) -> list[dict[str, Any]]:
    """The events of the trace that `jax.profiler.stop_trace` wrote somewhere in `folder`. OSError without one."""
    found = sorted(folder.rglob("*trace.json.gz"))
    if not found:
        raise OSError(f"no trace in {folder}")
    with gzip.open(found[0], "rt", encoding="utf-8") as file:
        trace = json.load(file)
    return trace["traceEvents"] if isinstance(trace, dict) else trace


def summary(events: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Per step, the mean over GPUs, in ms: `step` from the first kernel's start to the last one's end, `busy`, time in
    which a collective ran (`collectives`), in which nothing else did (`exposed`), sums by `kinds` of kernels, and the
    `longest` kernels. Times of collectives hold the wait for the other GPUs. {} without kernels."""
    streams = {
        (e.get("pid"), e.get("tid"))
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name" and "Stream" in e["args"]["name"]
    }
    by_gpu: dict[Any, list[tuple[str, Interval]]] = defaultdict(list)
    for e in events:
        if e.get("ph") == "X" and (e.get("pid"), e.get("tid")) in streams:
            by_gpu[e["pid"]].append((e["name"], (e["ts"], e["ts"] + e["dur"])))
    if not by_gpu:
        return {}
    per = 1e3 * steps * len(by_gpu)  # µs of all GPUs to ms of one GPU and step
    totals: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for kernels in by_gpu.values():
        spans = [span for _, span in kernels]
        sent = [span for name, span in kernels if kind_of(name) == "collectives"]
        other = [span for name, span in kernels if kind_of(name) != "collectives"]
        totals["step"] += (max(end for _, end in spans) - min(begin for begin, _ in spans)) / per
        totals["busy"] += covered(spans) / per
        totals["collectives"] += covered(sent) / per
        totals["exposed"] += (covered(spans) - covered(other)) / per
        for name, (begin, end) in kernels:
            kinds[kind_of(name)] += (end - begin) / per
            names[name[:80]] += (end - begin) / per
    longest = dict(sorted(names.items(), key=lambda item: -item[1])[:12])
    return {"gpus": len(by_gpu), **totals, "kinds": dict(kinds), "longest": longest}


def covered(spans: Sequence[Interval]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
