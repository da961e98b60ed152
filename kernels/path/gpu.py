"""Backend "mosaic_gpu": PaTH for Hopper GPUs, forward and backward (docs/path.md).

Three kinds of kernels: blocks of 128 tokens (`gpu_keys.py`, `gpu_blocks.py`), moves of queries and keys by products of
blocks (`gpu_moves.py`), and between blocks plain flash attention, with the kernels of `kernels.attention`
(`gpu_levels.py`). Each part of a row's softmax goes on from the one before it. The backward pass (`gpu_backward.py`)
uses the log-sum-exp of the whole row in every part, so no part's output is kept between the passes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from kernels.attention import mosaic_gpu
from kernels.path.call import PathCall
from kernels.path.levels import Level, plan_levels

Array = jax.Array
Leaves = dict[str, Any]
BLOCK = 128
LEAST_BETA = 2.0**-16
LARGEST_ARRAY = 2**31


def supports(call: PathCall) -> str | None:
    """None, or why these kernels cannot serve the call."""
    return mosaic_gpu.machine_lacks() or refusal(call)


def refusal(call: PathCall) -> str | None:
    """What `supports` says on a Hopper GPU."""
    if call.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q, k and v must be bfloat16 or float16, got {call.q.dtype}"
    head = max(call.q.shape[-1], call.v.shape[-1])
    if head > mosaic_gpu.LARGEST_HEAD:
        return f"head_dim {head} is more than {mosaic_gpu.LARGEST_HEAD}"
    batch, length, heads, _ = call.q.shape
    if batch * length * heads * 4 * 128 >= LARGEST_ARRAY * (2 if head <= 64 else 1):
        return f"B={batch}, T={length}, H={heads}: carried keys would have 2^31 entries or more; split the batch"
    return None


@dataclass(frozen=True)
class PathOptions:
    """The static part of a call."""

    levels: tuple[Level, ...]
    attention: Any  # mosaic_gpu_fused.Options of the levels
    log_prior: Any
    scale: float
    sharpen_prior: bool
    interpret: bool  # of the Triton kernels, for tests

    @property
    def block(self) -> Any:
        from kernels.path.gpu_blocks import BlockOptions

        return BlockOptions(self.scale, self.sharpen_prior, self.interpret)


def _options(call: PathCall, width: int, interpret: bool) -> PathOptions:
    from kernels.attention.mosaic_gpu_fused import Options
    from kernels.attention.mosaic_gpu_spec import Tiles

    log_prior = None if call.prior is None else call.prior.log_prior
    light = width <= 64 and call.gates is None
    queries = "2x128x2" if light else "2x64x2"
    keys = "3x64x2" if light and call.segments is None else "2x64x2"  # segments are looked up by aligned blocks
    attention = Options(
        log_prior=log_prior,
        scale=call.scale,
        causal=call.prior is not None,  # only says that no distance is positive: no tile of a level needs a mask
        window=None,
        sharpen_prior=call.sharpen_prior,
        lengths=(0, 0),
        tiles=(Tiles.parse("2x128x2"), Tiles.parse(queries), Tiles.parse(keys)),
    )
    levels = plan_levels(call.q.shape[1], BLOCK)
    return PathOptions(levels, attention, log_prior, call.scale, call.sharpen_prior, interpret)


def _padded(x: Array, width: int | None, length: int, value: float = 0) -> Array:
    """[B, T, …, D] with T padded to `length` and, unless None, D to `width`."""
    last = 0 if width is None else width - x.shape[-1]
    widths = [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    if last:
        widths[-1] = (0, last)
    return jnp.pad(x, widths, constant_values=value) if last or length > x.shape[1] else x


def attend(call: PathCall, interpret: bool = False) -> tuple[Array, Array]:
    """(o [B, T, H, Dv], lse [B, T, H]). interpret: run the Triton kernels on CPU, for tests."""
    length = call.q.shape[1]
    width = mosaic_gpu.stored_head(max(call.q.shape[-1], call.v.shape[-1]))
    options = _options(call, width, interpret)
    full = options.levels[-1].parent * -(-length // options.levels[-1].parent) if options.levels else BLOCK
    pad = partial(_padded, width=width, length=full)
    maybe = lambda x, value=0: None if x is None else _padded(x, None, full, value)
    x = {
        "q": pad(call.q),
        "k": pad(call.k),
        "v": pad(call.v),
        "w": pad(call.w),
        "beta": maybe(call.beta),
        "params": None if call.prior is None else call.prior.params,
        "sharpness": maybe(call.sharpness, 1),
        "gates": None if call.gates is None else tuple(maybe(g) for g in call.gates),
        "segments": maybe(call.segments, -1),
    }
    o, lse = path(options, x)
    return o[:, :length, :, : call.v.shape[-1]], lse[:, :length]


# ---- The differentiable function ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def path(options: PathOptions, x: Leaves) -> tuple[Array, Array]:
    """(o [B, T, H, Dv], natural lse [B, T, H]).

    x: q, k, v, w [B, T, ·, D], D 128 or a multiple of 8 to 64, beta [B, T, K], params, sharpness [B, T, H], gates
    (hi, lo) [B, T, H], segments [B, T], as in `call.PathCall`, padded to whole parents of the top level; None where
    absent.
    """
    return _attend(options, x, keep=False)[0]


def heads_first(x: Array) -> Array:
    """[B, T, H] -> [B, H, T]."""
    return x.swapaxes(1, 2)


def bias_inside(options: PathOptions, params: Any, sharpness: Array | None) -> Array:
    """The prior inside a block, [H, 128, 128], kept in the range that the levels' kernels keep it in."""
    from kernels.attention.mosaic_gpu_fused import LARGEST

    index = jnp.arange(BLOCK, dtype=jnp.int32)
    distance = index[None, :] - index[:, None]
    distance = jnp.where(distance > 0, -1, distance)
    values = jax.vmap(lambda p: options.log_prior(p, distance))(params).astype(jnp.float32)
    limit = jnp.float32(LARGEST)
    if sharpness is not None and options.sharpen_prior:
        limit = limit / jnp.maximum(1, jnp.abs(jax.lax.stop_gradient(sharpness)).max())
    return jnp.clip(values, -limit, limit)


def block_inputs(options: PathOptions, x: Leaves) -> Leaves:
    """What the kernels of a block read."""
    gates = (None, None) if x["gates"] is None else tuple(heads_first(g) for g in x["gates"])
    ids = x["segments"]
    return {
        **{n: x[n] for n in ("q", "k", "v")},
        "bias": None if x["params"] is None else bias_inside(options, x["params"], x["sharpness"]),
        "hi": gates[0],
        "lo": gates[1],
        "sharpness": None if x["sharpness"] is None else heads_first(x["sharpness"]),
        "q_ids": None if ids is None else jnp.where(ids < 0, -1, ids),
        "k_ids": None if ids is None else jnp.where(ids < 0, -2, ids),
    }


def level_inputs(x: Leaves) -> Leaves:
    """What the kernels of a level read of the call, beside its own queries and keys."""
    gates = None if x["gates"] is None else (*x["gates"], *x["gates"])
    return {n: x[n] for n in ("v", "params", "sharpness", "segments")} | {"gates": gates}


def _keys(options: PathOptions, x: Leaves, keep: bool) -> dict[str, Array]:
    from kernels.path import gpu_keys, mosaic_keys

    if x["k"].shape[3] == mosaic_keys.DIM and not options.interpret:
        return mosaic_keys.block_keys(x["k"], x["w"], betas(x), keep=keep)
    return gpu_keys.block_keys(x["k"], x["w"], betas(x), interpret=options.interpret)


def betas(x: Leaves) -> Array:
    """beta [B, K, T], at least LEAST_BETA: the backward divides by it."""
    return heads_first(jnp.maximum(x["beta"], LEAST_BETA))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Climb:
    """What a level starts from: the products p of its children (float16), those of their runs and left
    (`gpu_products.runs`), its queries [B, T, H, D] at the left edges of the children and carried keys
    [B, parents · stored, K, D] in the model's dtype, and for the backward pass its keys at the right edges of the
    children (float16)."""

    p: Array
    runs: Array
    left: Array
    q: Array
    carried: Array
    k: Array | None


def _chains(options: PathOptions, p: tuple[Array, Array]) -> list[tuple[Array, Array, Array]]:
    """(p, runs, left) of all levels, from the products of the blocks."""
    from kernels.path import gpu_products, mosaic_products

    mosaic = p[0].shape[-1] == mosaic_products.DIM and not options.interpret
    runs = mosaic_products.runs if mosaic else partial(gpu_products.runs, interpret=options.interpret)
    out: list[tuple[Array, Array, Array]] = []
    for n, level in enumerate(options.levels):
        made, left, whole = runs(p, level, n == len(options.levels) - 1)
        out.append((p[0], made, left))
        p = whole
    return out


def _climb(options: PathOptions, x: Leaves, k: Array, chains: Any, queries: list[Array], keep: bool) -> list[Climb]:
    """All levels, from the keys at the right edges of the blocks, the products and the queries of every level."""
    from kernels.path import gpu_moves, mosaic_moves

    if not chains:
        return []
    mosaic = k.shape[3] == mosaic_moves.DIM and not options.interpret
    carry = mosaic_moves.carry if mosaic else partial(gpu_moves.carry, interpret=options.interpret)
    carried, edges = carry(k, [made for _, made, _ in chains], options.levels, x["q"].dtype, edges=keep)
    some: list[Any] = edges or [None] * len(chains)
    return [Climb(*chain, *rest) for chain, *rest in zip(chains, queries, carried, some, strict=False)]


def _own(options: PathOptions, x: Leaves, keys: dict[str, Array], chains: Any) -> dict[str, Any]:
    """Attention of each block to itself, and its queries at the left edges of every level's children."""
    from kernels.path import gpu_blocks, mosaic_queries

    moves = [
        (level.size // BLOCK, left.reshape(*left.shape[:2], -1, *left.shape[4:]))
        for level, (_, _, left) in zip(options.levels[:-1], chains, strict=False)
    ]
    inputs = block_inputs(options, x)
    mosaic = mosaic_queries.serves(inputs, len(moves)) and not options.interpret
    run = mosaic_queries.block_queries if mosaic else gpu_blocks.block_queries
    return run(options.block, inputs, keys, moves)


@partial(jax.jit, static_argnums=(0, 2))  # layers that are alike then share one lowering
def _attend(options: PathOptions, x: Leaves, keep: bool) -> Any:
    """((o, lse), results of the blocks' keys, levels); keep: all that the backward pass needs."""
    from kernels.path import gpu_levels

    keys = _keys(options, x, keep)
    chains, levels = _chains(options, (keys["p16"], keys["p_low"])), options.levels
    own = _own(options, x, keys, chains)
    o, lse = own["o"], own["lse"].swapaxes(1, 2)
    steps = _climb(options, x, keys["k16"], chains, own["queries"], keep)
    for level, step in zip(levels, steps, strict=True):
        before = (o, lse)
        o, lse = gpu_levels.level_forward(options.attention, level_inputs(x), level, step.q, step.carried, before)
    return (o, lse), keys, steps


def _forward(options: PathOptions, x: Leaves) -> Any:
    (o, lse), keys, steps = _attend(options, x, keep=True)
    keys = {n: keys[n] for n in keys if n not in ("p16", "p_low", "k16")}
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (x, keys, steps, o, lse)


def _backward(options: PathOptions, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Leaves]:
    from kernels.path.gpu_backward import backward

    grads, segments = backward(options, residuals, cotangents), residuals[0]["segments"]
    if segments is not None:
        grads["segments"] = np.zeros(segments.shape, jax.dtypes.float0)
    return (grads,)


path.defvjp(_forward, _backward)
