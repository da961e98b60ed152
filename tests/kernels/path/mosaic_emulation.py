"""The three Mosaic GPU attention kernels, as `gpu_levels.py` calls them, in plain JAX: one product per child.

They follow the kernels' contract (base-2 log-sum-exp, tables in units of the scale, padded lines), not their code.
"""

from typing import Any

import jax.numpy as jnp
import pytest

from kernels.attention import mosaic_gpu_fused
from kernels.attention.mosaic_gpu_spec import LOG2E
from kernels.path import gpu_levels

Arrays = dict[str, Any]


def per_query_head(spec: Any, x: Any) -> Any:
    return jnp.repeat(x.astype(jnp.float32), spec.group, axis=2)


def tile(spec: Any, arrays: Arrays, a: int) -> tuple[Any, Any, Any]:
    """(logits over factor, base-2 logits, factor) between the queries of child a and the keys before, [N, H, S, aS]."""
    size = spec.level.size
    rows, first = slice(a * size, (a + 1) * size), a * (a - 1) // 2 * size
    k = per_query_head(spec, arrays["k"][:, first : first + a * size])
    raw = jnp.einsum("bthd,bshd->bhts", arrays["q"][:, rows].astype(jnp.float32), k)
    bias: Any = 0.0
    if spec.prior:
        distance = jnp.arange(a * size, (a + 1) * size)[:, None] - jnp.arange(a * size)[None, :]
        bias = arrays["table"][0][:, spec.origin + spec.shift + distance][None]
    if spec.gates:
        for part in ("hi", "lo"):
            queries, keys = arrays[f"q_gate_{part}"][:, :, rows, None], arrays[f"k_gate_{part}"][:, :, None, : a * size]
            bias = bias + (queries - keys) / spec.scale
    if "gain" in arrays:
        bias = bias * arrays["gain"][:, :, rows, None]
    factor = arrays["factor"][:, :, rows, None] if spec.sharpness else jnp.full((1, 1, 1, 1), spec.scale * LOG2E)
    z = (raw + bias) * factor
    if spec.segments:
        same = arrays["q_segments"][:, rows, None] == arrays["kv_segments"][:, None, : a * size]
        z = jnp.where(same[:, None], z, -jnp.inf)
    return raw + bias, z, factor


def padded(lines: list[Any], length: int) -> Any:
    joined = jnp.concatenate(lines, -1)
    return jnp.pad(joined, [(0, 0)] * (joined.ndim - 1) + [(0, length - joined.shape[-1])])


def forward(spec: Any, tiles: Any, arrays: Arrays) -> tuple[Any, Any]:
    batch, size = spec.batch, spec.level.size
    o = [jnp.zeros((batch, size, spec.heads, spec.head_dim))]
    lse = [jnp.full((batch, spec.heads, size), -jnp.inf)]
    for a in range(1, spec.level.radix):
        _, z, _ = tile(spec, arrays, a)
        top = jnp.where(z.max(-1) == -jnp.inf, 0, z.max(-1))
        p = jnp.exp2(z - top[..., None])
        total = jnp.where(p.sum(-1) > 0, p.sum(-1), 1)
        v = per_query_head(spec, arrays["v"][:, : a * size])
        o.append(jnp.einsum("bhts,bshd->bthd", p / total[..., None], v))
        lse.append(jnp.where(p.sum(-1) > 0, top + jnp.log2(total), -jnp.inf))
    joined = merged(arrays, jnp.concatenate(o, 1), padded(lse, spec.padded_queries))
    return joined[0].astype(spec.dtype), joined[1]


def merged(arrays: Arrays, o: Any, lse: Any) -> tuple[Any, Any]:
    """With the keys before: o [N, T, H, D], base-2 lse [N, H, padded T]."""
    before = arrays["lse_before"]
    total = jnp.logaddexp2(lse, before)
    weight = lambda x: jnp.where(x == -jnp.inf, 0, jnp.exp2(x - total))[:, :, : o.shape[1]].swapaxes(1, 2)[..., None]
    return weight(lse) * o + weight(before) * arrays["o_before"].astype(jnp.float32), total


def gradients(spec: Any, arrays: Arrays, a: int) -> tuple[Any, Any, Any, Any]:
    """(logits over factor, p, d(logits), factor), delta not yet times the factor."""
    size = spec.level.size
    rows = slice(a * size, (a + 1) * size)
    raw, z, factor = tile(spec, arrays, a)
    p = jnp.exp2(z - arrays["lse"][:, :, rows, None])
    v = per_query_head(spec, arrays["v"][:, : a * size])
    dp = jnp.einsum("bthd,bshd->bhts", arrays["do"][:, rows].astype(jnp.float32), v)
    return raw, p, dp, factor


def query_gradients(spec: Any, tiles: Any, arrays: Arrays) -> Arrays:
    size, line = spec.level.size, jnp.zeros((spec.batch, spec.heads, spec.level.size))
    dq = [jnp.zeros((spec.batch, size, spec.heads, spec.head_dim))]
    lines: dict[str, list[Any]] = {n: [line] for n in ("sharpness", "rows", "prior")}
    lines["slopes"] = [jnp.zeros((spec.batch, spec.heads, spec.slopes, size))]
    for a in range(1, spec.level.radix):
        rows = slice(a * size, (a + 1) * size)
        raw, p, dp, factor = gradients(spec, arrays, a)
        ds = p * (dp - arrays["delta"][:, :, rows, None]) * (factor if spec.folded else 1)
        k = per_query_head(spec, arrays["k"][:, a * (a - 1) // 2 * size :][:, : a * size])
        part = jnp.einsum("bhts,bshd->bthd", ds, k)
        content = jnp.einsum("bthd,bthd->bht", arrays["q"][:, rows].astype(jnp.float32), part)
        whole = (ds * raw).sum(-1) if spec.folded and spec.offsets else content
        unfold = factor[..., 0] if spec.folded else 1
        lines["sharpness"].append(whole / unfold)
        lines["rows"].append(ds.sum(-1) / unfold)
        lines["prior"].append(whole - content)
        distance = jnp.arange(a * size, (a + 1) * size)[:, None] - jnp.arange(a * size)[None, :]
        slopes = [(ds * arrays["slopes"][n, 0][:, spec.origin + distance][None]).sum(-1) for n in range(spec.slopes)]
        lines["slopes"].append(jnp.stack(slopes, 2) if slopes else lines["slopes"][0])
        outside = spec.sharpness and not spec.folded
        scale = factor.swapaxes(1, 2) / LOG2E if outside else 1 / LOG2E if spec.folded else spec.scale
        dq.append(part * scale)
    out = {n: padded(parts, spec.padded_queries) for n, parts in lines.items()}
    return out | {"dq": jnp.concatenate(dq, 1).astype(spec.dtype)}


def key_gradients(spec: Any, tiles: Any, arrays: Arrays) -> Arrays:
    size = spec.level.size
    dk, dv, gates = [], [], []
    for a in range(1, spec.level.radix):
        rows = slice(a * size, (a + 1) * size)
        _, p, dp, factor = gradients(spec, arrays, a)
        ds = p * (dp * (factor if spec.sharpness else 1) - arrays["delta"][:, :, rows, None])
        q, do = (arrays[n][:, rows].astype(jnp.float32) for n in ("q", "do"))
        grouped = lambda x, a=a: x.reshape(spec.batch, a * size, spec.kv_heads, spec.group, -1).sum(3)
        dk.append(grouped(jnp.einsum("bhts,bthd->bshd", ds, q)) * (1 / LOG2E if spec.sharpness else spec.scale))
        dv.append(grouped(jnp.einsum("bhts,bthd->bshd", p, do)))
        gates.append((ds * arrays["gain"][:, :, rows, None] if "gain" in arrays else ds).sum(2))
    out = {n: jnp.concatenate(x, 1).astype(spec.dtype) for n, x in (("dk", dk), ("dv", dv))}
    return out | {"gates": padded(gates, spec.padded_stored)}


def install(patch: pytest.MonkeyPatch) -> None:
    """Put these in the place of the kernels."""
    patch.setattr(gpu_levels, "forward", forward)
    patch.setattr(mosaic_gpu_fused, "query_gradients", query_gradients)
    patch.setattr(mosaic_gpu_fused, "key_gradients", key_gradients)
