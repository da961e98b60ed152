"""The Mosaic GPU backend: refusals and tile walks on any machine, lowering on jax >= 0.11.2, numbers on a GPU."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import bench_cases, bench_parts, bench_tables, masks, mosaic_gpu
from kernels.attention.api import attention
from kernels.attention.bench_cases import CHECKS, alibi, buckets, ggd, kerple
from kernels.attention.call import make_call
from kernels.attention.gates import running_sums
from kernels.attention.mosaic_gpu_slopes import own_slopes

NEW_JAX = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need jax >= 0.11.2")
QUICK = (
    "plain",
    "bam+ssmax",
    "fox+bam+ssmax, packed, GQA",
    "kerple, window, head 96",
    "bam, negative sharpness, outside, head 48, GQA",
)


def call(length: int = 8, keys: int | None = None, dim: int = 64, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
    empty: dict[str, Any] = dict.fromkeys(
        ("prior", "log_gates", "sharpness", "segment_ids", "positions", "kv_positions", "window", "scale")
    )
    arrays = [jnp.zeros((2, n, 2, dim), dtype) for n in (length, keys or length, keys or length)]
    return make_call(*arrays, **{**empty, "sharpen_prior": True, "causal": True, **options})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": jnp.float32}, "float32"),
        ({"dim": 256}, "head_dim 256"),
        ({"positions": jnp.arange(8)}, "positions"),
        ({}, None),
        ({"window": 3, "causal": False, "keys": 12}, None),
    ],
)
def test_refusals_name_the_reason(changes: dict[str, Any], words: str | None) -> None:
    reason = mosaic_gpu.refusal(call(**changes))
    assert (reason is None) if words is None else (reason is not None and words in reason)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
def test_named_on_the_wrong_machine_raises_and_never_falls_back() -> None:
    x = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"mosaic_gpu.*cannot serve this call: needs"):
        attention(x, x, x, implementation="mosaic_gpu")


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_seen_keys_are_those_of_the_rule(data: st.DataObject) -> None:
    length, keys = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    options: dict[str, Any] = {"causal": data.draw(st.booleans()), "window": data.draw(st.sampled_from([None, 1, 3]))}
    if data.draw(st.booleans()):
        ids = lambda n: jnp.asarray(
            data.draw(st.lists(st.lists(st.integers(-1, 2), min_size=n, max_size=n), min_size=2, max_size=2))
        )
        first = ids(length)
        options["segment_ids"] = (first, first if length == keys and data.draw(st.booleans()) else ids(keys))
    made = call(length, keys, **options)
    q_pos, k_pos = made.positions()
    line = lambda x, axis: None if x is None else jnp.expand_dims(x, axis)
    rule = {"causal": made.causal, "window": made.window}
    seen = masks.visible(
        q_pos[:, :, None], k_pos[:, None, :], line(made.q_segments, 2), line(made.kv_segments, 1), **rule
    )
    got = mosaic_gpu._seen_keys(made)
    # Keys past the last query of a causal call are left alone: whole tiles of them are never read.
    want = np.broadcast_to(seen.any(axis=1), (2, keys))
    if got is None:
        assert made.every_key_is_seen()
    else:
        assert (np.broadcast_to(got, (2, keys)) >= want).all()
        if made.q_segments is not None:
            np.testing.assert_array_equal(np.broadcast_to(got, (2, keys)), want)


def test_slopes_that_are_the_prior_itself() -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    assert own_slopes(ggd, {"alpha": scalar, "beta": scalar}) == (0,)
    assert own_slopes(alibi, {"slope": scalar}) == ()
    assert own_slopes(kerple, {"r1": scalar, "r2": scalar}) == ()
    assert own_slopes(buckets, {"table": jax.ShapeDtypeStruct((12,), jnp.float32)}) == ()
    clipped = lambda p, d: jnp.maximum(ggd(p, d), -10.0)  # the slope is 0 where it is clipped
    assert own_slopes(clipped, {"alpha": scalar, "beta": scalar}) == ()


def test_own_slopes_hold_numerically() -> None:
    params = {"alpha": jnp.float32(0.3), "beta": jnp.float32(0.7)}
    d = jnp.arange(-50, 5)
    slope = jax.jvp(lambda a: ggd({**params, "alpha": a}, d), (params["alpha"],), (jnp.float32(1),))[1]
    np.testing.assert_allclose(slope, ggd(params, d), rtol=1e-6)


def make_spec(queries: int, keys: int, causal: bool, window: int | None) -> Any:
    from kernels.attention.mosaic_gpu_spec import Spec

    off = dict.fromkeys(("prior", "own_slope", "sharpness", "gates", "segments"), False)
    return Spec(
        **{"batch": 1, "queries": queries, "keys": keys, "heads": 1, "kv_heads": 1, "head_dim": 64, "slopes": 0},
        **{"dtype": jnp.bfloat16, "scale": 1.0, "causal": causal, "window": window, "sharpen_prior": True},
        **off,
    )


@NEW_JAX
@settings(max_examples=20, deadline=None)
@given(
    queries=st.integers(1, 700),
    keys=st.integers(1, 700),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 50, 333]),
    groups=st.sampled_from([2, 3]),
    step=st.sampled_from([64, 128]),
)
def test_tiles_cover_what_is_visible_and_mask_what_is_not(
    queries: int, keys: int, causal: bool, window: int | None, groups: int, step: int
) -> None:
    from kernels.attention.mosaic_gpu_spec import Tiles

    spec, tiles = make_spec(queries, keys, causal, window), Tiles(groups, step)
    q_pos, k_pos = (np.asarray(p)[0] for p in masks.default_positions(queries, keys))
    seen = np.asarray(masks.visible(q_pos[:, None], k_pos[None, :], None, None, causal=causal, window=window))
    for name, visible in (("key_range", seen), ("query_range", seen.T)):
        for first in range(0, visible.shape[0], tiles.rows):
            rows = visible[first : first + tiles.rows]
            start, full_start, full_stop, stop = (int(x) for x in getattr(spec, name)(jnp.int32(first), tiles))
            assert 0 <= start <= full_start <= full_stop <= stop <= -(-visible.shape[1] // step)
            assert not rows[:, : start * step].any()
            assert not rows[:, stop * step :].any()
            inside = rows[:, full_start * step : full_stop * step]
            assert inside.all()
            for tile in range(start, stop):  # the slice of the prior's table lies inside it and starts on 16 bytes
                q, k = (first, tile * step) if name == "key_range" else (tile * step, first)
                entry = q - k + spec.shift + spec.origin - (step if name == "key_range" else tiles.rows)
                assert entry % 4 == 0
                assert entry >= 16
                assert entry + tiles.slice + 32 <= spec.table_length


@NEW_JAX
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "place"), [("k", -1), ("q", 0)])
def test_gate_differences_split_at_a_tile_round_no_more_than_whole(name: str, place: int, seed: int) -> None:
    """Two parts of one sign for every query after the tile, or key before it, whatever shuts in between."""
    from kernels.attention.mosaic_gpu_spec import Tiles, lift, near_gates

    tiles, random = Tiles(2, 64), np.random.default_rng(seed)
    spec = replace(make_spec(384, 384, True, None), gates=True)
    gates = -(10.0 ** random.uniform(-6, 1, 384))
    gates[random.random(384) < 0.03] = -(10.0 ** random.uniform(1, 9))
    high, low = (x[0, :, 0] for x in running_sums(jnp.asarray(gates, jnp.float32)[None, :, None]))
    exact = [np.asarray(x, np.float64) for x in (high, low)]
    sums = {f"{name}_gate_hi": high[None, None], f"{name}_gate_lo": low[None, None]}
    near = np.asarray(near_gates(spec, tiles, sums, name, place))[0, 0]
    refs = high.reshape(-1, 64), low.reshape(-1, 64)
    for tile in range(6):
        inside = np.arange(tile * 64, (tile + 1) * 64)
        outside = np.arange(384)[(tile + 1) * 64 :] if name == "k" else np.arange(tile * 64)
        if not outside.size:
            continue
        far = np.asarray(lift(spec, (high[outside], low[outside]), refs, jnp.int32(tile), place))
        got = far[:, None] - near[inside][None]
        want = sum(x[outside][:, None] - x[inside][None] for x in exact)
        last_bit = 2.0**-47 * np.maximum(np.abs(exact[0][outside])[:, None], np.abs(exact[0][inside])[None])
        assert (np.abs(got - want) <= 3e-7 * np.abs(want) + last_bit).all()  # of the two floats that hold a sum


@NEW_JAX
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.booleans(), st.randoms())
def test_segment_bounds_miss_nothing(n: int, m: int, rows: int, step: int, sort: bool, random: Any) -> None:
    from kernels.attention.mosaic_gpu_spec import segment_bounds

    draw = lambda size: np.array([[random.randint(-1, 3) for _ in range(size)] for _ in range(2)])
    ids, others = (np.sort(x, axis=1) if sort else x for x in (draw(n), draw(m)))
    bounds = np.asarray(segment_bounds(jnp.asarray(ids), jnp.asarray(others), rows, step))[:, 0]
    assert bounds.shape == (2, -(-n // rows), 4)
    shared = (ids[:, :, None] == others[:, None, :]) & (ids[:, :, None] >= 0)
    for row in range(2):
        for block, (start, stop, whole, whole_stop) in enumerate(bounds[row]):
            tile = shared[row, block * rows : (block + 1) * rows]
            assert 0 <= start <= stop <= -(-m // step)
            assert not tile[:, : start * step].any()
            assert not tile[:, stop * step :].any()
            assert 0 <= whole <= whole_stop <= m // step
            assert tile[:, whole * step : whole_stop * step].all()
            if (tile[:, : m // step * step].all() and m >= step) and len(tile) == rows:
                assert (whole, whole_stop) == (0, m // step)


@NEW_JAX
def test_tiles_survive_being_written_down() -> None:
    from kernels.attention.mosaic_gpu_spec import Tiles

    for row in mosaic_gpu._tile_table().values():
        for kernels in row.values():
            for text in kernels.values():
                assert str(Tiles.parse(text)) == text


@NEW_JAX
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("entries", [128, 192, 256, 320])
def test_table_slices_hold_every_pair(entries: int, pairs: bool) -> None:
    from kernels.attention.mosaic_gpu_tiles import table_buffer, table_chunks

    table = np.random.default_rng(0).standard_normal(4 * entries)
    copies = [table, np.roll(table, -1)]
    first = entries  # where the slice begins
    buffer = np.full(table_buffer(entries, pairs), np.nan)
    for copy, offset, place, size in table_chunks(entries, pairs):
        assert size <= 256
        buffer[place : place + size] = copies[copy][first + offset : first + offset + size]
    for lower in range(1, entries - 1):
        at = lower + (lower % 2) * (entries + 15) if pairs else lower
        assert not pairs or at % 2 == 0
        np.testing.assert_array_equal(buffer[at : at + 2], table[first + lower : first + lower + 2])


def export_for_hopper(run: Any, *args: Any) -> Any:
    """`run` lowered for an H200 on a machine that has none."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        allowed = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
        return jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=allowed)(*args)


@NEW_JAX
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c.name in QUICK else [pytest.mark.slow]) for c in CHECKS], ids=lambda c: c.name
)
def test_lowers_for_hopper_without_one(case: bench_cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward reach the Mosaic custom call: layouts, barriers and copies are accepted."""
    monkeypatch.setattr(mosaic_gpu, "supports", mosaic_gpu.refusal)
    x, other, cotangents = bench_cases.inputs(case)
    exported = export_for_hopper(
        bench_parts.with_gradients(bench_cases.function(case, other, "mosaic_gpu")), x, cotangents
    )
    assert exported.mlir_module().count("mosaic_gpu_v2") >= 3
    shapes = jax.tree.leaves(jax.tree.map(lambda a: a.shape, (cotangents, x)))
    assert [n for aval in exported.out_avals for n in aval.shape] == shapes


@NEW_JAX
@pytest.mark.parametrize(("dim", "stored"), [(48, 48), (8, 8), (20, 24), (64, 64), (65, 128)])
def test_heads_are_read_without_a_padded_copy(dim: int, stored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of whole 16 bytes go to the kernels and come from them as they are."""
    monkeypatch.setattr(mosaic_gpu, "supports", mosaic_gpu.refusal)
    case = bench_cases.Case("", 2, 72, 2, dim)
    x, other, cotangents = bench_cases.inputs(case)
    both = bench_parts.with_gradients(bench_cases.function(case, other, "mosaic_gpu"))
    text = export_for_hopper(both, x, cotangents).mlir_module()
    calls = [line for line in text.splitlines() if "@mosaic_gpu_v2(" in line]
    # q, k, v to o; and do to dq; and do to dk, dv
    heads = [re.findall(r"tensor<2x72x2x(\d+)xbf16>", line.rsplit(" : (", 1)[1]) for line in calls]
    assert heads == [[str(stored)] * n for n in (4, 5, 6)]
    padded = re.findall(r"stablehlo.pad .*-> tensor<2x72x2x\d+xbf16>", text)
    assert bool(padded) == (dim != stored)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="before 0.12 JAX numbers Mosaic kernels: none are alike")
def test_layers_that_are_alike_share_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels however deep the model: each costs seconds to compile."""
    monkeypatch.setattr(mosaic_gpu, "supports", mosaic_gpu.refusal)
    x, other, (do, dlse) = bench_cases.inputs(next(c for c in CHECKS if c.name == "bam+ssmax"))
    layer = bench_cases.function(next(c for c in CHECKS if c.name == "bam+ssmax"), other, "mosaic_gpu")

    def three(x: Any) -> Any:
        for _ in range(2):
            x = x | {"q": layer(x)[0]}
        return layer(x)

    text = export_for_hopper(bench_parts.with_gradients(three), x, (do, dlse)).mlir_module()
    modules = re.findall(r'module = "((?:[^"\\]|\\.)*)"', text)
    assert len(modules) >= 3
    assert len(set(modules)) == 3


def test_documentation_shows_the_committed_results() -> None:
    text = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    report = json.loads(bench_tables.RESULTS.read_text())
    shown = text.split("<!-- results -->\n")[1].split("\n<!-- end of results -->")[0]
    assert shown == bench_tables.tables(report)
    for row in report["rows"]:
        assert "failed" not in row
        assert row.get("passed", True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "name"), bench_parts.all_checks(), ids=lambda x: f"{x.name}, {x.dtype}" if hasattr(x, "name") else str(x)
)
def test_on_the_device_against_float64(case: bench_cases.Case, name: str | None) -> None:
    """Outputs and all gradients, NaN in unseen keys, odd lengths; two runs give the same bits."""
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    result = bench_parts.check(case, name)
    assert result["passed"], result
