"""bampath's train step on random tokens, for timing."""

import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bampath.config import Config
from bampath.evaluation.results import environment
from bampath.sharding import mesh_of
from bampath.step import abstract_state, build_model, declare, make_init, make_train_step, optimizer_of

# What a kernel's name says it does; the first match counts.
KINDS = (
    ("attention", re.compile(r"attention|flash|path_|mosaic", re.I)),
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|cublas|dot|xmma", re.I)),
    ("copies", re.compile(r"memcpy|memset|copy|transpose", re.I)),
)
PROFILED_STEPS = 3


class Runner:
    """A compiled train step; from `start` on its state, and the batch that it sees again and again.

    Before that no array of it is on the device: several processes compile side by side, and one has the memory.
    """

    def __init__(self, config: Config) -> None:
        model = build_model(config)
        declared = declare(model)
        optimizer = optimizer_of(config, declared)
        self.device = jax.devices()[0].device_kind
        self.parameters = declared.count
        self._make_batch = partial(random_batch, config)
        step = make_train_step(config, model, declared, optimizer)
        state = abstract_state(config, model, optimizer, mesh_of(config))
        lowered = step.lower(state, jax.eval_shape(self._make_batch)), make_init(config, model, optimizer).lower()
        with ThreadPoolExecutor(2) as pool:
            self._step, self._init = pool.map(lambda one: one.compile(), lowered)
        self.needed: dict[str, int] | None = bytes_of(self._step)
        self.kept: int | None = memory_stats().get("pool_bytes")
        self._state: Any = None
        self._batch: Any = None
        self._report: Any = None

    def start(self) -> None:
        """Make the state and the batch. MemoryError if the device has not what the step needs."""
        if self.needed is not None:
            refuse_large(self.needed, memory_stats().get("bytes_limit"))
        self._state, self._batch = self._init(), self._make_batch()

    def steps(self, count: int) -> None:
        """`count` optimiser steps, finished when this returns."""
        for _ in range(count):
            self._state, self._report = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)

    def loss(self) -> float:
        return float(self._report.loss.value())

    def memory(self) -> int | None:
        """Most bytes that were in use at one time."""
        return memory_stats().get("peak_bytes_in_use")

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


def memory_stats() -> dict[str, int]:
    """What the device says of its memory, in bytes; nothing on CPUs."""
    return jax.devices()[0].memory_stats() or {}


def bytes_of(compiled: Any) -> dict[str, int] | None:
    """{"state": what a step is given, batch included, "temporary": what it takes beside that}; None if unknown."""
    size = compiled.memory_analysis()
    return size and {"state": size.argument_size_in_bytes, "temporary": size.temp_size_in_bytes}


def refuse_large(needed: dict[str, int], limit: int | None) -> None:
    """MemoryError if the parts of `needed` do not fit `limit` bytes together (None: not known)."""
    if limit is not None and sum(needed.values()) > limit:
        parts = " + ".join(f"{size / 2**30:.1f} GiB {name}" for name, size in needed.items())
        raise MemoryError(f"a train step needs {parts}, and the device gives {limit / 2**30:.1f} GiB")


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
