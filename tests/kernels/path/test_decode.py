"""Prefill in chunks and decode token by token equal the whole row, eager or lazy, ragged rows included."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.call import DistancePrior
from kernels.path.decode import carry_keys, path_extend, sums_after
from kernels.path.lazy import Pending, lazy_token, no_pending
from kernels.path.shapes import Shape
from tests.helpers import relative_rms, x64
from tests.kernels.attention.support import PRIORS
from tests.kernels.path.support import Options, compiled, draw

BATCH, LENGTH, SLOTS = 2, 26, 30
SHAPE = Shape(BATCH, LENGTH, 4, 6, kv_heads=2)
FULL = Options("ggd", scale_gates=True)
TOKENS = ("q", "k", "v", "w", "beta", "log_gates", "sharpness")
Row = dict[str, Any]


@functools.cache
def extend(options: Options) -> Any:
    """path_extend over one fixed cache of SLOTS, which comes back with the new tokens in it."""

    @jax.jit
    def run(cache: Row, new: Row, params: Any, start: Any) -> tuple[Any, Row]:
        prior = DistancePrior(params, PRIORS[options.prior][0]) if options.prior else None
        o, past_k, k = path_extend(
            *(new[name] for name in TOKENS[:5]),
            past_k=cache["k"],
            past_v=cache["v"],
            past_log_gates=cache.get("log_gates"),
            past_positions=cache["positions"],
            past_segment_ids=cache["ids"],
            positions=new["positions"],
            segment_ids=new["ids"],
            log_gates=new.get("log_gates"),
            sharpness=new.get("sharpness"),
            prior=prior,
            scale_gates=options.scale_gates,
            sharpen_prior=options.sharpen_prior,
            scale=options.scale,
        )
        written = {"k": k} | {name: new[name] for name in cache if name != "k"}
        put = lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis=1)
        return o, {name: put(x if name != "k" else past_k, written[name]) for name, x in cache.items()}

    return run


def empty_cache(arrays: Row, slots: int = SLOTS) -> Row:
    """No token yet; what is in the slots must not matter."""
    wide = arrays["w"].dtype
    full = lambda *shape: jnp.full((BATCH, slots, *shape), np.nan, wide)
    heads = {"log_gates": full(4)} if "log_gates" in arrays else {}
    ids = jnp.full((BATCH, slots), -1, jnp.int32)
    return {"k": full(2, 6), "v": full(2, 6), "positions": jnp.zeros_like(ids), "ids": ids} | heads


def row_of(arrays: Row, ids: Any) -> Row:
    """Per-token arrays with positions that count the tokens that are no padding."""
    real = np.asarray(ids) >= 0
    positions = np.where(real, np.cumsum(real, axis=1) - 1, 0)
    tokens = {name: arrays[name] for name in TOKENS if name in arrays}
    return tokens | {"positions": jnp.asarray(positions, jnp.int32), "ids": jnp.asarray(ids, jnp.int32)}


def part(row: Row, start: int, end: int) -> Row:
    return {name: x[:, start:end] for name, x in row.items()}


def in_chunks(arrays: Row, ids: Any, options: Options, sizes: tuple[int, ...]) -> tuple[Any, Row]:
    row, cache, outs, start = row_of(arrays, ids), empty_cache(arrays), [], 0
    for size in sizes:
        o, cache = extend(options)(cache, part(row, start, start + size), arrays.get("params"), start)
        outs.append(o)
        start += size
    return jnp.concatenate(outs, axis=1), cache


ONE = np.zeros((BATCH, LENGTH), np.int32)
RAGGED = ONE.copy()
RAGGED[0, :5], RAGGED[1, 4:7], RAGGED[1, 13:16], RAGGED[1, 22:] = -1, -1, -1, -1  # left, inside, between chunks, right
CHUNKS = (13, 13)
STEPS = (13, *[1] * 13)


@pytest.mark.parametrize("ids", [ONE, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("sizes", [CHUNKS, STEPS], ids=["chunks", "steps"])
def test_pieces_equal_the_whole_row(ids: np.ndarray, sizes: tuple[int, ...]) -> None:
    with x64():
        arrays = draw(SHAPE, 0, prior="ggd")
        o, _ = in_chunks(arrays, ids, FULL, sizes)
        for b in range(BATCH):  # the same tokens without the padding between them
            real = ids[b] >= 0
            order = np.argsort(~real, kind="stable")
            alone = {name: x if name == "params" else x[:, order] for name, x in arrays.items()}
            last = jnp.asarray(np.where(np.arange(LENGTH) < real.sum(), 0, -1)[None].repeat(BATCH, 0))
            want, _ = compiled(FULL, "reference")(alone, last)
            np.testing.assert_allclose(o[b][real], want[b, : real.sum()], atol=1e-13)
            assert not np.asarray(o[b][~real]).any()


@pytest.mark.parametrize("name", ["bare", "outside"])
def test_pieces_equal_the_whole_row_with_other_options(name: str) -> None:
    options, kept = {
        "bare": (Options(), {"gates": False, "sharpness": False}),
        "outside": (Options("alibi", sharpen_prior=False, scale=0.3), {"prior": "alibi"}),
    }[name]
    with x64():
        arrays = draw(SHAPE, 1, **kept)
        o, _ = in_chunks(arrays, ONE, options, (13, 12, 1))
        np.testing.assert_allclose(o, compiled(options, "reference")(arrays, None)[0], atol=1e-13)


def test_cached_keys_are_those_of_a_linear_prefill() -> None:
    """Token by token, in chunks and `carry_keys` give the same keys, and all are H_last … H_{j+1} k_j."""
    with x64():
        arrays = draw(SHAPE, 2)
        k, w, beta = (np.asarray(arrays[name]) for name in ("k", "w", "beta"))
        want = np.zeros_like(k)
        for t in range(LENGTH):
            along = np.einsum("bshd,bhd->bsh", want, w[:, t]) * beta[:, t, None]
            want = want - along[..., None] * w[:, t, None]
            want[:, t] = k[:, t]
        at_once = jax.jit(carry_keys)(arrays["k"], arrays["w"], arrays["beta"])
        np.testing.assert_allclose(at_once, want, atol=1e-14 * 10)
        options = Options(scale_gates=True)
        for sizes in (CHUNKS, STEPS):
            np.testing.assert_allclose(in_chunks(arrays, ONE, options, sizes)[1]["k"][:, :LENGTH], want, atol=1e-13)


def test_carried_keys_ignore_padding() -> None:
    with x64():
        arrays = draw(SHAPE, 3)
        real = RAGGED >= 0
        poison = {name: arrays[name].at[~real].set(np.nan) for name in ("k", "w", "beta")}
        got = jax.jit(carry_keys)(poison["k"], poison["w"], poison["beta"], jnp.asarray(RAGGED))
        for b in range(BATCH):
            alone = carry_keys(*(arrays[name][b : b + 1, real[b]] for name in ("k", "w", "beta")))
            np.testing.assert_allclose(got[b][real[b]], alone[0], atol=1e-14 * 10)
            assert not np.asarray(got[b][~real[b]]).any()


def test_gate_sums_after_a_slot() -> None:
    gates = jnp.asarray(-np.random.default_rng(0).uniform(0, 1, (2, 5, 3)), jnp.float32)
    want = [gates[:, j + 1 :].sum(1) for j in range(5)]
    np.testing.assert_allclose(sums_after(gates), np.stack(want, 1), atol=1e-6)


def test_chunk_against_a_long_cache_takes_memory_of_its_size() -> None:
    """A chunk of 512 tokens against 64k slots: temporary memory is that of the cache, not of their product."""

    def run(cache: Row, new: Row) -> Any:
        return path_extend(
            *(new[name] for name in TOKENS[:5]),
            past_k=cache["k"],
            past_v=cache["v"],
            past_positions=cache["positions"],
            past_segment_ids=cache["ids"],
            positions=new["positions"],
            segment_ids=new["ids"],
        )

    def memory(slots: int) -> int:
        f32, i32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32), lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
        cache = {name: f32(1, slots, 2, 32) for name in "kv"} | {name: i32(1, slots) for name in ("positions", "ids")}
        new = {name: f32(1, 512, 2, 32) for name in ("q", "k", "v", "w")} | {"beta": f32(1, 512, 2)}
        new |= {name: i32(1, 512) for name in ("positions", "ids")}
        return jax.jit(run).lower(cache, new).compile().memory_analysis().temp_size_in_bytes

    assert memory(2**16) < 4 * (2 * 2**16 * 32 * 4)  # four times the cached keys; 512 × 2**16 scores would be 16 times


# ---- Lazy decode ----


@functools.cache
def lazy(options: Options, window: int) -> Any:
    """All tokens after a prefix by lazy steps in one scan -> (outputs, what is pending at the end)."""

    def step(params: Any, cache: Row, carry: tuple[Any, ...], new: Row) -> tuple[tuple[Any, ...], Any]:
        past_k, pending, start = carry
        o, past_k, pending = lazy_token(
            *(new[name] for name in TOKENS[:5]),
            pending=pending,
            past_k=past_k,
            past_v=cache["v"],
            past_positions=cache["positions"],
            past_segment_ids=jnp.where(jnp.arange(past_k.shape[1]) <= start, cache["ids"], -1),
            past_log_gates=cache.get("log_gates"),
            start=start,
            window=window,
            positions=new["positions"],
            segment_ids=new["ids"],
            log_gates=new.get("log_gates"),
            sharpness=new.get("sharpness"),
            prior=DistancePrior(params, PRIORS[options.prior][0]) if options.prior else None,
            scale_gates=options.scale_gates,
            sharpen_prior=options.sharpen_prior,
            scale=options.scale,
        )
        return (past_k, pending, start + 1), o

    @jax.jit
    def run(prefix: Row, rest: Row, params: Any) -> tuple[Any, Pending]:
        length = prefix["k"].shape[1]
        past_k = carry_keys(prefix["k"], prefix["w"], prefix["beta"], prefix["ids"])
        cache = {n: jnp.concatenate([prefix[n], rest[n]], 1) for n in rest if n not in ("q", "k", "w", "beta")}
        past_k = jnp.pad(past_k, ((0, 0), (0, rest["k"].shape[1]), (0, 0), (0, 0)))
        pending = no_pending(past_k.shape[0], past_k.shape[2], past_k.shape[3], length, past_k.dtype)
        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], rest)
        begin = (past_k, pending, jnp.int32(length))
        (_, pending, _), o = jax.lax.scan(functools.partial(step, params, cache), begin, tokens)
        return jnp.moveaxis(o[:, :, 0], 0, 1), pending

    return run


@pytest.mark.parametrize("ids", [ONE, RAGGED], ids=["even", "ragged"])
def test_lazy_decode_is_the_definition(ids: np.ndarray) -> None:
    """18 tokens with a window of 5: three folds and a window that is partly full, rows ragged."""
    with x64():
        arrays = draw(SHAPE, 4, prior="ggd")
        row = row_of(arrays, ids)
        o, pending = lazy(FULL, 5)(part(row, 0, 8), part(row, 8, LENGTH), arrays["params"])
        want, _ = in_chunks(arrays, ids, FULL, STEPS)
        np.testing.assert_allclose(o, want[:, 8:], atol=1e-13)
        assert int(pending.folded) == 8 + 15


def test_lazy_decode_over_hundreds_of_tokens_in_float32() -> None:
    """400 tokens in float32 against the definition in float64: no drift between the first and the last of them."""
    shape = Shape(1, 416, 2, 16, kv_heads=1)
    options = Options()
    arrays = draw(shape, 5, dtype=np.float32, beta=(1.5, 2.0), sharpness=False)
    row = row_of(arrays, np.zeros((1, 416), np.int32))
    o, _ = lazy(options, 32)(part(row, 0, 16), part(row, 16, 416), None)
    with x64():
        exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        want = np.asarray(compiled(options, "reference")(exact, None)[0])[:, 16:]
    assert relative_rms(o[:, :100], want[:, :100]) < 5e-6
    assert relative_rms(o[:, 300:], want[:, 300:]) < 5e-6


def test_lazy_decode_splits_a_long_cache_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 keys and 16-bit values through the split-K kernel of attention, interpreted: the numbers of "xla"."""
    from kernels.attention import triton_decode

    rng, slots, used = np.random.default_rng(0), 400, 350
    normal = lambda *shape, dtype=np.float32: jnp.asarray(rng.normal(size=shape), dtype)
    bf16 = jnp.bfloat16
    w = rng.normal(size=(BATCH, 1, 2, 16))
    w = jnp.asarray(w / np.linalg.norm(w, axis=-1, keepdims=True), np.float32)
    new = {n: normal(BATCH, 1, heads, 16, dtype=bf16) for n, heads in (("q", 4), ("k", 2), ("v", 2))}
    cache: Row = {"past_k": normal(BATCH, slots, 2, 16), "past_v": normal(BATCH, slots, 2, 16, dtype=bf16)}
    cache["past_log_gates"] = jnp.asarray(rng.uniform(-0.02, 0, (BATCH, slots, 4)), np.float32)
    cache["past_positions"] = jnp.broadcast_to(jnp.arange(slots), (BATCH, slots))
    ids = jnp.broadcast_to(jnp.where(jnp.arange(slots) <= used, 0, -1), (BATCH, slots)).at[1, :40].set(-1)
    options = {
        "positions": jnp.full((BATCH, 1), used),
        "segment_ids": jnp.zeros((BATCH, 1), jnp.int32),
        "past_segment_ids": ids,
        "log_gates": cache["past_log_gates"][:, used : used + 1],
        "sharpness": jnp.asarray(rng.uniform(0.5, 2, (BATCH, 1, 4)), np.float32),
        "prior": DistancePrior(jax.tree.map(np.float32, PRIORS["ggd"][1](rng, 4)), PRIORS["ggd"][0]),
        "pending": Pending(normal(BATCH, 2, 16, 16) / 4, jnp.int32(330)),
    }

    def step(implementation: str | None) -> Any:
        beta = jnp.full(w.shape[:3], 1.7)
        return lazy_token(
            *new.values(), w, beta, start=jnp.int32(used), **cache, **options, implementation=implementation
        )

    plan, called = triton_decode.make_plan, []
    monkeypatch.setattr(triton_decode, "make_plan", lambda call: called.append(0) or plan(call, interpret=True))
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        step("triton_decode")
    monkeypatch.setattr(triton_decode, "supports", lambda call: triton_decode.refusal(call, "9.0"))
    got, want = step("triton_decode"), step(None)
    assert len(called) == 1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-2)


@pytest.mark.slow
def test_lazy_decode_does_not_drift_over_4096_bfloat16_tokens() -> None:
    """bfloat16 queries, keys and values, beta from 1.9 to 2: the error of the last tokens is that of the first ones."""
    count = 4096
    shape, options = Shape(1, count + 16, 1, 16), Options()
    arrays = draw(shape, 6, dtype=np.float32, beta=(1.9, 2.0), sharpness=False, gates=False)
    arrays |= {n: arrays[n].astype(jnp.bfloat16) for n in "qkv"}
    row = row_of(arrays, np.zeros((1, count + 16), np.int32))
    o, _ = lazy(options, 32)(part(row, 0, 16), part(row, 16, count + 16), None)
    with x64():
        exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        want = np.asarray(compiled(options, "reference")(exact, None)[0])[:, 16:]
    first, last = relative_rms(o[:, :256], want[:, :256]), relative_rms(o[:, -256:], want[:, -256:])
    assert first < 2.5e-3  # what rounding the output to bfloat16 costs
    assert last < 2.5e-3


# ---- Errors ----


def arguments() -> tuple[Row, Row]:
    arrays = draw(SHAPE, 0, dtype=np.float32)
    row, cache = part(row_of(arrays, ONE), 0, 3), empty_cache(arrays)
    past = {name: cache[key] for name, key in PAST.items()}
    return {name: row[name] for name in TOKENS[:5]}, past | {
        "positions": row["positions"],
        "segment_ids": row["ids"],
        "log_gates": row["log_gates"],
    }


PAST = {
    "past_k": "k",
    "past_v": "v",
    "past_log_gates": "log_gates",
    "past_positions": "positions",
    "past_segment_ids": "ids",
}
ERRORS: dict[str, tuple[type[Exception], str, Any]] = {
    "half-precision cache": (
        TypeError,
        "past_k has dtype bfloat16",
        lambda a: {"past_k": a["past_k"].astype("bfloat16")},
    ),
    "keys of other heads": (
        ValueError,
        r"past_k has shape .* must be \[B=2, S, Hkv=2, D=6\]",
        lambda a: {"past_k": a["past_k"][:, :, :1]},
    ),
    "no slots": (ValueError, "S=0", lambda a: {name: a[name][:, :0] for name in PAST}),
    "values of other length": (ValueError, "past_v has shape", lambda a: {"past_v": a["past_v"][:, 1:]}),
    "gates of the cache missing": (
        ValueError,
        "log_gates is given and past_log_gates is None",
        lambda a: {"past_log_gates": None},
    ),
    "gates missing": (ValueError, "past_log_gates is given and log_gates is None", lambda a: {"log_gates": None}),
    "float positions": (
        TypeError,
        "positions has dtype float32",
        lambda a: {"positions": a["positions"].astype("float32")},
    ),
    "one row of ids": (ValueError, "segment_ids has shape", lambda a: {"segment_ids": a["segment_ids"][0]}),
    "sharpness of the cache": (ValueError, "sharpness has shape", lambda a: {"sharpness": jnp.ones((2, SLOTS, 4))}),
    "learned scale": (TypeError, "scale must be a Python float", lambda a: {"scale": "x"}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_path_extend(name: str) -> None:
    kind, words, change = ERRORS[name]
    tokens, options = arguments()
    with pytest.raises(kind, match=words):
        path_extend(*tokens.values(), **(options | change(options)))


LAZY_ERRORS: dict[str, tuple[type[Exception], str, Any]] = {
    "several tokens": (ValueError, "T=3 tokens, must be 1", lambda tokens, options: None),
    "no window": (ValueError, "window=0 must be at least 1", lambda tokens, options: options.update(window=0)),
    "gates missing": (ValueError, "log_gates is None", lambda tokens, options: options.update(log_gates=None)),
    "half-precision w": (
        TypeError,
        "w has dtype bfloat16",
        lambda tokens, options: tokens.update(w=tokens["w"].astype("bfloat16")),
    ),
}


@pytest.mark.parametrize("name", LAZY_ERRORS)
def test_errors_of_lazy_decode(name: str) -> None:
    kind, words, change = LAZY_ERRORS[name]
    tokens, options = arguments()
    count = 3 if name == "several tokens" else 1
    tokens = {n: x[:, :count] for n, x in tokens.items()}
    options |= {n: options[n][:, :count] for n in ("positions", "segment_ids", "log_gates")}
    past_k = options["past_k"]
    options["pending"] = no_pending(past_k.shape[0], past_k.shape[2], past_k.shape[3], 0)
    change(tokens, options)
    with pytest.raises(kind, match=words):
        lazy_token(*tokens.values(), start=jnp.int32(0), **options)
