"""Calls of `attention` that the GPU checks and timings share: priors, shapes, random inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.api import DistancePrior, attention
from kernels.attention.shapes import TEST

Array = jax.Array


def ggd(params: dict[str, Array], d: Array) -> Array:
    """−exp(alpha) (|d| + 1e-5)^beta, the prior of BAM (arXiv 2505.22842)."""
    return -jnp.exp(params["alpha"] + params["beta"] * jnp.log(jnp.abs(d).astype(jnp.float32) + 1e-5))


def alibi(params: dict[str, Array], d: Array) -> Array:
    """−slope |d| with a trained slope (arXiv 2108.12409)."""
    return -params["slope"] * jnp.abs(d).astype(jnp.float32)


def kerple(params: dict[str, Array], d: Array) -> Array:
    """−r1 ln(1 + r2 |d|) (arXiv 2205.09921)."""
    return -params["r1"] * jnp.log(1 + params["r2"] * jnp.abs(d).astype(jnp.float32))


def buckets(params: dict[str, Array], d: Array) -> Array:
    """A learned table over 12 logarithmic buckets of distance, in the manner of T5."""
    n = jnp.abs(d)
    far = 8 + jnp.log2(jnp.maximum(n, 8) / 8).astype(jnp.int32)
    return params["table"][jnp.minimum(jnp.where(n < 8, n, far), 11)]


@dataclass(frozen=True)
class Case:
    """One call of `attention`: shapes, what is added, options."""

    name: str
    B: int
    T: int
    H: int
    D: int
    prior: str | None = None
    sharpness: float = 0.0  # its typical size; negative: every other head is sharpened the wrong way round
    gates: bool = False
    S: int | None = None
    Hkv: int | None = None
    packed: bool = False
    documents: int = 0  # length of the documents that a row is packed from
    dtype: str = "bfloat16"
    use_lse: bool = True  # does the loss depend on lse
    gate_bias: float | None = None  # gates are logsigmoid(N(0, 1) + bias) instead of mild ones
    shut: bool = False  # some gates shut for good
    positions: str | None = None  # "permuted" storage, "sparse" positions, or a ragged "cache"
    options: dict[str, Any] = field(default_factory=dict)


CHECKS = (
    Case("plain", 2, 512, 4, 64),
    Case("plain, f16", 2, 200, 2, 128, dtype="float16"),
    Case("bam+ssmax", 2, 712, 4, 64, "ggd", 1.0),
    Case("bam+ssmax, head 128", 1, 520, 2, 128, "ggd", 1.0),
    Case(
        "bam, negative sharpness, outside, head 48, GQA",
        2,
        301,
        4,
        48,
        "ggd",
        -1.0,
        Hkv=2,
        options={"sharpen_prior": False},
    ),
    Case("bam, extreme exponents", 1, 390, 8, 64, "ggd_extreme", 0.3, use_lse=False),
    Case("alibi, not causal, head 80", 2, 301, 4, 80, "alibi", options={"causal": False}),
    Case("kerple, window, head 96", 1, 500, 2, 96, "kerple", options={"window": 77}),
    Case("table of 12, head 32", 2, 301, 2, 32, "buckets"),
    Case("fox", 2, 640, 4, 64, gates=True),
    Case("fox+bam+ssmax, packed, GQA", 2, 304, 4, 64, "ggd", 1.0, True, Hkv=1, packed=True),
    Case("bam+ssmax, documents of 150, head 128", 2, 700, 2, 128, "ggd", 1.0, documents=150),
    Case("fox+alibi, fewer queries than keys", 2, 104, 4, 64, "alibi", 1.0, True, S=304),
    Case("more queries than keys", 1, 301, 2, 64, "alibi", S=130, options={"window": 33}),
    Case("window, documents of 33, GQA", 2, 520, 4, 64, Hkv=2, documents=33, options={"window": 20}),
    Case("alibi, not causal, documents of 170", 2, 390, 2, 64, "alibi", documents=170, options={"causal": False}),
    Case("one token", 1, 1, 2, 64, "ggd"),
    Case("one token per document", 1, 200, 2, 64, "ggd", 1.0, documents=1),
    Case("fox, some gates shut", 1, 400, 2, 64, gates=True, shut=True),
    Case("bam+ssmax, documents of 400", 1, 900, 4, 64, "ggd", 1.0, documents=400),
    Case("fox, documents of 400, head 128", 1, 900, 2, 128, gates=True, documents=400),
)
# What the portable kernels serve besides: explicit positions, head_dim 256, few queries on a cache.
PORTABLE_CHECKS = (
    Case("bam+ssmax, permuted positions", 2, 300, 4, 64, "ggd", 1.0, positions="permuted"),
    Case("fox+bam, permuted positions, packed, GQA", 2, 304, 4, 64, "ggd", 1.0, True, Hkv=2, packed=True,
         positions="permuted"),
    Case("table of 12, permuted positions, window", 1, 300, 2, 64, "buckets", positions="permuted",
         options={"window": 90}),
    Case("alibi, not causal, sparse positions", 1, 200, 2, 64, "alibi", positions="sparse", options={"causal": False}),
    Case("bam+ssmax, head 256", 1, 390, 2, 256, "ggd", 1.0),
    Case("fox, head 256, GQA", 1, 300, 2, 256, gates=True, Hkv=1),
)  # fmt: skip
DECODE_CHECKS = (
    Case("one token, plain", 2, 1, 4, 64, S=1500),
    Case("one token, bam+ssmax, ragged cache", 4, 1, 4, 64, "ggd", 1.0, S=1500, positions="cache"),
    Case("one token, fox+bam+ssmax, ragged cache, GQA", 3, 1, 8, 128, "ggd", 1.0, True, S=1100, Hkv=2,
         positions="cache"),
    Case("5 tokens, kerple, window, ragged cache, head 48", 2, 5, 4, 48, "kerple", S=1100, positions="cache",
         options={"window": 300}),
    Case("8 tokens, alibi outside, not causal, head 80, GQA", 1, 8, 8, 80, "alibi", 1.0, S=777, Hkv=1,
         options={"sharpen_prior": False, "causal": False}),
    Case("2 tokens, table of 12, ragged cache", 2, 2, 2, 96, "buckets", S=900, positions="cache"),
    Case("one token, extreme exponents, head 256", 1, 1, 8, 256, "ggd_extreme", 0.3, S=600, use_lse=False),
)  # fmt: skip
PARAMETERS: dict[str, tuple[Any, Callable[[Any, int], dict[str, Any]]]] = {
    "ggd": (ggd, lambda r, h: {"alpha": r.uniform(-2, 0.3, h), "beta": r.uniform(-0.3, 1.0, h)}),
    "ggd_extreme": (ggd, lambda r, h: {"alpha": np.zeros(h), "beta": np.linspace(-6, 3, h)}),
    "alibi": (alibi, lambda r, h: {"slope": 2.0 ** -r.uniform(1, 8, h)}),
    "kerple": (kerple, lambda r, h: {"r1": r.uniform(0.5, 2, h), "r2": r.uniform(0.1, 1, h)}),
    "buckets": (buckets, lambda r, h: {"table": r.standard_normal((h, 12))}),
}


def inputs(case: Case, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any], tuple[Array, Array]]:
    """(differentiable operands, other arguments, cotangents of o and lse) of a case; keys nobody sees hold NaN."""
    r = np.random.default_rng(seed)
    keys, kv_heads = case.S or case.T, case.Hkv or case.H
    normal = lambda *shape: jnp.asarray(r.standard_normal(shape, np.float32), case.dtype)
    f32 = lambda x: jnp.asarray(x, jnp.float32)
    x: dict[str, Any] = {"q": normal(case.B, case.T, case.H, case.D)}
    x |= {n: normal(case.B, keys, kv_heads, case.D) for n in ("k", "v")}
    if case.prior:
        x["params"] = jax.tree.map(f32, PARAMETERS[case.prior][1](r, case.H))
    if case.sharpness:
        seen = np.log(np.maximum(np.arange(keys - case.T, keys), 0) + 2.0) / np.log(keys + 1.0)
        signs = np.where((np.arange(case.H) % 2 == 1) & (case.sharpness < 0), -1, 1)
        scale = abs(case.sharpness) * r.uniform(0.5, 2, case.H) * signs
        x["sharpness"] = f32(np.broadcast_to(seen[None, :, None] * scale, (case.B, case.T, case.H)))
    if case.gates:
        drawn = -r.exponential(0.1, (case.B, keys, case.H))
        if case.gate_bias is not None:
            drawn = -np.logaddexp(0, -r.standard_normal((case.B, keys, case.H)) - case.gate_bias)
        if case.shut:
            drawn = np.where(r.random(drawn.shape) < 0.03, -(10.0 ** r.uniform(2, 9, drawn.shape)), drawn)
        x["log_gates"] = f32(drawn)
    other = dict(case.options)
    if case.packed:
        cuts = np.array([0, 60, 90, 140, 240, case.T])
        ids = np.repeat([[0, 1, 1, 2, -1], [3, -1, 0, 7, 7]], np.diff(cuts), axis=1)
        other["segment_ids"] = jnp.asarray(np.tile(ids, (case.B // 2, 1)), jnp.int32)
        for n in ("k", "v"):
            x[n] = jnp.where((other["segment_ids"] < 0)[:, :, None, None], jnp.nan, x[n])
    if case.documents:
        other["segment_ids"] = jnp.broadcast_to(jnp.arange(case.T, dtype=jnp.int32) // case.documents, (case.B, case.T))
    if case.positions:
        _place(case, r, x, other)
    dlse = f32(r.standard_normal((case.B, case.T, case.H)) * case.use_lse)
    return x, other, (normal(case.B, case.T, case.H, case.D), dlse)


def _place(case: Case, r: np.random.Generator, x: dict[str, Any], other: dict[str, Any]) -> None:
    """Explicit positions: of rows in permuted or sparse order, or of slots of a cache with padding and empty ends."""
    keys = case.S or case.T
    order = np.argsort(r.random((case.B, keys)), axis=1)
    if case.positions != "cache":
        places = order if case.positions == "permuted" else np.sort(r.integers(0, 10**6, (case.B, keys)), axis=1)
        for n in ("positions", "kv_positions"):
            other[n] = jnp.asarray(places, jnp.int32)
        return
    used = r.integers(keys // 4, keys - 3, case.B)
    slot = np.arange(keys)[None]
    ids = np.where((slot >= 3) & (slot < used[:, None]), 0, -1)  # three slots of padding on the left
    other["kv_positions"] = jnp.asarray(np.where(ids < 0, 0, slot - 3), jnp.int32)
    other["positions"] = jnp.asarray((used - 3 - case.T)[:, None] + np.arange(case.T), jnp.int32)
    other["segment_ids"] = (jnp.zeros((case.B, case.T), jnp.int32), jnp.asarray(ids, jnp.int32))
    for n in ("k", "v"):
        x[n] = jnp.where((ids < 0)[:, :, None, None], jnp.nan, x[n])


def shape_cases(dtype: str) -> list[Case]:
    """BAM with SSMax at every test shape of shapes.py."""
    name = lambda key: f"bam+ssmax, {key}"
    of = lambda key, s: Case(name(key), s.batch, s.length, s.heads, s.head_dim, "ggd", 1.0, S=s.kv_length,
                             Hkv=s.kv_heads, dtype=dtype)  # fmt: skip
    return [of(key, shape) for key, shape in TEST.items()]


def function(case: Case, other: dict[str, Any], implementation: str | None) -> Callable[[dict[str, Any]], Any]:
    """operands -> (o, lse)."""

    def call(x: dict[str, Any]) -> Any:
        prior = DistancePrior(x["params"], PARAMETERS[case.prior][0]) if case.prior else None
        rest = {n: x[n] for n in ("sharpness", "log_gates") if n in x}
        return attention(
            x["q"], x["k"], x["v"], prior=prior, implementation=implementation, return_lse=True, **rest, **other
        )

    return call
