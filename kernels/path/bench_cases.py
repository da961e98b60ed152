"""What `bench.py` checks and times: inputs, calls and the loops of decode."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.api import DistancePrior
from kernels.path.api import path_attention
from kernels.path.decode import path_extend
from kernels.path.lazy import lazy_token, no_pending

Array = jax.Array
Arrays = dict[str, Any]


# Largest relative RMS errors that FLA's own tests allow its kernels in bfloat16.
LIMITS = {"o": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dw": 1.5e-2, "dbeta": 2e-2, "dgates": 2e-2}


@dataclass(frozen=True)
class Case:
    """One check against float64. beta: its value, None: 1.5 … 2; same: how far w is from one vector, None: random."""

    name: str
    shape: tuple[int, int, int, int]
    kv_heads: int | None = None
    gates: bool = False
    everything: bool = False  # prior, sharpness and packed rows with padding
    beta: float | None = None
    same: float | None = None
    dtype: str = "bfloat16"
    gate: float | None = None  # of all tokens; None: 0.95 … 1


CHECKS = (
    Case("path", (2, 1024, 4, 64)),
    Case("path, head 128", (1, 1100, 4, 128)),
    Case("path-fox, head 128, GQA", (1, 1100, 4, 128), kv_heads=2, gates=True),
    Case("nearly repeated tokens, beta 1.99, head 128", (1, 2048, 2, 128), beta=1.99, same=0.01),
    Case("path, float16, head 32", (1, 777, 2, 32), dtype="float16"),
    Case("path-fox + prior + sharpness, packed, head 80, GQA", (2, 700, 4, 80), 2, gates=True, everything=True),
    Case("path-fox + prior + sharpness, packed, head 48, GQA", (2, 700, 4, 48), 2, gates=True, everything=True),
    Case("one short row", (1, 100, 2, 64), gates=True),
    Case("path-fox, gates of one half", (1, 1024, 2, 64), gates=True, gate=0.5),
    Case("beta 2", (1, 4096, 2, 64), beta=2.0),
    Case("repeated tokens, beta 1.99", (1, 4096, 2, 64), beta=1.99, same=0.0),
    Case("nearly repeated tokens, beta 1.99", (1, 4096, 2, 64), beta=1.99, same=0.01),
    Case("32k", (1, 32768, 1, 64)),
    Case("32k, repeated tokens, beta 1.99", (1, 32768, 1, 64), beta=1.99, same=0.0),
)


def ggd(params: Any, d: Array) -> Array:
    """−exp(alpha) |d|^beta."""
    return -jnp.exp(params["alpha"]) * (jnp.abs(d).astype(jnp.float32) + 1e-5) ** params["beta"]


def draw(case: Case) -> Arrays:
    """Inputs as in FLA's tests: q, k, v normal, w of length 1, gates log U(0.95, 1), do uniform."""
    batch, length, heads, dim = case.shape
    kv_heads = case.kv_heads or heads
    r = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    normal = lambda n: r.standard_normal((batch, length, n, dim), np.float32)
    w = normal(kv_heads)
    if case.same is not None:
        w = w[:, :1] + case.same * w
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta = r.uniform(1.5, 2, (batch, length, kv_heads)) if case.beta is None else np.full(w.shape[:3], case.beta)
    arrays: Arrays = {n: jnp.asarray(normal(h), dtype) for n, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    arrays |= {"w": jnp.asarray(w), "beta": jnp.asarray(beta, jnp.float32)}
    if case.gates:
        drawn = r.uniform(0.95, 1, (batch, length, heads))
        arrays["gates"] = jnp.asarray(
            np.log(drawn if case.gate is None else np.full_like(drawn, case.gate)), jnp.float32
        )
    if case.everything:
        arrays["sharpness"] = jnp.asarray(r.uniform(0.5, 1.5, (batch, length, heads)), jnp.float32)
        alpha, power = r.normal(-3, 1, heads), r.uniform(0.5, 1, heads)
        arrays["prior"] = {"alpha": jnp.asarray(alpha, jnp.float32), "beta": jnp.asarray(power, jnp.float32)}
    return arrays


def packed(case: Case) -> Array | None:
    """Three documents and padding in the middle and at the end."""
    if not case.everything:
        return None
    batch, length = case.shape[:2]
    ids = jnp.broadcast_to(jnp.arange(length) * 3 // length, (batch, length)).astype(jnp.int32)
    return ids.at[:, -20:].set(-1).at[:, length // 2 : length // 2 + 5].set(-1)


def attend(arrays: Arrays, ids: Array | None = None, implementation: str | None = None, **options: Any) -> Any:
    """(o, lse)."""
    prior = DistancePrior(arrays["prior"], ggd) if "prior" in arrays else None
    return path_attention(
        *(arrays[n] for n in ("q", "k", "v", "w", "beta")),
        log_gates=arrays.get("gates"),
        sharpness=arrays.get("sharpness"),
        prior=prior,
        segment_ids=ids,
        implementation=implementation,
        return_lse=True,
        **options,
    )


def with_gradients(run: Callable[[Arrays], Any]) -> Callable[[Arrays, Array], Any]:
    """(arrays, do) -> (o, gradients by name)."""

    def both(arrays: Arrays, do: Array) -> Any:
        o, pull = jax.vjp(lambda a: run(a)[0], arrays)
        return o, pull(do.astype(o.dtype))[0]

    return both


# ---- Decode ----

DECODE = {"B": 4, "H": 16, "D": 64, "steps": 64}


def decode_inputs(length: int) -> tuple[Arrays, Arrays]:
    """(cache of `length` tokens with room for the steps, the new tokens with a leading axis over steps)."""
    batch, heads, dim, steps = (DECODE[n] for n in ("B", "H", "D", "steps"))
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape, dtype=jnp.bfloat16: jax.random.normal(next(keys), shape, dtype)
    slots = length + steps
    cache = {
        "past_k": normal(batch, slots, heads, dim, dtype=jnp.float32),
        "past_v": normal(batch, slots, heads, dim),
        "past_positions": jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots)),
    }
    w = normal(steps, batch, 1, heads, dim, dtype=jnp.float32)
    new = {n: normal(steps, batch, 1, heads, dim) for n in ("q", "k", "v")}
    new |= {"w": w / jnp.linalg.norm(w, axis=-1, keepdims=True)}
    new |= {"beta": jax.random.uniform(next(keys), w.shape[:-1], jnp.float32, 1.5, 2)}
    return cache, new


def decode(lazy: bool, length: int, implementation: str | None = None) -> Callable[[Arrays, Arrays], Any]:
    """All steps in one loop -> outputs [steps, B, 1, H, D]; lazy, or with the cache rewritten at every token.

    implementation: of the lazy steps' attention to the cache.
    """

    def step(carry: Any, token: Arrays) -> tuple[Any, Array]:
        cache, pending, start = carry
        batch, slots = cache["past_positions"].shape
        where = jnp.full((batch, 1), start)
        ids = jnp.zeros((batch, 1), jnp.int32)
        write = lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis=1)
        q, k, v, w, beta = (token[n] for n in ("q", "k", "v", "w", "beta"))
        last = start if lazy else start - 1
        seen = jnp.broadcast_to(jnp.where(jnp.arange(slots) <= last, 0, -1), (batch, slots))
        common: Arrays = {"positions": where, "segment_ids": ids, "past_segment_ids": seen}
        if lazy:
            cache = cache | {"past_v": write(cache["past_v"], token["v"])}
            o, keys, pending = lazy_token(
                q, k, v, w, beta, pending=pending, start=start, implementation=implementation, **cache, **common
            )
        else:
            o, keys, key = path_extend(q, k, v, w, beta, **cache, **common)
            keys, cache = write(keys, key), cache | {"past_v": write(cache["past_v"], token["v"])}
        return (cache | {"past_k": keys}, pending, start + 1), o

    def run(cache: Arrays, new: Arrays) -> Any:
        batch, _, heads, dim = cache["past_k"].shape
        begin = (cache, no_pending(batch, heads, dim, length), jnp.int32(length))
        (cache, _, _), o = jax.lax.scan(step, begin, new)
        return o, cache["past_k"], cache["past_v"]

    return run
