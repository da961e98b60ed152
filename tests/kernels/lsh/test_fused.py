"""The fused backends: numbers in interpret mode against the dense definition, refusals, lowering for CUDA and TPUs."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from kernels.lsh import aot, api, gpu, reference, tpu
from kernels.lsh.bench import DOCS, merged
from kernels.lsh.bench_tables import MARK, committed, times
from kernels.lsh.call import Call, make_call
from kernels.triton import Chosen, Tiles
from tests.helpers import relative_rms
from tests.kernels.lsh.test_attention import Arrays, draw, grids, packed

TILES = Chosen(Tiles(64, 32), Tiles(32, 64), Tiles(32, 32))
LIMITS = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}


def call_of(
    arrays: Arrays, seed: int, samples: int = 3, law: Any = "integer", segments: bool = False, causal: bool = True
) -> Call:
    widths, offsets = grids(seed, samples=samples, law=law)
    ids = packed(seed, arrays["q"].shape[1]) if segments else None
    return make_call(**arrays, widths=widths, offsets=offsets, segment_ids=ids, causal=causal, scale=None)


def on_gpu(call: Call) -> Any:
    return gpu.attend(call, "shared", gpu.Options(TILES, interpret=True))


def on_tpu(call: Call) -> Any:
    return tpu._attend(tpu.make_spec(call, 128), call)


def compare(run: Callable[[Call], Any], call: Call) -> None:
    """Outputs, lse and every gradient, with cotangents of both outputs; the oracle in float32."""
    rng = np.random.default_rng(0)
    wo, wl = (jnp.asarray(rng.normal(size=call.q.shape[:n]), jnp.float32) for n in (4, 3))

    def value(call: Call, run: Callable[[Call], Any]) -> Any:
        o, lse = run(call)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(o.astype(jnp.float32) * wo) + jnp.sum(finite * wl), {
            "o": o,
            "lse": finite,
            "seen": lse == finite,
        }

    both = lambda run, call: jax.value_and_grad(lambda c: value(c, run), has_aux=True, allow_int=True)(call)
    wide = replace(call, **{n: getattr(call, n).astype(jnp.float32) for n in "qkv"})
    (_, got), dgot = both(run, call)
    (_, want), dwant = both(lambda c: reference.attend(c, "shared"), wide)
    limit = LIMITS[str(call.q.dtype)]
    np.testing.assert_array_equal(got["seen"], want["seen"])
    for name in ("o", "lse"):
        assert relative_rms(got[name].astype(jnp.float32), want[name]) < limit, name
    for name in "qkv":
        g = getattr(dgot, name)
        assert g.dtype == call.q.dtype
        assert relative_rms(g.astype(jnp.float32), getattr(dwant, name)) < 2 * limit, name


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"segments": True}, "float32"),
        ({"law": "continuous", "causal": False, "segments": True}, "float32"),
        pytest.param({"samples": 40}, "float32", marks=pytest.mark.slow),
        pytest.param({"causal": False}, "float32", marks=pytest.mark.slow),
        pytest.param({}, "bfloat16", marks=pytest.mark.slow),
        pytest.param({"segments": True}, "float16", marks=pytest.mark.slow),
    ],
)
def test_gpu_kernels_are_the_definition(options: Arrays, dtype: str) -> None:
    """Several tiles, an odd length, grouped heads, head_dim that is padded."""
    arrays = {n: x.astype(dtype) for n, x in draw(1, length=150, dim=24).items()}
    compare(on_gpu, call_of(arrays, 1, **options))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"segments": True}, "float32"),
        pytest.param({"samples": 40, "law": "continuous"}, "float32", marks=pytest.mark.slow),
        pytest.param({}, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_tpu_kernels_are_the_definition(options: Arrays, dtype: str) -> None:
    arrays = {n: x.astype(dtype) for n, x in draw(2, length=150, dim=24).items()}
    compare(on_tpu, call_of(arrays, 2, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [lambda c: gpu.attend(c, "mean", gpu.Options(TILES, interpret=True)), lambda c: tpu.attend(c, "mean")]
)
def test_mean_of_outputs(run: Any) -> None:
    call = call_of(draw(3, length=90), 3, samples=2, segments=True)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=call.q.shape), jnp.float32)
    both = lambda run: jax.value_and_grad(lambda c: jnp.sum(run(c)[0] * weights), allow_int=True)(call)
    (got, dgot), (want, dwant) = both(run), both(lambda c: reference.attend(c, "mean"))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for name in "qkv":
        assert relative_rms(getattr(dgot, name), getattr(dwant, name)) < 2e-6, name


@pytest.mark.slow
def test_padding_never_leaks() -> None:
    """NaN in padding, documents alone are the same, gradients of padding are exactly 0."""
    arrays = draw(4, length=140, batch=1)
    ids = jnp.asarray([[-1] * 9 + [0] * 61 + [1] * 60 + [-1] * 10])
    poisoned = {n: jnp.where((ids < 0)[:, :, None, None], jnp.nan, x) for n, x in arrays.items()}
    widths, offsets = grids(4)
    made = lambda a, ids: make_call(**a, widths=widths, offsets=offsets, segment_ids=ids, causal=True, scale=None)
    for run in (on_gpu, on_tpu):
        got, pull = jax.vjp(lambda c, run=run: run(c)[0], made(poisoned, ids))
        alone = run(made({n: x[:, 9:70] for n, x in arrays.items()}, None))[0]
        np.testing.assert_allclose(got[:, 9:70], alone, atol=1e-6)
        np.testing.assert_array_equal(got[:, :9], 0)
        (grads,) = pull(jnp.ones_like(got))
        for name in "qkv":
            assert bool(jnp.isfinite(getattr(grads, name)).all())
            np.testing.assert_array_equal(getattr(grads, name)[:, :9], 0)


# ---- Which calls are served ----


@pytest.mark.parametrize(
    ("module", "changes", "words"),
    [
        (gpu, {"dim": 257}, "head_dim 257 is more than 256"),
        (gpu, {"dim": 256}, None),
        (tpu, {"dim": 257}, "head_dim 257 is over 256"),
        (tpu, {"causal": False}, "the kernels are causal"),
        (tpu, {"dtype": jnp.float16}, "float16 is neither bfloat16 nor float32"),
    ],
)
def test_refusals_name_the_reason(module: Any, changes: Arrays, words: str | None) -> None:
    options = {"dim": 16, "dtype": jnp.float32, "causal": True} | changes
    arrays = {n: x.astype(options["dtype"]) for n, x in draw(0, length=8, dim=options["dim"]).items()}
    call = call_of(arrays, 0, causal=options["causal"])
    reason = gpu.refusal(call, "9.0") if module is gpu else tpu.supports(call, "shared")
    assert (reason is None) if words is None else (reason is not None and words in reason)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
def test_named_without_a_gpu_raises() -> None:
    with pytest.raises(ValueError, match=r"pallas_triton.*needs an NVIDIA GPU of compute capability 8\.0"):
        api.choose(call_of(draw(0), 0), "shared", "pallas_triton")


def test_every_head_and_dtype_fits_every_gpu() -> None:
    for dim in (16, 64, 80, 128, 256):
        for dtype in (jnp.bfloat16, jnp.float32):
            call = call_of({n: x.astype(dtype) for n, x in draw(0, length=8, dim=dim).items()}, 0)
            for device in ("8.0", "8.6", "9.0", "12.0"):
                assert gpu.refusal(call, device) is None


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_grids_are_data_and_lower_for_cuda() -> None:
    """Forward and backward lower to three Triton kernels without a GPU."""
    shape = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)
    grid = jax.ShapeDtypeStruct((4, 10), jnp.int32)
    options = gpu.Options(gpu.choose_tiles(64, 2, 227 * 1024))

    def step(q: Any, k: Any, v: Any, do: Any, widths: Any, offsets: Any) -> Any:
        made = lambda q, k, v: make_call(q, k, v, widths, offsets, segment_ids=None, causal=True, scale=None)
        o, pull = jax.vjp(lambda *x: gpu.attend(made(*x), "shared", options)[0], q, k, v)
        return o, pull(do)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    unsafe = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with jax.sharding.use_abstract_mesh(mesh):
        exported = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=unsafe)(
            *[shape] * 4, grid, grid
        )
    assert str(exported.mlir_module()).count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: requirements-tpu.txt")
@pytest.mark.aot
@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", aot.TOPOLOGIES)
@pytest.mark.parametrize("case", aot.CASES, ids=lambda case: case.name)
def test_forward_and_backward_compile_for_tpus(case: aot.Case, topology: str) -> None:
    row = aot.compile_case(case, topology)
    assert row["kernels"] == 3
    assert row["memory_bytes"] < 16 * row["argument_bytes"]  # linear memory; one head's scores would be far more


def test_the_tables_of_the_docs_are_those_of_the_results() -> None:
    shown = DOCS.read_text(encoding="utf-8").split(MARK[0] + "\n")[1].split("\n" + MARK[1])[0]
    assert shown == committed()


def test_a_time_measured_again_replaces_the_old_one_and_ratios_are_of_one_run() -> None:
    row = lambda case, impl, ms: {"case": case, "impl": impl, "pass": "fwd", "T": 1024, "ms": ms}
    old = merged({"runs": {}, "rows": []}, [row("alibi", "mosaic_gpu", 4.0) | {"run": "a"}], "a", {"commit": "1"})
    again = [row("alibi", "mosaic_gpu", 3.0), row("lsh, s = 5", "pallas_triton", 1.0)]
    new = merged(old, [r | {"run": "b"} for r in again], "b", {"commit": "2"})
    assert [r["ms"] for r in new["rows"]] == [3.0, 1.0]
    assert list(new["runs"]) == ["b"]
    assert "1.000 (3.0×)" in "\n".join(times(new["rows"]))
    later = merged(new, [again[0] | {"run": "c"}], "c", {"commit": "3"})
    assert list(later["runs"]) == ["b", "c"]
    assert "×)" not in "\n".join(times(later["rows"]))
