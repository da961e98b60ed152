"""LSH attention: the oracle against its definition and finite differences, the blockwise path against the oracle."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.api import DistancePrior, attention
from kernels.lsh import xla
from kernels.lsh.api import lsh_attention, sample_grids
from kernels.lsh.call import COMBINE, Call, make_call
from tests.helpers import relative_rms, x64

Arrays = dict[str, Any]


def draw(seed: int, length: int = 37, heads: int = 4, kv_heads: int = 2, dim: int = 16, batch: int = 2) -> Arrays:
    rng = np.random.default_rng(seed)
    shape = lambda n: (batch, length, n, dim)
    arrays = {"q": rng.normal(size=shape(heads)), "k": rng.normal(size=shape(kv_heads))}
    return {name: jnp.asarray(x, jnp.float32) for name, x in {**arrays, "v": rng.normal(size=shape(kv_heads))}.items()}


def grids(seed: int, heads: int = 4, samples: int = 3, law: Any = "integer") -> tuple[jax.Array, jax.Array]:
    sigma = jnp.asarray([1.0, 3.0, 8.0, 30.0, 2.0][:heads])
    return sample_grids(jax.random.key(seed), sigma, samples, law=law)


def packed(seed: int, length: int = 37) -> jax.Array:
    """Two rows of documents with padding at both ends and in between."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(2):
        cuts = np.sort(rng.choice(np.arange(1, length), 4, replace=False))
        ids = np.searchsorted(cuts, np.arange(length), side="right")
        rows.append(np.where(ids == rng.integers(0, 5), -1, ids))
    return jnp.asarray(np.stack(rows), jnp.int32)


def objective(arrays: Arrays, weights: Any, **options: Any) -> jax.Array:
    o = lsh_attention(arrays["q"], arrays["k"], arrays["v"], **options)
    return jnp.sum(o.astype(weights.dtype) * weights)


def test_weights_of_a_known_row() -> None:
    """Uniform logits, two grids: worked out by hand."""
    q = jnp.zeros((1, 5, 1, 2))
    v = jnp.eye(5)[None, :, None, :]
    widths, offsets = jnp.asarray([[3, 2]]), jnp.asarray([[1, 0]])
    for implementation in ("reference", "xla"):
        run = lambda combine, name=implementation: lsh_attention(
            q, q, v, widths, offsets, combine=combine, implementation=name
        )[0, 4, 0]
        np.testing.assert_allclose(run("shared"), [0, 0, 0.25, 0.25, 0.5], atol=1e-6)
        np.testing.assert_allclose(run("mean"), [0, 0, 1 / 6, 1 / 6, 2 / 3], atol=1e-6)


@pytest.mark.parametrize(("combine", "causal"), list(itertools.product(COMBINE, (True, False))))
def test_reference_gradients_are_finite_differences(combine: Any, causal: bool) -> None:
    with x64():
        arrays = jax.tree.map(lambda x: x.astype(jnp.float64), draw(0, length=9))
        weights = jnp.asarray(np.random.default_rng(1).normal(size=arrays["q"].shape))
        widths, offsets = grids(2)
        options: Arrays = {"widths": widths, "offsets": offsets, "combine": combine, "causal": causal}
        f = lambda a: objective(a, weights, implementation="reference", **options)
        rng, step = np.random.default_rng(3), 1e-6
        grads = jax.grad(f)(arrays)
        for name in arrays:
            way = {n: jnp.asarray(rng.normal(size=x.shape)) * (n == name) for n, x in arrays.items()}
            move = lambda s, way=way: f(jax.tree.map(lambda a, b: a + s * b, arrays, way))
            want = (move(step) - move(-step)) / (2 * step)
            got = sum(jnp.sum(grads[n] * way[n]) for n in arrays)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("combine", "causal", "segments", "law"),
    [
        ("shared", True, False, "integer"),
        ("shared", True, True, "continuous"),
        ("shared", False, True, "integer"),
        ("shared", False, False, "stratified"),
        ("mean", True, True, "integer"),
        ("mean", False, False, "continuous"),
        ("mean", True, False, "fixed"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_blockwise_is_the_definition(combine: Any, causal: bool, segments: bool, law: Any, seed: int) -> None:
    """Outputs and every gradient, several tiles, an odd length, grouped heads."""
    arrays, (widths, offsets) = draw(seed), grids(seed, law=law)
    weights = jnp.asarray(np.random.default_rng(9).normal(size=arrays["q"].shape), jnp.float32)
    ids = packed(seed) if segments else None
    options: Arrays = {"widths": widths, "offsets": offsets, "combine": combine, "causal": causal, "segment_ids": ids}
    call = make_call(**arrays, widths=widths, offsets=offsets, segment_ids=ids, causal=causal, scale=None)
    tiled = (
        (lambda c: xla.attend_counts(c, rows=8)[0]) if combine == "shared" else (lambda c: xla.attend_mean(c, rows=8))
    )
    want, dwant = jax.value_and_grad(lambda a: objective(a, weights, implementation="reference", **options))(arrays)
    got, dgot = jax.value_and_grad(lambda c: jnp.sum(tiled(c) * weights), allow_int=True)(call)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for name in arrays:
        np.testing.assert_allclose(getattr(dgot, name), dwant[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_grids_of_any_width_serve_in_double_precision(kind: Any) -> None:
    with x64():
        arrays = jax.tree.map(lambda x: x.astype(jnp.float64), draw(0))
        wide = dict(zip(("widths", "offsets"), (np.asarray(x, kind) for x in grids(2)), strict=True))
        got, want = (lsh_attention(**arrays, **wide, implementation=name) for name in ("xla", "reference"))
        np.testing.assert_allclose(got, want, atol=1e-12)
        np.testing.assert_allclose(want, lsh_attention(**draw(0), widths=grids(2)[0], offsets=grids(2)[1]), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_and_the_chosen_backend(dtype: str) -> None:
    arrays = {n: x.astype(dtype) for n, x in draw(4, length=200).items()}
    widths, offsets = grids(4)
    got = lsh_attention(**arrays, widths=widths, offsets=offsets)
    wide = {n: x.astype(jnp.float32) for n, x in arrays.items()}
    want = lsh_attention(**wide, widths=widths, offsets=offsets, implementation="reference")
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol={"float32": 1e-5}.get(dtype, 2e-2))


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("combine", COMBINE)
def test_gradients_of_half_precision_are_near_the_oracle(dtype: str, limit: float, combine: Any) -> None:
    """Packed rows, grouped heads, an odd length: relative error of every gradient against the dense form in float32."""
    arrays, (widths, offsets) = draw(12), grids(12)
    weights = jnp.asarray(np.random.default_rng(13).normal(size=arrays["q"].shape), jnp.float32)
    options: Arrays = {"widths": widths, "offsets": offsets, "combine": combine, "segment_ids": packed(12)}
    narrow = {n: x.astype(dtype) for n, x in arrays.items()}
    wide = {n: x.astype(jnp.float32) for n, x in narrow.items()}
    got = jax.grad(lambda a: objective(a, weights, implementation="xla", **options))(narrow)
    want = jax.grad(lambda a: objective(a, weights, implementation="reference", **options))(wide)
    for name in arrays:
        assert got[name].dtype == jnp.dtype(dtype)
        assert relative_rms(got[name].astype(jnp.float32), want[name]) < limit, name


@pytest.mark.parametrize("segments", [False, True])
def test_separate_samples_merge_to_the_same(segments: bool) -> None:
    """Outputs, lse and gradients; lse has a gradient of its own, which a naive merge would lose."""
    arrays, (widths, offsets) = draw(5), grids(5)
    rng = np.random.default_rng(6)
    wo = jnp.asarray(rng.normal(size=arrays["q"].shape), jnp.float32)
    wl = jnp.asarray(rng.normal(size=arrays["q"].shape[:3]), jnp.float32)
    ids = packed(5) if segments else None

    def value(call: Call, form: Any) -> tuple[jax.Array, Any]:
        o, lse = form(call, rows=8)
        return jnp.sum(o * wo) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) * wl), (o, lse)

    call = make_call(**arrays, widths=widths, offsets=offsets, segment_ids=ids, causal=True, scale=None)
    run = lambda form: jax.value_and_grad(lambda c: value(c, form), has_aux=True, allow_int=True)(call)
    (_, (o, lse)), one = run(xla.attend_counts)
    (_, (o2, lse2)), many = run(xla.attend_samples)
    np.testing.assert_allclose(o2, o, atol=1e-5)
    np.testing.assert_array_equal(jnp.isinf(lse2), jnp.isinf(lse))
    np.testing.assert_allclose(jnp.where(jnp.isinf(lse), 0, lse2), jnp.where(jnp.isinf(lse), 0, lse), atol=1e-5)
    for name in arrays:
        np.testing.assert_allclose(getattr(many, name), getattr(one, name), atol=3e-5, err_msg=name)


def test_shared_tends_to_alibi_and_mean_does_not() -> None:
    """Total variation of the weights of the last row, uniform logits, sigma = 16, s = 400: near 0.03 and 0.28."""
    length, sigma = 100, 16.0
    q = jnp.zeros((1, length, 1, 1))
    v = jnp.eye(length)[None, :, None, :]
    exact = np.asarray(attention(q, q, v, prior=DistancePrior({"slope": jnp.asarray([1 / sigma])}, alibi))[0, -1, 0])
    distances: dict[str, list[float]] = {"shared": [], "mean": []}
    for seed in range(3):
        widths, offsets = sample_grids(jax.random.key(seed), jnp.asarray([sigma]), 400)
        for combine, found in distances.items():
            o = lsh_attention(q, q, v, widths, offsets, combine=combine, implementation="reference")[0, -1, 0]
            found.append(0.5 * float(np.abs(np.asarray(o) - exact).sum()))
    assert np.mean(distances["shared"]) < 0.06
    assert 0.22 < np.mean(distances["mean"]) < 0.34


def alibi(params: Any, d: jax.Array) -> jax.Array:
    return -params["slope"] * jnp.abs(d)


def test_limits_of_the_width() -> None:
    """A block of everything is plain causal attention, blocks of one token return the values."""
    arrays = draw(7)
    full, alone = (jnp.full((4, 2), n, jnp.int32) for n in (10**6, 1))
    zero = jnp.zeros((4, 2), jnp.int32)
    np.testing.assert_allclose(lsh_attention(**arrays, widths=full, offsets=zero), attention(**arrays), atol=1e-5)
    got = lsh_attention(**arrays, widths=alone, offsets=zero)
    np.testing.assert_allclose(got, jnp.repeat(arrays["v"], 2, axis=2), atol=1e-6)


def test_fixed_blocks_do_not_depend_on_the_number_of_samples() -> None:
    arrays = draw(8)
    run = lambda s: lsh_attention(**arrays, widths=(g := grids(0, samples=s, law="fixed"))[0], offsets=g[1])
    np.testing.assert_allclose(run(1), run(5), atol=1e-6)


def test_documents_and_padding() -> None:
    """A packed document is its solo run; values of padding are never touched; padding gives 0 with gradient 0."""
    arrays, (widths, offsets) = draw(9, length=30, batch=1), grids(9)
    ids = jnp.asarray([[-1] * 4 + [0] * 11 + [1] * 12 + [-1] * 3])
    poisoned = {n: x.at[:, :4].set(jnp.nan).at[:, 27:].set(jnp.nan) if n != "q" else x for n, x in arrays.items()}
    run = lambda a, **o: lsh_attention(**a, widths=widths, offsets=offsets, **o)
    got, pull = jax.vjp(lambda a: run(a, segment_ids=ids), poisoned)
    for start, stop in ((4, 15), (15, 27)):
        alone = run({n: x[:, start:stop] for n, x in arrays.items()})
        np.testing.assert_allclose(got[:, start:stop], alone, atol=1e-6)
    np.testing.assert_array_equal(got[:, :4], 0)
    grads = pull(jnp.ones_like(got))[0]
    for name, g in grads.items():
        assert bool(jnp.isfinite(g).all()), name
        np.testing.assert_array_equal(g[:, :4], 0, err_msg=name)


def test_causality_by_zero_gradients() -> None:
    arrays, (widths, offsets) = draw(10), grids(10)
    for combine in COMBINE:
        grads = jax.grad(
            lambda a, c=combine: lsh_attention(**a, widths=widths, offsets=offsets, combine=c)[:, 20].sum()
        )(arrays)
        assert all(bool((g[:, 21:] == 0).all()) for g in grads.values())
        assert bool((jnp.abs(grads["v"][:, 20]) > 0).any())


def test_new_draws_do_not_recompile() -> None:
    arrays = draw(11)
    run = jax.jit(lambda w, o: lsh_attention(**arrays, widths=w, offsets=o))
    outputs = [run(*grids(seed)) for seed in range(3)]
    assert run._cache_size() == 1
    assert not np.allclose(outputs[0], outputs[1])


@pytest.mark.slow
def test_memory_and_work_grow_linearly() -> None:
    """Doubling T doubles the temporaries and the tiles that are visited."""
    sizes, drawn = [], dict(zip(("widths", "offsets"), grids(0), strict=True))
    for length in (8192, 16384):
        arrays = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in draw(0, length=length, batch=1).items()}
        run = jax.jit(jax.grad(lambda a: lsh_attention(**a, **drawn).sum()))
        sizes.append(run.lower(arrays).compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] / sizes[0] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"combine": "sum"}, ValueError, "combine='sum' is not one of 'shared', 'mean'"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' is not one of"),
        ({"widths": jnp.ones((3, 2), jnp.int32)}, ValueError, r"widths has shape \(3, 2\), must be \[H=4"),
        ({"offsets": jnp.ones((4, 3), jnp.float32)}, ValueError, "offsets is float32"),
        ({"segment_ids": jnp.zeros((2, 3), jnp.int32)}, ValueError, "segment_ids has shape"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"combine": "mean", "return_lse": True}, ValueError, "return_lse=True needs combine='shared'"),
        ({"k": jnp.ones((2, 36, 2, 16))}, ValueError, "k has shape"),
    ],
)
def test_wrong_calls_are_refused(changes: Arrays, error: Any, words: str) -> None:
    widths, offsets = grids(0)
    with pytest.raises(error, match=words):
        lsh_attention(**{**draw(0), "widths": widths, "offsets": offsets, **changes})
