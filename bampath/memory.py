"""How much memory a device needs for a train step: what is stored exactly, what is saved for the backward pass by
tracing it, the rest by formula. Nothing is compiled or allocated.

A compiler reuses buffers and computes some things twice instead of keeping them, so this is an estimate;
`python -m launch.compile` gives a TPU's exact number in minutes, this one comes in seconds. docs/training.md compares.
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bampath.config import Config, MeshConfig
from bampath.positions.registry import parse
from bampath.step import Declared, abstract_state, batch_loss, build_model, declare, optimizer_of

# Of what autodiff would keep, a compiler computes the cheap part again. This part of one layer's arrays exists at one
# time while it is worked off backward, and this part is kept where nothing is told to be recomputed. Chosen with
# programs in which a TPU's compiler placed every buffer (docs/training.md).
_WORKING_SHARE, _SAVED_SHARE = 0.6, 0.5
# PaTH's kernels carry queries and keys from superblock to superblock and keep more than autodiff of the plain form.
_PATH_WORKING_SHARE = 1.7
# With context, bytes for each number in the keys and values of whole rows: two chunks' copies and their gradients;
# PaTH's are float32 and carried over all chunks in between.
_ROW_BYTES, _PATH_ROW_BYTES = 24, 50


@dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    state: parameters and moments; gradients; accumulated: their sum over the parts of a step; saved: kept from the
    forward for the backward pass; working: one layer's arrays while its backward pass runs; loss: logits of a chunk;
    head and gathered: copies of what is cut over fsdp, where it is used, of the head and of all that is used at a time.
    """

    state: int
    gradients: int
    saved: int
    working: int
    loss: int
    head: int
    gathered: int
    accumulated: int

    @property
    def total(self) -> int:
        """At the worst of three moments: in the loss, in the last layer's backward pass, and at the end of the backward
        pass, when what was saved is gone and gradients are there."""
        moments = (
            self.saved + self.loss + self.head,
            self.saved + self.working + self.gathered,
            self.gradients + self.gathered,
        )
        return self.state + self.accumulated + max(moments)

    def __str__(self) -> str:
        parts = {
            "state": self.state,
            "accumulated": self.accumulated,
            "gradients": self.gradients,
            "saved": self.saved,
            "one layer": self.working,
            "loss": self.loss + self.head,
            "gathered": self.gathered,
        }
        return ", ".join(f"{name} {in_words(size)}" for name, size in parts.items() if size)


def in_words(size: float) -> str:
    """Bytes as `3.20 GiB` or `12 MiB`."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.3g} MiB"


def estimate(config: Config, declared: Declared, mesh: Mesh | None) -> Memory:
    """The memory of a train step of `config` on each device of `mesh` (None: on one device)."""
    optimizer = optimizer_of(config, declared)
    state = abstract_state(config, build_model(config), optimizer, mesh)
    parameters = sum(map(_local_bytes, jax.tree.leaves(state.params)))
    rows = config.data.batch_size // (config.train.accumulate * config.mesh.data * config.mesh.fsdp)
    model, local = config.model, local_config(config)
    per_row = saved_bytes(local, model.remat)
    whole_row = per_row if model.remat == "none" else saved_bytes(local, "none")
    head, gathered = _gathered_bytes(config, declared)
    share = _SAVED_SHARE if model.remat == "none" else 1.0
    working = _PATH_WORKING_SHARE if has_path(config) else _WORKING_SHARE
    cut = config.mesh.tensor if model.scan else 1  # what a loop over layers keeps, XLA cuts over tensor as well
    return Memory(
        state=sum(map(_local_bytes, jax.tree.leaves(state))),
        gradients=parameters,
        accumulated=parameters if config.train.accumulate > 1 else 0,
        saved=round(share * per_row * rows / cut),
        working=round(working * whole_row * rows / model.layers) + row_bytes(config, rows),
        loss=loss_bytes(local, rows),
        head=head,
        gathered=gathered,
    )


def local_config(config: Config) -> Config:
    """A configuration for one device whose arrays have the shapes that each device of the mesh has of a row."""
    model, mesh = config.model, config.mesh
    tensor = {name: getattr(model, name) // mesh.tensor for name in ("heads", "kv_heads", "mlp_dim")}
    return replace(
        config,
        model=replace(model, **tensor, scan=False, attention_impl=None),
        data=replace(config.data, sequence_length=config.data.sequence_length // mesh.context),
        train=replace(config.train, accumulate=1, init_from="", init_positional=False),
        mesh=MeshConfig(),
    )


def saved_bytes(config: Config, remat: Any) -> float:
    """Bytes per row that the backward pass of `config`'s loss keeps, weights not counted.

    Traced for one row and for three: what grows with rows is kept per row. A deep model is traced for one and two
    periods of its layers' schemes, and every further period taken to keep the same.
    """
    layers, period = config.model.layers, layer_period(config)
    per_row = lambda layers: _per_row(replace(config, model=replace(config.model, layers=layers)), remat)
    if 2 * period >= layers:
        return per_row(layers)
    one, two = per_row(period), per_row(2 * period)
    return one + (two - one) * (layers / period - 1)


def row_bytes(config: Config, rows: int) -> int:
    """With context, keys and values of whole rows, as the layer at work holds them."""
    model, mesh = config.model, config.mesh
    if mesh.context == 1:
        return 0
    numbers = 2 * rows * config.data.sequence_length * (model.kv_heads // mesh.tensor) * model.head_dim
    return numbers * (_PATH_ROW_BYTES if has_path(config) else _ROW_BYTES)


def has_path(config: Config) -> bool:
    """Whether some layer's scheme multiplies keys by products of matrices (PaTH)."""
    scheme = parse(config.model.position)
    names = {scheme.at(layer).name for layer in range(config.model.layers)}
    return any(part.partition("(")[0] == "path" for name in names for part in name.split("+"))


def layer_period(config: Config) -> int:
    """The smallest number of layers after which their schemes repeat."""
    scheme, layers = parse(config.model.position), config.model.layers
    names = [scheme.at(layer).name for layer in range(layers)]
    return next(p for p in range(1, layers + 1) if names[p:] == names[: layers - p])


def _per_row(config: Config, remat: Any) -> float:
    one, three = (sum(map(_bytes, _saved(config, rows, remat))) for rows in (1, 3))
    return (three - one) / 2


def _saved(config: Config, rows: int, remat: Any) -> list[Any]:
    config = replace(config, model=replace(config.model, remat=remat))
    model = build_model(config)
    array = lambda dtype: jax.ShapeDtypeStruct((rows, config.data.sequence_length), dtype)
    batch = {"tokens": array(jnp.int32), "targets": array(jnp.int32), "weights": array(jnp.float32)}
    if config.data.document_mask:
        batch["segment_ids"] = array(jnp.int32)

    def backward(params: Any, batch: Any) -> Any:
        loss = lambda params: batch_loss(config, model, params, batch, jax.random.key(0)).total
        return jax.vjp(loss, params)[1]

    return jax.tree.leaves(jax.eval_shape(backward, declare(model).shapes, batch))


def loss_bytes(config: Config, rows: int) -> int:
    """Logits of a chunk of tokens in float32."""
    tokens = min(max(config.train.loss_chunk, rows), rows * config.data.sequence_length)
    return 4 * tokens * config.model.vocab_size


def _gathered_bytes(config: Config, declared: Declared) -> tuple[int, int]:
    """With fsdp, the whole of the head, and of what is used at one time (head, embedding, and two layers, one at work
    and one on its way): a copy in the compute type and a gradient in float32."""
    model, mesh = config.model, config.mesh
    if mesh.fsdp == 1:
        return 0, 0
    table = model.vocab_size * model.dim
    layer = (declared.count - 2 * table) // model.layers
    each = lambda count: count // mesh.tensor * (jnp.dtype(model.dtype).itemsize + 4)
    return each(table), each(2 * table + 2 * layer)


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize if not _is_key(leaf) else 0


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.extended))


def _local_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def device_bytes() -> int | None:
    """Memory of each device that a program may use; of the whole machine on a CPU; None if it does not say."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices())
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
