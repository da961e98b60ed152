"""The Pallas-Triton backends: numbers in interpret mode, tile walks, refusals, lowering for CUDA."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from kernels import triton
from kernels.attention import api, bench_cases, bench_parts, masks, triton_decode, triton_gpu
from kernels.attention.bench_cases import Case, alibi, buckets, ggd, kerple
from kernels.attention.call import make_call
from kernels.triton import Chosen, Tiles

SMALL = Chosen(Tiles(64, 32), Tiles(32, 64), Tiles(64, 32))
CALLS = (
    Case("bam+ssmax, GQA, padding", 2, 304, 2, 16, "ggd", 1.0, Hkv=1, packed=True, dtype="float32"),
    Case("fox, outside sharpness, fewer queries", 1, 60, 2, 24, "alibi", -1.0, True, S=150, dtype="float32",
         options={"sharpen_prior": False}),
    Case("fox+kerple, permuted positions", 2, 70, 2, 16, "kerple", gates=True, positions="permuted", dtype="float32"),
    Case("not causal, window, documents", 1, 140, 2, 16, "buckets", documents=50, dtype="float32",
         options={"causal": False, "window": 30}),
    Case("sparse positions", 1, 60, 2, 16, "ggd", positions="sparse", dtype="float32"),
)  # fmt: skip
DECODE = (
    Case("one token, ragged cache", 2, 1, 4, 24, "ggd", 1.0, True, S=300, Hkv=2, positions="cache", dtype="float32"),
    Case("three tokens, window", 1, 3, 2, 16, "kerple", S=290, dtype="float32", options={"window": 100}),
    Case("table", 2, 2, 2, 16, "buckets", S=260, positions="cache", dtype="float32"),
)  # fmt: skip


def some_slow(cases: tuple[Case, ...], *words: str) -> list[Any]:
    """Those named by a word only run in the long suite."""
    return [pytest.param(c, marks=[pytest.mark.slow] * any(w in c.name for w in words)) for c in cases]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both backends run in interpret mode on this machine."""
    for module, run in (
        (triton_gpu, lambda call: triton_gpu._attend(triton_gpu.options_for(call, SMALL, interpret=True), call)),
        (triton_decode, lambda call: triton_decode._attend(triton_decode.Plan(3, interpret=True), call)),
    ):
        monkeypatch.setattr(module, "supports", lambda call, module=module: module.refusal(call, "9.0"))
        monkeypatch.setattr(module, "attend", run)


@pytest.mark.parametrize("case", some_slow(CALLS, "sparse", "documents"), ids=lambda c: c.name)
def test_agrees_with_the_reference(case: Case, interpreted: None) -> None:
    """Output, lse and every gradient against float64, NaN in unseen keys; the same bits twice."""
    result = bench_parts.check(case, "pallas_triton")
    assert result["passed"], result


@pytest.mark.parametrize("case", some_slow(DECODE, "window"), ids=lambda c: c.name)
def test_decode_agrees_with_the_reference(case: Case, interpreted: None) -> None:
    result = bench_parts.check(case, "triton_decode")
    assert result["passed"], result


def call(length: int = 8, keys: int | None = None, dim: int = 64, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
    empty: dict[str, Any] = dict.fromkeys(
        ("prior", "log_gates", "sharpness", "segment_ids", "positions", "kv_positions", "window", "scale")
    )
    q, k = jnp.zeros((2, length, 4, dim), dtype), jnp.zeros((2, keys or length, 2, dim), dtype)
    return make_call(q, k, k, **{**empty, "sharpen_prior": True, "causal": True, **options})


@pytest.mark.parametrize(
    ("module", "made", "device", "words"),
    [
        (triton_gpu, {"dim": 257}, "9.0", "head_dim 257"),
        (triton_gpu, {"dim": 256, "dtype": jnp.float32}, "8.6", None),
        (triton_gpu, {"positions": jnp.arange(8)}, "8.0", None),
        (triton_decode, {"length": 9, "keys": 999}, "9.0", "9 queries"),
        (triton_decode, {"length": 1, "keys": 255}, "9.0", "255 keys"),
        (triton_decode, {"length": 8, "keys": 256, "dtype": jnp.float16}, "8.0", None),
    ],
)
def test_refusals_name_the_reason(module: Any, made: dict[str, Any], device: str, words: str | None) -> None:
    reason = module.refusal(call(**made), device)
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_tiles_that_need_too_much_shared_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    big = Tiles(128, 128, 8, 4)
    monkeypatch.setattr(triton_gpu, "choose_tiles", lambda dim, size, room: SMALL._replace(keys=big))
    reason = triton_gpu.refusal(call(dim=128), "9.0")
    assert reason is not None
    assert "keys" in reason
    assert str(big.shared_memory(128, 2)) in reason


@pytest.mark.parametrize("device", [*triton.SHARED_MEMORY, "99.9"])
def test_every_head_and_dtype_fits_every_gpu(device: str) -> None:
    for dim in (16, 32, 48, 64, 80, 96, 128, 256):
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            assert triton_gpu.refusal(call(dim=dim, dtype=dtype), device) is None


def test_tiles_shrink_no_more_than_they_must() -> None:
    tiles = Tiles(64, 64, 4, 2)
    assert tiles.fitted(128, 2, 227 * 1024) == tiles
    assert tiles.fitted(128, 2, 99 * 1024) == Tiles(64, 64, 4, 1)
    assert tiles.fitted(128, 2, 40 * 1024) == Tiles(32, 16, 4, 1)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
@pytest.mark.parametrize("name", ["pallas_triton", "triton_decode"])
def test_named_without_a_gpu_raises(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*needs an NVIDIA GPU of compute capability 8.0"):
        api.choose(call(1, 300), name)


def test_on_a_gpu_no_feature_falls_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the Mosaic kernels refuse, and machines that they refuse, are served by these."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(triton, "capability", lambda: "8.0")
    for made in ({}, {"dtype": jnp.float32}, {"dim": 256}, {"positions": jnp.arange(8)}, {"window": 3}):
        assert api.choose(call(**made)) == "pallas_triton"
    assert api.choose(call(1, 4096)) == "triton_decode"


def test_tables_of_tiles_can_be_read() -> None:
    for size, rows in triton_gpu._tile_table().items():
        for dim, kernels in rows.items():
            room = triton.room_on("9.0")  # where they were measured
            assert [str(t) for t in triton_gpu.choose_tiles(int(dim), int(size), room)] == list(kernels.values())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_walks_cover_what_is_visible_and_mask_what_is_not(data: st.DataObject) -> None:
    """Random positions and segments: nothing visible is skipped, and what is not masked is wholly visible."""
    r = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    queries, keys, causal = 8 * data.draw(st.integers(1, 4)), 4 * data.draw(st.integers(1, 8)), data.draw(st.booleans())
    window = data.draw(st.sampled_from([None, 1, 5]))
    if data.draw(st.booleans()):
        q_pos, k_pos = (np.sort(r.integers(0, 20, (2, n))) for n in (queries, keys))
    else:
        q_pos, k_pos = (r.integers(0, 20, (2, n)) for n in (queries, keys))
    q_ids, k_ids = (np.sort(r.integers(-1, 3, (2, n))) for n in (queries, keys))
    real = np.arange(keys)[None] < keys - data.draw(st.integers(0, 3))
    line = lambda x, axis: jnp.expand_dims(jnp.asarray(x), axis)
    visible = masks.visible(
        line(q_pos, 2), line(k_pos, 1), line(q_ids, 2), line(k_ids, 1), causal=causal, window=window
    )
    seen = np.asarray(visible) & real[:, None]
    for blocks_are_queries, block, step in ((True, 8, 4), (False, 4, 8)):
        sizes = (block, step) if blocks_are_queries else (step, block)
        q_ends = triton_gpu.extents(np, q_pos, q_ids, np.ones_like(q_pos, bool), sizes[0])
        k_ends = triton_gpu.extents(np, k_pos, k_ids, real, sizes[1])
        bounds = triton_gpu.walks(np, q_ends, k_ends, causal, window, blocks_are_queries)
        tiles = seen if blocks_are_queries else seen.swapaxes(1, 2)
        for row, of_row in enumerate(bounds):
            for n, (low, whole, whole_end, high) in enumerate(of_row):
                part = tiles[row, n * block : (n + 1) * block]
                assert 0 <= low <= whole <= whole_end
                assert whole_end <= max(high, whole)
                assert not part[:, : low * step].any()
                assert not part[:, high * step :].any()
                assert part[:, whole * step : whole_end * step].all()


def test_sums_that_are_given_have_no_low_parts_to_read() -> None:
    gates = jnp.zeros((2, 300, 4))
    assert "k_gate_lo" in triton_decode._operands(call(1, 300, log_gates=gates))
    given = triton_decode._operands(call(1, 300, log_gates=(gates[:, :1], gates)))
    assert "k_gate_hi" in given
    assert "k_gate_lo" not in given


def test_priors_that_can_be_traced_into_a_kernel() -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    assert triton_decode.is_arithmetic(ggd, {"alpha": scalar, "beta": scalar})
    assert triton_decode.is_arithmetic(alibi, {"slope": scalar})
    assert triton_decode.is_arithmetic(kerple, {"r1": scalar, "r2": scalar})
    assert not triton_decode.is_arithmetic(buckets, {"table": jax.ShapeDtypeStruct((12,), jnp.float32)})
    constant = np.arange(5, dtype=np.float32)
    assert not triton_decode.is_arithmetic(lambda p, d: p * jnp.asarray(constant)[jnp.clip(d, 0, 4)], scalar)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("case", "name", "kernels"),
    [
        (bench_cases.PORTABLE_CHECKS[1], "pallas_triton", 3),
        (bench_cases.DECODE_CHECKS[2], "triton_decode", 5),
    ],
)
def test_lowers_for_cuda_without_a_gpu(case: Case, name: str, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (triton_gpu, triton_decode):
        monkeypatch.setattr(module, "supports", lambda call, module=module: module.refusal(call, "9.0"))
    case = replace(case, H=4, B=2)
    x, other, cotangents = bench_cases.inputs(case)
    run = jax.jit(bench_parts.with_gradients(bench_cases.function(case, other, name)))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        allowed = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        exported = jax.export.export(run, platforms=["cuda"], disabled_checks=allowed)(x, cotangents)
    assert exported.mlir_module().count("__gpu$xla.gpu.triton") >= kernels
