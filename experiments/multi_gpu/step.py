"""A train step on a mesh: compiled while other cells compile, measured when the GPUs are its own."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath.config import Config
from bampath.flops import body_parameters, peak_flops, train_flops_per_token
from bampath.sharding import mesh_of, place_batch
from bampath.sharding.rules import batch_sharding
from bampath.step import abstract_state, build_model, declare, make_init, make_train_step, optimizer_of
from experiments.multi_gpu.cells import SHAPES, Cell
from experiments.multi_gpu.work import LOSSES, PROFILED, SLOW, memory, profiled, program, timed


def prepare(cell: Cell) -> "Runner":
    return Runner(cell)


class Runner:
    """The programs of a cell; no parameter exists before `measure`."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.config = cell, cell.config()
        config = self.config
        self.mesh = mesh_of(config)
        model = build_model(config)
        declared = declare(model)
        optimizer = optimizer_of(config, declared)
        self.parameters = declared.count
        begin = time.monotonic()
        step = make_train_step(config, model, declared, optimizer)
        init = make_init(config, model, optimizer)
        lowered = [
            step.lower(abstract_state(config, model, optimizer, self.mesh), abstract_batch(config, self.mesh)),
            init.lower(),
        ]
        middle = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            self._step, self._init = pool.map(lambda one: one.compile(), lowered)
        self.program = program(self._step, self.mesh) | {
            "lower_seconds": middle - begin,
            "compile_seconds": time.monotonic() - middle,
        }
        self._state: Any = None
        self._batch: Any = None
        self._losses: list[Any] = []

    def measure(self) -> list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
        """The row and what reads its trace."""
        config = self.config
        self._batch = place_batch(random_batch(config), self.mesh, config.data.batch_size)
        begin = time.perf_counter()
        self._state = self._init()
        jax.block_until_ready(self._state)
        setup = [time.perf_counter() - begin]
        for _ in range(2):
            begin = time.perf_counter()
            self.steps(1)
            setup.append(time.perf_counter() - begin)
        second = setup[-1]
        if second < SLOW:
            self.steps(LOSSES - 2)
        losses = [float(loss) for loss in self._losses]
        row = self.row() | timed(self.steps, second) | {"losses": losses, "setup_seconds": setup}
        shape = SHAPES[self.cell.shape]
        tokens = self.cell.rows * shape.length
        flops = train_flops_per_token(config.model, body_parameters(config.model), shape.length)
        peak = peak_flops(jax.devices()[0].device_kind)
        rate = tokens / row["ms"] * 1e3
        row |= {"tokens_per_second": rate, "mfu": rate * flops.causal / (peak * self.cell.gpus) if peak else None}
        row |= {"memory_bytes": memory()}
        where = profiled(self.steps, 1 if second > SLOW else PROFILED)
        row["last_loss"] = float(self._losses[-1])
        return [(row, where)]

    def steps(self, count: int) -> None:
        """`count` optimiser steps, finished when this returns."""
        for _ in range(count):
            self._state, report = self._step(self._state, self._batch)
            self._losses.append(report.loss.value())
        jax.block_until_ready((self._state, self._losses))

    def row(self) -> dict[str, Any]:
        cell, model = self.cell, self.config.model
        return {
            "case": cell.scheme,
            "pass": "train_step",
            "shape": cell.shape,
            "strategy": cell.strategy if cell.gpus > 1 else "one",
            "scaling": cell.scaling if cell.gpus > 1 else "both",
            "variant": cell.variant,
            "gpus": cell.gpus,
            "B": cell.rows,
            "T": SHAPES[cell.shape].length,
            "H": model.heads,
            "D": model.head_dim,
            "dtype": model.dtype,
            "remat": model.remat,
            "parameters": self.parameters,
            "program": self.program,
        }


def random_batch(config: Config) -> dict[str, np.ndarray]:
    """Tokens drawn uniformly, the same for every mesh; every target counts."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    targets = tokens[:, 1:]
    return {"tokens": tokens[:, :-1], "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def abstract_batch(config: Config, mesh: Any) -> dict[str, Any]:
    shape, where = (config.data.batch_size, config.data.sequence_length), batch_sharding(mesh)
    array = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    return {"tokens": array(jnp.int32), "targets": array(jnp.int32), "weights": array(jnp.float32)}
