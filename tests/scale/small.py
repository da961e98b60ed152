"""A train step that is small enough to compile for 8 devices within a test, and one batch for it."""

from functools import cache
from typing import Any

import jax
import numpy as np

from bampath import config as configs
from bampath import sharding
from bampath.config import Config
from bampath.sharding.rules import parameter_shardings
from bampath.step import batch_loss, build_model, declare, device_batch, init_state, optimizer_of

ROWS, LENGTH, VOCAB = 8, 32, 80
# What a query and key would look like in a collective's shape (4 heads of 6) is unlike anything else.
SMALL = (
    *("model.layers=1", "model.dim=16", "model.heads=4", "model.kv_heads=4", "model.head_dim=6", "model.mlp_dim=24"),
    *(f"model.vocab_size={VOCAB}", "model.init=normal", "model.init_std=0.2", f"data.sequence_length={LENGTH}"),
    *(f"data.batch_size={ROWS}", "train.loss_chunk=64", "train.steps=4", "optim.warmup_steps=0"),
)
MESHES = {
    "8 data": ("mesh.data=8",),
    "8 fsdp": ("mesh.fsdp=8",),
    "2×4": ("mesh.fsdp=2", "mesh.tensor=4"),
    "context 4": ("mesh.context=4",),
    "mixed": ("mesh.fsdp=2", "mesh.tensor=2", "mesh.context=2"),
}


def small(*overrides: str) -> Config:
    given = {entry.partition("=")[0] for entry in overrides}
    return configs.get("tiny", *(entry for entry in SMALL if entry.partition("=")[0] not in given), *overrides)


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of several documents with borders on, beside and far from the borders of chunks, some with padding."""
    rng = np.random.default_rng(seed)
    cuts = [(32,), (16, 32), (13, 28), (4, 12, 31), (1, 17, 25), (20, 24), (8, 32), (3, 30)]
    ids = np.full((ROWS, LENGTH), -1, np.int32)
    for row, ends in enumerate(cuts):
        for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            ids[row, start:end] = number
    tokens, targets = rng.integers(0, VOCAB, (2, ROWS, LENGTH)).astype(np.int32)
    weights = np.where(ids >= 0, rng.uniform(0.5, 1.5, ids.shape), 0).astype(np.float32)
    return {"tokens": tokens, "targets": targets, "weights": weights, "segment_ids": ids}


# The same arithmetic, compiled in half the time: LLVM's passes over the code of 8 devices are most of what is left.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@cache
def parameters(*overrides: str) -> Any:
    """Parameters as numpy arrays, away from their start, where gradients of priors may vanish."""
    config = small(*overrides)
    model = build_model(config)
    rng = np.random.default_rng(1)
    move = lambda x: np.asarray(x) + 0.1 * rng.standard_normal(x.shape).astype(x.dtype)
    build = jax.jit(lambda: init_state(config, model, optimizer_of(config, declare(model))).params)
    return jax.tree.map(move, build.lower().compile(FAST)())


@cache
def loss_and_gradients(*overrides: str) -> tuple[float, Any]:
    """Mean loss of the batch and its gradient as numpy arrays, on the mesh of the configuration."""
    config, alone = small(*overrides), [entry for entry in overrides if not entry.startswith("mesh.")]
    model, mesh = build_model(config), sharding.mesh_of(config)

    def loss(params: Any, rows: Any) -> jax.Array:
        with sharding.use(mesh):
            mean = batch_loss(config, model, params, rows, jax.random.key(0))
        return mean.total / mean.weight

    declared = declare(model)
    places = None if mesh is None else parameter_shardings(declared.axes, declared.roles, mesh)
    inputs = jax.device_put(parameters(*alone), places), device_batch(config, batch())
    value, gradient = jax.jit(jax.value_and_grad(loss)).lower(*inputs).compile(FAST)(*inputs)
    return float(value), jax.tree.map(np.asarray, gradient)


def largest_difference(a: Any, b: Any) -> tuple[float, str]:
    """Largest |a − b| over the leaves, each relative to its largest entry in b, and the leaf."""
    worst = 0.0, ""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        scale = max(float(np.abs(y).max(initial=0)), 1e-4)
        worst = max(worst, (float(np.abs(np.asarray(x) - np.asarray(y)).max()) / scale, jax.tree_util.keystr(path)))
    return worst
