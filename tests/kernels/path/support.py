"""Random PaTH calls, and outputs and all gradients of a call, for the tests of every backend."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.call import DistancePrior
from kernels.path import reference, xla
from kernels.path.call import make_call
from kernels.path.plan import Plan
from kernels.path.shapes import Shape
from tests.kernels.attention.support import PRIORS

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """The static side of a call; several seeds share one compilation."""

    prior: str | None = None
    scale_gates: bool = False
    sharpen_prior: bool = True
    scale: float | None = None


def draw(
    shape: Shape,
    seed: int,
    *,
    dtype: Any = np.float64,
    beta: tuple[float, float] = (0.0, 2.0),
    repeated: bool = False,
    gates: bool = True,
    sharpness: bool = True,
    prior: str | None = None,
    v_dim: int | None = None,
) -> Row:
    """Row of a random call: q, k, v in `dtype`, the rest float32 (float64 for float64).

    `repeated`: all tokens have the same w. Gates go from hardly any forgetting to nearly all in one row.
    """
    rng, s = np.random.default_rng(seed), shape
    kv_heads = s.kv_heads or s.heads
    exact = np.float64 if dtype == np.float64 else np.float32
    rows = lambda heads, dim: rng.normal(size=(s.batch, s.length, heads, dim))
    w = rows(kv_heads, s.head_dim)
    w = np.broadcast_to(w[:, :1], w.shape) if repeated else w
    wide: Row = {
        "w": w / np.linalg.norm(w, axis=-1, keepdims=True),
        "beta": rng.uniform(*beta, size=(s.batch, s.length, kv_heads)),
    }
    if gates:
        wide["log_gates"] = -np.exp(rng.uniform(-6, 1.5, (s.batch, s.length, s.heads)))
    if sharpness:
        wide["sharpness"] = rng.uniform(0.2, 3, (s.batch, s.length, s.heads))
    if prior:
        wide["params"] = PRIORS[prior][1](rng, s.heads)
    acts = {
        "q": rows(s.heads, s.head_dim),
        "k": rows(kv_heads, s.head_dim),
        "v": rows(kv_heads, v_dim or s.head_dim),
    }
    return {name: jnp.asarray(x, dtype) for name, x in acts.items()} | jax.tree.map(
        lambda x: jnp.asarray(x, exact), wide
    )


def call_of(arrays: Row, options: Options, segments: Any = None) -> Any:
    prior = DistancePrior(arrays["params"], PRIORS[options.prior][0]) if options.prior else None
    return make_call(
        *(arrays[name] for name in ("q", "k", "v", "w", "beta")),
        log_gates=arrays.get("log_gates"),
        scale_gates=options.scale_gates,
        prior=prior,
        sharpness=arrays.get("sharpness"),
        segment_ids=segments,
        sharpen_prior=options.sharpen_prior,
        scale=options.scale,
    )


def attend(arrays: Row, options: Options, plan: Plan | str | None, segments: Any = None) -> Any:
    """(o, lse) by the blockwise backend under `plan` (None: its own choice) or by "reference"."""
    call = call_of(arrays, options, segments)
    return reference.attend(call) if plan == "reference" else xla.attend(call, plan)


@functools.cache
def compiled(options: Options, plan: Plan | str | None) -> Callable[..., Any]:
    return jax.jit(lambda arrays, segments: attend(arrays, options, plan, segments))


@functools.cache
def compiled_gradients(options: Options, plan: Plan | str | None) -> Callable[..., Any]:
    """(arrays, segments, cotangents of o and lse) -> ((o, lse), gradients of all arrays)."""

    def loss(arrays: Row, segments: Any, do: Any, dlse: Any) -> Any:
        o, lse = attend(arrays, options, plan, segments)
        finite = jnp.where(lse > -jnp.inf, lse, 0)
        return (o.astype(finite.dtype) * do).sum() + (finite * dlse).sum(), (o, lse)

    def both(*args: Any) -> Any:
        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(*args)
        return out, grads

    return jax.jit(both)


def cotangents(arrays: Row, seed: int = 1) -> tuple[Any, Any]:
    """Random cotangents of o and lse."""
    rng = np.random.default_rng(seed)
    wide = arrays["w"].dtype
    shape = arrays["q"].shape[:3]
    return jnp.asarray(rng.normal(size=(*shape, arrays["v"].shape[-1])), wide), jnp.asarray(
        rng.normal(size=shape), wide
    )


def gradients(arrays: Row, options: Options, plan: Plan | str | None, segments: Any = None, seed: int = 1) -> Any:
    """((o, lse), gradients of all arrays) under random cotangents."""
    return compiled_gradients(options, plan)(arrays, segments, *cotangents(arrays, seed))


def logits(arrays: Row, plan: Plan | str | None, options: Options | None = None) -> np.ndarray:
    """The logits themselves, [B, H, T, T]: with one-hot values the output is the row of probabilities."""
    batch, length = arrays["q"].shape[:2]
    kv_heads = arrays["k"].shape[2]
    one_hot = jnp.broadcast_to(
        jnp.eye(length, dtype=arrays["q"].dtype)[None, :, None, :], (batch, length, kv_heads, length)
    )
    o, lse = compiled(options or Options(), plan)(arrays | {"v": one_hot}, None)
    with np.errstate(divide="ignore"):
        return np.moveaxis(np.log(np.asarray(o)) + np.asarray(lse)[..., None], 2, 1)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Every leaf within `tolerance` of the other, relative to the largest entry of the wanted one."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        both = np.isneginf(a) & np.isneginf(b)
        error = np.abs(np.where(both, 0, a - np.where(both, 0, b))).max() if a.size else 0.0
        size = max(1.0, np.abs(np.where(np.isneginf(b), 0, b)).max())
        assert error <= tolerance * size, f"{jax.tree_util.keystr(path)}: error {error:.2e} of size {size:.2e}"
