"""Random calls of attention, priors to use in them, and all gradients of a call, for the tests of every backend."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import reference, xla
from kernels.attention.call import DistancePrior, make_call
from kernels.attention.shapes import Shape
from kernels.attention.tiles import Grid, make_grid

Arrays = dict[str, Any]


# ---- Priors ----


def ggd(params: Any, d: jax.Array) -> jax.Array:
    """GGD-BAM: −exp(θα)·(|d − μ| + 1e−5)^θβ with μ = 2 sinh(θμ)."""
    away = jnp.abs(d - 2 * jnp.sinh(params["mu"])) + 1e-5
    return -jnp.exp(params["alpha"]) * away ** params["beta"]


def alibi(slope: Any, d: jax.Array) -> jax.Array:
    return -slope * jnp.abs(d).astype(slope.dtype)


def kerple(params: Any, d: jax.Array) -> jax.Array:
    """KERPLE, logarithmic: −r1·log(1 + r2·|d|)."""
    return -params["r1"] * jnp.log1p(params["r2"] * jnp.abs(d))


def table(params: Any, d: jax.Array) -> jax.Array:
    """Learned biases of 8 buckets that grow with distance, as in T5."""
    far = jnp.abs(d)
    bucket = jnp.where(far < 4, far, jnp.minimum(7, 2 + jnp.log2(jnp.maximum(far, 1).astype(jnp.float32)).astype(int)))
    return params[bucket]


Init = Callable[[np.random.Generator, int], Any]
PRIORS: dict[str, tuple[Callable[[Any, jax.Array], jax.Array], Init]] = {
    "ggd": (
        ggd,
        lambda rng, h: {
            "alpha": rng.normal(0, 0.5, h),
            "beta": rng.uniform(0.2, 1.3, h),
            "mu": rng.normal(0, 0.3, h),
        },
    ),
    # θβ from −6 to 3: at distance 0 the prior reaches −1e30.
    "ggd-extreme": (
        ggd,
        lambda rng, h: {"alpha": rng.normal(0, 0.5, h), "beta": np.linspace(-6, 3, h), "mu": np.zeros(h)},
    ),
    "alibi": (alibi, lambda rng, h: rng.uniform(0.01, 0.5, h)),
    "kerple": (kerple, lambda rng, h: {"r1": rng.uniform(0.5, 2, h), "r2": rng.uniform(0.1, 2, h)}),
    "table": (table, lambda rng, h: rng.normal(size=(h, 8))),
}


# ---- Calls ----


@dataclass(frozen=True)
class Case:
    """One combination of shape and options; static, so that several seeds share one compilation."""

    shape: Shape
    prior: str | None = None
    gates: str | None = None  # "log" | "pair"
    sharpness: str | None = None  # "inside" | "outside"
    segments: str | None = None  # "packed" | "left" | "right" (padding)
    positions: str | None = None  # "given" | "shuffled"
    window: int | None = None
    causal: bool = True
    scale: float | None = None


def segment_ids(rng: np.random.Generator, kind: str, batch: int, length: int) -> np.ndarray:
    """Ids [B, S]: documents in order, or one document with padding on a side (all of the last row, of several)."""
    if kind == "packed":
        return np.sort(rng.integers(0, 4, (batch, length)), axis=1)
    ids = np.zeros((batch, length), np.int64)
    pad = length // 3
    ids[:, slice(0, pad) if kind == "left" else slice(length - pad, length)] = -1
    if batch > 1:
        ids[-1] = -1
    return ids


def draw(case: Case, seed: int, dtype: Any = np.float64) -> tuple[Arrays, Arrays]:
    """(differentiable, integer arguments) of a random call; activations in `dtype`, the rest float32 or float64."""
    rng, s = np.random.default_rng(seed), case.shape
    size, kv_heads = s.kv_length or s.length, s.kv_heads or s.heads
    exact = np.float64 if dtype == np.float64 else np.float32
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    diff: Arrays = {
        "q": normal(s.batch, s.length, s.heads, s.head_dim),
        "k": normal(s.batch, size, kv_heads, s.head_dim),
        "v": normal(s.batch, size, kv_heads, s.head_dim),
    }
    wide: Arrays = {}
    if case.prior:
        wide["params"] = PRIORS[case.prior][1](rng, s.heads)
    if case.gates == "log":  # from hardly any forgetting to nearly all, in one row
        wide["log_gates"] = -np.exp(rng.uniform(-6, 1.5, (s.batch, size, s.heads)))
    if case.gates == "pair":
        wide["log_gates"] = (
            rng.normal(size=(s.batch, s.length, s.heads)),
            rng.normal(size=(s.batch, size, s.heads)),
        )
    if case.sharpness:
        wide["sharpness"] = rng.uniform(0.2, 3, (s.batch, s.length, s.heads))
    diff |= jax.tree.map(lambda x: jnp.asarray(x, exact), wide)
    fixed: Arrays = {}
    integer = lambda x: jnp.asarray(x, jnp.int32)
    if case.segments:
        kv = segment_ids(rng, case.segments, s.batch, size)
        q = kv[:, size - s.length :] if s.length <= size else segment_ids(rng, case.segments, s.batch, s.length)
        fixed["segment_ids"] = integer(kv) if s.length == size else (integer(q), integer(kv))
    if case.positions == "given":
        fixed["positions"] = integer(rng.integers(0, size, (s.batch, s.length)))
        fixed["kv_positions"] = integer(rng.integers(0, size, (s.batch, size)))
    if case.positions == "shuffled":
        fixed["kv_positions"] = integer(rng.permutation(size))
    return diff, fixed


def arguments(case: Case, diff: Arrays, fixed: Arrays) -> dict[str, Any]:
    """Keyword arguments of `attention`, without implementation and return_lse."""
    inputs = dict(diff)
    prior = DistancePrior(inputs.pop("params"), PRIORS[case.prior][0]) if case.prior else None
    inputs.setdefault("log_gates", None)
    inputs.setdefault("sharpness", None)
    none = dict.fromkeys(("segment_ids", "positions", "kv_positions"))
    return {
        **inputs,
        **none,
        **fixed,
        "prior": prior,
        "sharpen_prior": case.sharpness != "outside",
        "window": case.window,
        "causal": case.causal,
        "scale": case.scale,
    }


def small_grid(case: Case) -> Grid:
    """Several blocks on both axes, of odd lengths, with overlaps."""
    return make_grid(case.shape.length, case.shape.kv_length or case.shape.length, 19, 23)


@functools.partial(jax.jit, static_argnames=("case", "backend", "grid"))
def gradients(
    case: Case, diff: Arrays, fixed: Arrays, weights: tuple[Any, Any], backend: str, grid: Grid | None = None
) -> tuple[Any, Any, Arrays]:
    """(o, lse, gradients of Σ o·weights[0] + Σ lse·weights[1] over rows that see a key) with respect to `diff`."""

    def loss(diff: Arrays) -> Any:
        call = make_call(**arguments(case, diff, fixed))
        o, lse = reference.attend(call) if backend == "reference" else xla.attend(call, grid)
        finite = jnp.where(lse > -jnp.inf, lse, 0)
        total = (o.astype(finite.dtype) * weights[0]).sum() + (finite * weights[1]).sum()
        return total, (o, lse)

    (_, (o, lse)), grads = jax.value_and_grad(loss, has_aux=True)(diff)
    return o, lse, grads


def cotangents(case: Case, seed: int, lse: float = 0.3) -> tuple[Any, Any]:
    """Weights [B, T, H, D] and [B, T, H] of a random loss."""
    rng, s = np.random.default_rng(1000 + seed), case.shape
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    w_o = rng.normal(size=(s.batch, s.length, s.heads, s.head_dim))
    return jnp.asarray(w_o, wide), jnp.asarray(lse * rng.normal(size=(s.batch, s.length, s.heads)), wide)


def distances(got: Any, want: Any) -> dict[str, float]:
    """RMS(got − want) / RMS(want) of every array of two equal trees, −inf in the same places counting as equal."""
    out = {}
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        holes = np.isneginf(y)
        assert (np.isneginf(x) == holes).all(), f"−inf in other places at {jax.tree_util.keystr(path)}"
        x, y = np.where(holes, 0, x), np.where(holes, 0, y)
        assert np.isfinite(x).all(), f"not finite at {jax.tree_util.keystr(path)}"
        size = np.sqrt(np.mean(y**2))
        out[jax.tree_util.keystr(path)] = float(np.sqrt(np.mean((x - y) ** 2)) / (size if size > 1e-12 else 1))
    return out
