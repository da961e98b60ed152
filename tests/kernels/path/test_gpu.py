"""The GPU backend on CPU: its Triton kernels interpreted, the attention kernels between blocks emulated."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.path import bench, bench_cases, gpu
from kernels.path.api import path_attention
from kernels.path.bench_tables import DOCS, RESULTS, tables
from kernels.path.call import make_call
from kernels.path.levels import Level, pair_of, plan_levels
from kernels.path.shapes import Shape
from kernels.path.transport import block_span
from tests.helpers import relative_rms, x64
from tests.kernels.path.support import Options, attend, call_of, draw

MOSAIC = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the attention kernels need jax >= 0.11.2")
# Largest relative RMS error that FLA allows its kernels in bfloat16 (its tests/ops/test_path_attn.py).
ALLOWED = {"o": 5e-3, "q": 8e-3, "k": 8e-3, "v": 8e-3, "w": 1.5e-2, "beta": 2e-2, "log_gates": 2e-2}


# ---- Levels ----


@pytest.mark.parametrize("length", [1, 128, 129, 700, 1024, 1025, 4096, 5000, 32768, 40000, 524288])
def test_levels_cover_the_row(length: int) -> None:
    """Each level joins what the one below made, the top covers the row, and padding is less than one child of it."""
    levels, size = plan_levels(length, 128), 128
    for level in levels:
        assert level.size == size
        assert 2 <= level.radix <= 8
        size = level.parent
    assert size >= length
    assert not levels or size - levels[-1].size < length
    assert len(levels) <= 1 + np.log(max(1, length / 128)) / np.log(8)


def test_pairs_are_numbered_by_the_queries_child() -> None:
    pairs = [(a, c) for a in range(1, 8) for c in range(a)]
    assert Level(8, 128).pairs == len(pairs)
    a, c = pair_of(jnp.arange(len(pairs)), 8)
    np.testing.assert_array_equal(np.stack([a, c], 1), pairs)


@MOSAIC
@pytest.mark.parametrize(("radix", "size", "tiles"), [(4, 128, "2x64x2"), (8, 512, "3x64x2"), (2, 512, "3x64x2")])
def test_blocks_of_keys_cover_the_pairs(radix: int, size: int, tiles: str) -> None:
    """Every carried key is in a block; a block has keys of one child of queries, and that child's queries exactly."""
    from kernels.attention.mosaic_gpu_spec import Tiles
    from kernels.path.gpu_levels import LevelSpec

    level, cut = Level(radix, size), Tiles.parse(tiles)
    spec = object.__new__(LevelSpec)
    object.__setattr__(spec, "level", level)
    owner = np.zeros(level.stored, int)
    for block in range(spec.key_blocks(cut)):
        first, stored, (start, full, full_stop, stop) = map_ints(spec.key_block(jnp.int32(block), cut))
        a = start * cut.step // size
        assert (start, stop) == (full, full_stop) == (a * size // cut.step, (a + 1) * size // cut.step)
        assert 0 <= first <= a * size - cut.rows
        assert stored - first == a * (a - 1) // 2 * size
        owner[stored : stored + cut.rows] = a
    want = [a for a in range(1, radix) for _ in range(a * size)]
    np.testing.assert_array_equal(owner, want)


def map_ints(tree: Any) -> Any:
    return jax.tree.map(int, tree)


def test_memory_per_token_does_not_grow() -> None:
    """Carried keys of a level, the largest temporary, are at most 3.5 times the keys at any length."""
    assert all(level.stored <= 3.5 * level.parent for n in range(8, 21) for level in plan_levels(2**n, 128))


# ---- Blocks ----


@pytest.mark.parametrize(
    ("same", "dim"),
    [(None, 64), (0.0, 64), (0.01, 64), (None, 40)],
    ids=["random", "repeated", "nearly repeated", "narrow heads"],
)
def test_blocks_are_the_transform(same: float | None, dim: int) -> None:
    """Keys, queries, products and outputs of a block at beta = 1.99 against float64, repeated tokens included.

    Rows of heads below 64 are as narrow as the heads; their products are those of 64, the identity beyond.
    """
    from kernels.path.gpu_blocks import BlockOptions, block_queries
    from kernels.path.gpu_keys import block_keys

    rng = np.random.default_rng(0)
    q, k, v, w = rng.normal(size=(4, 1, 128, 1, dim)).astype(np.float32)
    w = w if same is None else w[:, :1] + same * w
    w = (w / np.linalg.norm(w, axis=-1, keepdims=True)).astype(np.float32)
    beta = np.full((1, 1, 128), 1.99, np.float32)
    bf16 = lambda x: jnp.asarray(x, jnp.bfloat16)
    keys = block_keys(bf16(k), jnp.asarray(w), jnp.asarray(beta), interpret=True)
    absent = dict.fromkeys(("bias", "hi", "lo", "sharpness", "q_ids", "k_ids"))
    x = {"q": bf16(q), "k": bf16(k), "v": bf16(v)} | absent
    got = block_queries(BlockOptions(0.125, True, True), x, keys, [])
    with x64():
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64)[0, :, 0])
        want = block_span(wide(bf16(q))[None], wide(bf16(k)), wide(w), jnp.asarray(beta[0, 0], jnp.float64))
        z = np.where(np.tril(np.ones((128, 128), bool)), np.asarray(want.scores[0]) * 0.125, -np.inf)
        p = np.exp(z - z.max(-1, keepdims=True))
        o = p / p.sum(-1, keepdims=True) @ np.asarray(wide(bf16(v)))
        product = np.eye(64)
        product[:dim, :dim] = np.asarray(want.m).T
    assert {keys[n].shape[-1] for n in ("w16", "u16", "k_half", "k16")} == {dim}
    assert got["queries"][0].shape == got["o"].shape == q.shape
    assert relative_rms(keys["p16"][0, 0, 0].astype(jnp.float32) + keys["p_low"][0, 0, 0], product) < 1e-5
    assert relative_rms(keys["k16"][0, :, 0], want.k) < 1e-3
    assert relative_rms(got["queries"][0][0, :, 0], want.q[0]) < 2.5e-3
    assert relative_rms(got["o"][0, :, 0], o) < 2.5e-3


@pytest.mark.parametrize("most", [0.0, 1e-45, 1e-40, 1e-38, 1e-31, 0.7, 1.0, 3e4, 1e30, 3e38])
def test_scales_of_gradients_of_any_size(most: float) -> None:
    """What follows from gates that have shut, or from a do of any size, is finite and comes back."""
    from kernels.path.gpu_gradients import Exact, Scaled

    x = jnp.asarray(most * np.random.default_rng(0).uniform(-1, 1, (64, 64)), jnp.float32).at[0, 0].set(most)
    with jax.debug_nans(True):
        for made, exact in ((Scaled.of(x), 2**-11), (Exact.of(x), 2**-20)):
            back = sum(part.astype(jnp.float32) for part in made[:-1]) * made[-1]
            assert np.abs(np.asarray(back, np.float64) - np.asarray(x, np.float64)).max() <= max(exact * most, 1e-37)


# ---- All of it ----


def compare(
    shape: Shape, options: Options, ids: Any = None, dtype: Any = jnp.bfloat16, **kept: Any
) -> dict[str, float]:
    """Relative RMS errors of o and all gradients against the definition in float64 on the same 16-bit inputs."""
    arrays = draw(shape, 0, dtype=np.float32, beta=(1.5, 2.0), **kept)
    arrays |= {n: arrays[n].astype(dtype) for n in "qkv"}
    size = (*arrays["q"].shape[:3], arrays["v"].shape[-1])
    do = np.random.default_rng(1).uniform(size=size).astype(np.float32)

    def with_gradients(run: Any) -> Any:
        def loss(arrays: Any, do: Any) -> Any:
            o, lse = run(arrays)
            return (o.astype(do.dtype) * do).sum() + 0.1 * jnp.where(jnp.isfinite(lse), lse, 0).sum(), o

        return jax.jit(jax.grad(loss, has_aux=True))

    grads, o = with_gradients(lambda a: gpu.attend(call_of(a, options, ids), interpret=True))(arrays, jnp.asarray(do))
    with x64():
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (arrays, do))
        want, exact = with_gradients(lambda a: attend(a, options, "reference", ids))(*wide)
        errors = {jax.tree_util.keystr(p)[2:-2]: x for p, x in jax.tree_util.tree_leaves_with_path(want)}
        got = {jax.tree_util.keystr(p)[2:-2]: x for p, x in jax.tree_util.tree_leaves_with_path(grads)}
        return {"o": relative_rms(o, exact)} | {n: relative_rms(got[n], x) for n, x in errors.items()}


@MOSAIC
def test_gpu_path_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prior, gates inside the scale, sharpness, packed rows with padding, grouped heads, a length that is not round."""
    from tests.kernels.path import mosaic_emulation

    mosaic_emulation.install(monkeypatch)
    ids = np.arange(200)[None] * 3 // 200
    ids[:, 70:75] = ids[:, -9:] = -1
    kept: dict[str, Any] = {"prior": "ggd", "gates": True, "sharpness": True}
    errors = compare(Shape(1, 200, 2, 48, kv_heads=1), Options("ggd", scale_gates=True), jnp.asarray(ids), **kept)
    assert {n: e for n, e in errors.items() if e > ALLOWED.get(n, 1e-2)} == {}


@MOSAIC
def test_gpu_path_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 36 and values of 20, in arrays of 40 columns; the sharpness leaves prior and gates alone."""
    from tests.kernels.path import mosaic_emulation

    mosaic_emulation.install(monkeypatch)
    kept: dict[str, Any] = {"prior": "ggd", "v_dim": 20, "dtype": jnp.float16}
    errors = compare(Shape(2, 300, 2, 36), Options("ggd", sharpen_prior=False), **kept)
    assert {n: e for n, e in errors.items() if e > ALLOWED.get(n, 1e-2)} == {}


@MOSAIC
@pytest.mark.slow
@pytest.mark.parametrize(("length", "dim"), [(100, 16), (1300, 56)], ids=["one block", "two levels"])
def test_gpu_path_with_narrow_heads(monkeypatch: pytest.MonkeyPatch, length: int, dim: int) -> None:
    from tests.kernels.path import mosaic_emulation

    mosaic_emulation.install(monkeypatch)
    errors = compare(Shape(1, length, 4, dim, kv_heads=2), Options(scale_gates=True), sharpness=False)
    assert {n: e for n, e in errors.items() if e > ALLOWED[n]} == {}


@MOSAIC
@pytest.mark.slow
def test_gpu_path_with_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head_dim of 128, where the kernels of the blocks walk through it in two steps."""
    from tests.kernels.path import mosaic_emulation

    mosaic_emulation.install(monkeypatch)
    errors = compare(Shape(1, 600, 2, 128, kv_heads=1), Options(scale_gates=True), sharpness=False)
    assert {n: e for n, e in errors.items() if e > ALLOWED[n]} == {}


@MOSAIC
@pytest.mark.slow
@pytest.mark.parametrize("repeated", [False, True], ids=["random with gates", "repeated"])
def test_gpu_path_over_two_levels(monkeypatch: pytest.MonkeyPatch, repeated: bool) -> None:
    """1,300 tokens: 11 blocks, joined twice and then six times."""
    from tests.kernels.path import mosaic_emulation

    mosaic_emulation.install(monkeypatch)
    errors = compare(Shape(1, 1300, 2, 64), Options(), gates=not repeated, sharpness=False, repeated=repeated)
    assert {n: e for n, e in errors.items() if e > ALLOWED[n]} == {}


@MOSAIC
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("dim", "gates", "length"),
    [
        (64, True, 1100),
        (48, False, 256),
        pytest.param(128, True, 1100, marks=pytest.mark.slow),
        pytest.param(128, False, 8300, marks=pytest.mark.slow),  # three levels: all the shared memory there is
    ],
)
def test_it_lowers_for_hopper(monkeypatch: pytest.MonkeyPatch, dim: int, gates: bool, length: int) -> None:
    """Forward and backward lower for CUDA: 3 attention kernels per level and the Triton kernels around them; at
    head_dim 128 Mosaic ones for the blocks' keys, every level's products, carried keys and, without gates, queries."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    monkeypatch.setattr(gpu, "supports", gpu.refusal)
    shape = Shape(1, length, 4, dim, kv_heads=2)
    arrays = draw(shape, 0, dtype=np.float32, gates=gates, sharpness=False)
    arrays |= {n: arrays[n].astype(jnp.bfloat16) for n in "qkv"}

    def loss(a: Any) -> Any:
        q, k, v, w, beta = (a[n] for n in ("q", "k", "v", "w", "beta"))
        return path_attention(q, k, v, w, beta, log_gates=a.get("log_gates"), implementation="mosaic_gpu").sum()

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(n) for n in ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")]
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)):
        exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=["cuda"], disabled_checks=allowed)(arrays)
    text = exported.mlir_module()
    assert dim != 48 or not re.search(r"stablehlo\.(pad|slice) .*x48x\w+>", text)  # no copies of arrays of heads
    levels = len(plan_levels(length, 128))
    blocks = 0 if dim <= 64 else levels + (2 if gates else 3)
    assert text.count("mosaic_gpu_v2") == 3 * levels + blocks
    assert text.count("xla.gpu.triton") >= 10


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("bfloat16 or float16", {"dtype": jnp.float32}),
    "wide heads": ("head_dim 160 is more than 128", {"dim": 160}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    words, change = REFUSED[name]
    x = jnp.zeros((1, 4, 2, change.get("dim", 64)), change.get("dtype", jnp.bfloat16))
    made = make_call(
        *(x, x, x, x.astype(jnp.float32), jnp.zeros(x.shape[:3])),
        log_gates=None,
        scale_gates=False,
        prior=None,
        sharpness=None,
        segment_ids=None,
        sharpen_prior=True,
        scale=None,
    )
    assert words in (gpu.refusal(made) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
def test_named_backend_says_why_not() -> None:
    x = jnp.zeros((1, 4, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"mosaic_gpu.*cannot serve this call: needs"):
        path_attention(x, x, x, x.astype(jnp.float32), jnp.zeros((1, 4, 2)), implementation="mosaic_gpu")


# ---- Benchmark ----


def test_documentation_shows_the_committed_results() -> None:
    """The tables of docs/path.md are those of results.json, or say that there are none."""
    shown = DOCS.read_text().split("<!-- results -->\n")[1].split("\n<!-- end of results -->")[0]
    assert shown == (tables() if RESULTS.exists() else "Not measured yet: no results.json is committed.")


def test_benchmark_rows_become_tables(tmp_path: Path) -> None:
    """Ratios pair what has one shape and pass; the tables show them, and that FLA was absent."""
    size = {"B": 1, "T": 256, "H": 2, "D": 64}
    times = {"ms_min": 1.0, "ms_max": 3.0}
    rows: list[dict[str, Any]] = [
        {"case": "path", "impl": "mosaic_gpu", "pass": "fwd", "ms": 2.0, "memory_bytes": 2**20} | size | times,
        {"case": "plain", "impl": "mosaic_gpu", "pass": "fwd", "ms": 1.0, "memory_bytes": 2**20} | size | times,
        {"case": "path", "impl": "fla", "pass": "fwd", "ms": 5.0} | size | times,
        {"case": "path", "impl": "fla", "pass": "fwd_bwd", "ms": 9.0} | size | times,
        {"case": "lazy", "impl": "xla", "pass": "decode", "ms": 2.0, "tokens_per_s": 9.0} | size | times,
        {"case": "rewritten", "impl": "triton_decode", "pass": "decode", "ms": 5.0, "tokens_per_s": 4.0} | size | times,
        {"case": "x", "impl": "mosaic_gpu", "pass": "check", "error": {"o": 1e-3}, "same_bits": True} | size,
        {"impl": "fla", "skipped": "ModuleNotFoundError: no fla"},
        {"case": "x", "impl": "fla", "pass": "check", "error": {"o": 2e-3}} | size,
        {
            "case": "path",
            "impl": "mosaic_gpu",
            "pass": "fwd_bwd kernels",
            "kernels": {"a_d64_1": [1, 2.0], "b": [1, 0.01]},
        }
        | size,
    ]
    bench.add_ratios(rows)
    assert rows[0]["ratio"] == {"fla": 2.5, "plain": 0.5}
    assert rows[4]["ratio"] == {"rewritten": 2.5}
    (tmp_path / "results.json").write_text(json.dumps({"env": {"device": "d"}, "rows": rows}))
    text = tables(tmp_path / "results.json")
    assert "| 1, 256, 2, 64 | path | fwd | 2.00 (1.00–3.00) | 5.00 (1.00–3.00) | 2.50 | 2.00 | 16.0 | – |" in text
    assert "| `a` | 2.00 |" in text
    assert "| the rest | 0.01 |" in text
    assert "| x | 1, 256, 2, 64 | FLA | 2.0e-03 |" in text
    assert "FLA was skipped: ModuleNotFoundError: no fla." in text
    assert "| 256 | 1 | lazy, xla | 2.00 (1.00–3.00) | 9 | 2.50 |" in text


def test_both_ways_of_the_decode_benchmark_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"B": 1, "H": 2, "steps": 40}.items():
        monkeypatch.setitem(bench_cases.DECODE, name, value)
    cache, new = bench_cases.decode_inputs(60)
    lazy, rewritten = (jax.jit(bench_cases.decode(way, 60))(cache, new)[0] for way in (True, False))
    assert relative_rms(lazy, rewritten) < 1e-3
