"""bampath's train step on random tokens, for timing."""

import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bampath.config import Config
from bampath.evaluation.results import environment
from bampath.step import build_model, declare, init_state, make_train_step, optimizer_of

# What a kernel's name says it does; the first match counts.
KINDS = (
    ("attention", re.compile(r"attention|flash|path_|mosaic", re.I)),
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|cublas|dot|xmma", re.I)),
    ("copies", re.compile(r"memcpy|memset|copy|transpose", re.I)),
)
PROFILED_STEPS = 3


class Runner:
    """A train step, its state, and the batch that it sees again and again."""

    def __init__(self, config: Config) -> None:
        model = build_model(config)
        declared = declare(model)
        optimizer = optimizer_of(config, declared)
        self.device = jax.devices()[0].device_kind
        self.parameters = declared.count
        self._state = init_state(config, model, optimizer)
        self._batch = random_batch(config)
        step = make_train_step(config, model, declared, optimizer)
        self._step: Any = step.lower(self._state, self._batch).compile()
        self._report: Any = None

    def steps(self, count: int) -> None:
        """`count` optimiser steps, finished when this returns."""
        for _ in range(count):
            self._state, self._report = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)

    def loss(self) -> float:
        return float(self._report.loss.value())

    def memory(self) -> int | None:
        """Most bytes that were in use at one time."""
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    def environment(self) -> dict[str, Any]:
        return environment()

    def profile(self) -> dict[str, Any]:
        """{"kinds": ms per step by kind of kernel, "longest": the 12 kernels that take most, ms per step}."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, create_perfetto_trace=True):
                self.steps(PROFILED_STEPS)
            found = sorted(Path(folder).rglob("perfetto_trace.json.gz"))
            if not found:
                return {}
            with gzip.open(found[0], "rt", encoding="utf-8") as file:
                trace = json.load(file)
        return summary(trace["traceEvents"] if isinstance(trace, dict) else trace)


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Time per step of the kernels in a Perfetto trace, by kind and by name."""
    names: dict[str, float] = defaultdict(float)
    streams = set(_streams(events))
    for event in events:
        if event.get("ph") == "X" and (event.get("pid"), event.get("tid")) in streams:
            names[event["name"]] += event["dur"] / 1e3 / PROFILED_STEPS
    kinds: dict[str, float] = defaultdict(float)
    for name, spent in names.items():
        kinds[next((kind for kind, pattern in KINDS if pattern.search(name)), "elementwise and the rest")] += spent
    longest = sorted(names.items(), key=lambda item: -item[1])[:12]
    return {"kinds": dict(kinds), "longest": {name[:80]: spent for name, spent in longest}}


def _streams(events: Iterable[dict[str, Any]]) -> Iterable[tuple[Any, Any]]:
    """(pid, tid) of a GPU's streams of kernels."""
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "thread_name" and "Stream" in event["args"]["name"]:
            yield event.get("pid"), event.get("tid")


def random_batch(config: Config) -> dict[str, jax.Array]:
    """Tokens and targets drawn uniformly; every target counts."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.model.vocab_size, jnp.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": jnp.ones(tokens[:, 1:].shape, jnp.float32)}


def build(config: Config) -> Runner:
    return Runner(config)
