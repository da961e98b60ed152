"""A softmax that goes on from other keys (`o_before`, `lse_before` of the Mosaic GPU forward kernel), on CPU
(emulation.py) against the dense softmax over all keys in float64: outputs, and the gradients of what came later, which
the backward kernels give for the log-sum-exp of the whole row. As for one row, and as PaTH's levels call it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.api import attention
from tests.helpers import relative_rms, x64
from tests.kernels.attention.support import PRIORS

NEW_JAX = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need jax >= 0.11.2")
LOG2E = math.log2(math.e)
BEFORE = 37  # keys of the part before
HEADS = 2
DIMS = (64, 40)  # of a head: as wide as a tile, and narrower
TILES = "1x64x8"
LIMITS: dict[str, float] = {"params": 4e-2, "sharpness": 1e-2, "rows": 1e-2, "columns": 1e-2}
Arrays = dict[str, Any]


def softmax(z: Any, v: Any) -> tuple[Any, Any]:
    """(o [B, T, H, D], lse [B, T, H]) of logits [B, H, T, S] and values [B, S, H, D]; 0 and −inf of a row without."""
    top = jax.lax.stop_gradient(z.max(-1, keepdims=True))
    p = jnp.exp(z - jnp.where(top == -jnp.inf, 0, top))
    total, seen = p.sum(-1, keepdims=True), (top > -jnp.inf)
    o = jnp.einsum("bhts,bshd->bthd", p / jnp.where(seen, total, 1), v)
    lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1)), -jnp.inf)
    return o, lse[..., 0].swapaxes(1, 2)


def earlier(rng: np.random.Generator, length: int, dim: int) -> tuple[Any, Any]:
    """Logits [1, H, T, BEFORE] and values of the part before: of very different weight from row to row, in every sixth
    row nothing."""
    z = rng.normal(size=(1, HEADS, length, BEFORE)) + rng.uniform(-12, 12, (1, HEADS, length, 1))
    z[:, :, ::6] = -np.inf
    return z, rng.normal(size=(1, BEFORE, HEADS, dim))


def joined(before: tuple[Any, Any], z: Any, v: Any) -> tuple[Any, Any]:
    """`softmax` over the keys before and those with logits z [B, H, T, S] and values v [B, S, 1, D] of all heads."""
    values = jnp.concatenate([jnp.asarray(before[1]), jnp.repeat(v, HEADS, 2)], 1)
    return softmax(jnp.concatenate([jnp.asarray(before[0]), z], -1), values)


def heads_first(x: Any) -> Any:
    """[B, T, H] -> [B, H, T, 1]."""
    return x.swapaxes(1, 2)[..., None]


def errors(got: Any, want: Any) -> dict[str, float]:
    """Relative RMS errors of two trees; −inf in the same places is no error."""
    found = {}
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        found[jax.tree_util.keystr(path)] = relative_rms(*(np.where(np.isneginf(y), 0, y) for y in (a, b)))
    return found


def oracle(exact: Any, x: Arrays, before: Any, cotangents: Any) -> Any:
    """((o, lse) of the part before alone, (o, lse, gradients of x) of all) in float64. exact: x to (o, lse) of all."""

    @jax.jit
    def run(x: Arrays, before: Any, cotangents: Any) -> Any:
        (o, lse), vjp = jax.vjp(exact, x)
        return softmax(*before), (o, lse, vjp(cotangents)[0])

    with x64():
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (x, before, cotangents))
        return jax.device_get(run(*wide))


def go_on_from(patch: pytest.MonkeyPatch, o: Any, lse: Any) -> None:
    """Let attention's forward kernel go on from o [B, T, H, D] and the natural lse [B, T, H]."""
    from kernels.attention import mosaic_gpu_fused
    from kernels.attention.mosaic_gpu_forward import forward

    def run(spec: Any, tiles: Any, arrays: Arrays) -> Any:
        base2 = mosaic_gpu_fused.lines(jnp.asarray(lse * LOG2E, jnp.float32), spec.padded_queries, -jnp.inf)
        return forward(spec, tiles, arrays | {"o_before": jnp.asarray(o, spec.dtype), "lse_before": base2})

    patch.setattr(mosaic_gpu_fused, "forward", run)


def row_errors(patch: pytest.MonkeyPatch, seed: int, dim: int = 64) -> dict[str, float]:
    """Of 256 queries at the end of 299 keys in a window of 99, with grouped heads and a sharpness, which is negative in
    some rows; after BEFORE other keys."""
    from tests.kernels.attention import emulation

    emulation.install(patch, ("2x64x8", TILES, TILES))
    rng, length, size = np.random.default_rng(seed), 256, 299
    normal = lambda n, heads: jnp.asarray(rng.normal(size=(1, n, heads, dim)), jnp.float16)
    x: Arrays = {"q": normal(length, HEADS), "k": normal(size, 1), "v": normal(size, 1)}
    x |= {"sharpness": jnp.asarray(rng.uniform(-0.5, 2, (1, length, HEADS)), jnp.float32)}
    before = earlier(rng, length, dim)
    cotangents = rng.normal(size=(1, length, HEADS, dim)), rng.normal(size=(1, length, HEADS))

    def going_on(x: Arrays) -> Any:
        return attention(**x, window=99, return_lse=True, implementation="mosaic_gpu")

    ahead = (np.arange(size - length, size)[:, None] - np.arange(size))[None, None]

    def exact(x: Arrays) -> Any:
        z = jnp.einsum("bthd,bsd->bhts", x["q"], x["k"][:, :, 0]) / math.sqrt(dim)
        seen = (ahead >= 0) & (ahead < 99)
        return joined(before, jnp.where(seen, z * heads_first(x["sharpness"]), -jnp.inf), x["v"])

    part, want = oracle(exact, x, before, cotangents)
    go_on_from(patch, *part)
    with jax.disable_jit():
        (o, lse), vjp = jax.vjp(going_on, x)
        got = (o, lse, vjp(tuple(jnp.asarray(c, a.dtype) for c, a in zip(cotangents, (o, lse), strict=True)))[0])
    return errors(got, want)


def level_errors(patch: pytest.MonkeyPatch, seed: int, dim: int = 64) -> dict[str, float]:
    """Of a level of PaTH: three children of 64 tokens, whose keys stand there once per pair, after BEFORE other keys;
    with prior, gates, sharpness, documents and padding. Gates have gradients by rows and by columns there."""
    from kernels.attention.mosaic_gpu_fused import Options
    from kernels.attention.mosaic_gpu_spec import Tiles
    from kernels.path import gpu_levels
    from kernels.path.levels import Level
    from tests.kernels.attention import emulation

    emulation.install(patch, (TILES,) * 3)
    rng, level = np.random.default_rng(seed), Level(3, 64)
    n, tiles = level.parent, Tiles.parse(TILES)
    normal = lambda n, heads: jnp.asarray(rng.normal(size=(1, n, heads, dim)), jnp.float16)
    q, keys, v = normal(n, HEADS), normal(level.stored, 1), normal(n, 1)
    gates = jnp.asarray(np.cumsum(-np.exp(rng.uniform(-5, 0, (1, n, HEADS))), 1), jnp.float32)
    sharpness = jnp.asarray(rng.uniform(0.2, 2, (1, n, HEADS)), jnp.float32)
    params = jnp.asarray(PRIORS["alibi"][1](rng, HEADS), jnp.float32)
    ids = (np.arange(n)[None] >= rng.integers(75, 120)).astype(int)  # no border between children
    ids[:, -9:] = -1
    before = earlier(rng, n, dim)
    do, dlse = rng.normal(size=(1, n, HEADS, dim)), rng.normal(size=(1, n, HEADS))

    pairs = [(a, c) for a in range(level.radix) for c in range(a)]
    token = np.concatenate([c * level.size + np.arange(level.size) for _, c in pairs])  # of every stored key
    reader = np.repeat([a for a, _ in pairs], level.size)  # the child whose queries see it
    mine, index = ids[0][:, None], np.arange(n)[:, None]
    seen = ((index // level.size == reader) & (mine == ids[0][token]) & (mine >= 0))[None, None]

    def exact(x: Arrays) -> Any:
        z = jnp.einsum("bthd,bsd->bhts", x["q"], x["keys"][:, :, 0]) / math.sqrt(dim)
        z = z - heads_first(x["params"]) * (index - token)[None, None]
        z = z + heads_first(gates) + heads_first(x["columns"])[:, :, token].swapaxes(2, 3)
        z = z * heads_first(x["sharpness"]) + heads_first(x["rows"])
        return joined(before, jnp.where(seen, z, -jnp.inf), x["v"])

    each = jnp.broadcast_to(params, gates.shape)  # of every query
    x = {"q": q, "keys": keys, "v": v[:, token], "params": each, "sharpness": sharpness}
    part, (*outputs, gradients) = oracle(exact, x | {"columns": -gates, "rows": 0 * gates}, before, (do, dlse))
    terms = gradients.pop("params")[0]

    leaves: Arrays = {"v": v, "params": params, "sharpness": sharpness, "segments": jnp.asarray(ids)}
    leaves["gates"] = (gates, jnp.zeros_like(gates)) * 2
    options = Options(PRIORS["alibi"][0], 1 / math.sqrt(dim), True, None, True, (0, 0), (tiles,) * 3)
    earlier_part = jnp.asarray(part[0], jnp.float16), jnp.asarray(part[1], jnp.float32)
    with jax.disable_jit():
        o, lse = gpu_levels.level_forward(options, leaves, level, q, keys, earlier_part)
        whole = jnp.where(lse == -jnp.inf, jnp.inf, lse)
        state = gpu_levels.recompute(options, leaves, level, q, keys, jnp.asarray(do, jnp.float16), whole)
        delta = (o.astype(jnp.float32) * do).sum(-1) - jnp.asarray(dlse, jnp.float32)
        got = gpu_levels.query_side(state, delta) | gpu_levels.key_side(state, delta)
    got["q"] = got.pop("dq")
    away = np.abs(np.asarray(got.pop("params"), np.float64) - terms.sum(0))
    size = np.sqrt((terms**2).sum(0))  # of a sum whose terms have any sign; it may be 0 itself
    return errors((o, lse, got), (*outputs, gradients)) | {"params": float((away / size).max())}


def excess(found: dict[str, float]) -> dict[str, float]:
    """What is above its limit. Sums of what was rounded to float16, and nearly cancels, have wider ones."""
    limit = lambda name: LIMITS.get(name.split("'")[1] if "'" in name else name, 3e-3)
    return {name: error for name, error in found.items() if not error < limit(name)}


@NEW_JAX
@pytest.mark.parametrize("dim", DIMS)
def test_a_row_goes_on_from_other_keys(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert excess(row_errors(monkeypatch, 0, dim)) == {}


@NEW_JAX
@pytest.mark.parametrize("dim", DIMS)
def test_a_level_goes_on_from_other_keys(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert excess(level_errors(monkeypatch, 0, dim)) == {}


@NEW_JAX
def test_what_a_softmax_cannot_go_on_from_is_refused() -> None:
    from kernels.attention.mosaic_gpu_forward import forward
    from kernels.attention.mosaic_gpu_fused import Options, make_spec
    from kernels.attention.mosaic_gpu_spec import Tiles

    x = {n: jnp.zeros((1, 200, 1, 64), jnp.float16) for n in "qkv"}
    tiles, none = Tiles.parse("2x128x2"), dict.fromkeys(("params", "sharpness", "gates", "q_segments", "kv_segments"))
    spec = make_spec(Options(None, 1.0, True, None, True, (200, 200), (tiles,) * 3), x | none)
    before = {"o_before": x["q"], "lse_before": jnp.zeros((1, 1, spec.padded_queries))}
    with pytest.raises(ValueError, match="of 200 queries: a multiple of 128 is needed, the rows of tiles 2x128x2"):
        forward(spec, tiles, x | before)
    for name in before:
        with pytest.raises(ValueError, match="o_before and lse_before must be given together"):
            forward(spec, tiles, x | {name: before[name]})
