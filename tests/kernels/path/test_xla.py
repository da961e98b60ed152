"""The blockwise backend: outputs, lse and every gradient against the sequential definition."""

import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.path.plan import Plan
from kernels.path.shapes import HEAD_DIMS, ODD_LENGTHS, PLANS, Shape
from tests.helpers import relative_rms, x64
from tests.kernels.path.support import Options, assert_close, compiled, compiled_gradients, cotangents, draw, gradients

ROW = Shape(2, 21, 4, 6, kv_heads=2)
FULL = Options("ggd", scale_gates=True)
TIGHT = 1e-12
TWO_LEVELS = PLANS["superblocks"]


def documents(seed: int, batch: int, length: int) -> Any:
    """Segment ids of some documents in order with padding before, between, inside and after them."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 4, (batch, length)), axis=1)
    ids[rng.random((batch, length)) < 0.15] = -1
    return jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_plan_gives_the_definition(plan: Plan) -> None:
    """Outputs and all gradients, with and without documents (the same program), float64."""
    with x64():
        for seed, ids in enumerate((jnp.zeros((2, 21), jnp.int32), documents(0, 2, 21), documents(1, 2, 21))):
            arrays = draw(ROW, seed, prior="ggd")
            arrays["beta"] = arrays["beta"].at[0, 3:6, 0].set(jnp.array([0.0, 1.0, 2.0]))
            assert_close(gradients(arrays, FULL, plan, ids), gradients(arrays, FULL, "reference", ids), TIGHT)


OPTIONS: dict[str, tuple[Options, dict[str, Any]]] = {
    "bare": (Options(), {"gates": False, "sharpness": False}),
    "prior-sharpened": (Options("kerple"), {"gates": False, "prior": "kerple"}),
    "sharp-content": (Options("table", sharpen_prior=False), {"prior": "table", "v_dim": 10}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, parts = OPTIONS[name]
    with x64():
        arrays = draw(ROW, 5, **parts)
        assert_close(gradients(arrays, options, Plan(2, 16, 16)), gradients(arrays, options, "reference"), TIGHT)


@pytest.mark.parametrize(
    "length", [pytest.param(n, marks=pytest.mark.slow) if n in (3, 63) else n for n in ODD_LENGTHS]
)
def test_any_length(length: int) -> None:
    """A short row is the beginning of a long one whose later outputs nobody uses (one program for the reference)."""
    with x64():
        long = draw(Shape(1, max(ODD_LENGTHS), 2, 4, kv_heads=1), 0, sharpness=False)
        first = lambda x: jax.tree.map(lambda x: x[:, :length], x)
        used = (jnp.arange(max(ODD_LENGTHS)) < length)[None, :, None]
        do, dlse = cotangents(long)
        got = compiled_gradients(Options(), None)(first(long), None, first(do), first(dlse))
        want = compiled_gradients(Options(), "reference")(long, None, do * used[..., None], dlse * used)
        assert_close(got, first(want), TIGHT)


@pytest.mark.parametrize("dim", [d if d in (16, 256) else pytest.param(d, marks=pytest.mark.slow) for d in HEAD_DIMS])
def test_head_dims_in_float32(dim: int) -> None:
    arrays = draw(Shape(1, 40, 2, dim), dim, dtype=np.float32, sharpness=False)
    got = gradients(arrays, Options(), None)
    with x64():
        exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        want = gradients(exact, Options(), "reference")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_rms(a, b) < 2e-5


# ---- Documents and padding ----


def test_packed_documents_are_alone() -> None:
    """Values and gradients of each document equal those of a row that holds nothing else, wherever its borders fall."""
    borders = [(0, 21), (0, 8, 16, 21), (0, 4, 12, 21), (0, 1, 7, 13, 20, 21)]  # block and superblock edges, and not
    with x64():
        arrays = draw(ROW, 0, prior="ggd")
        run, (do, dlse) = compiled_gradients(FULL, TWO_LEVELS), cotangents(arrays)
        for ends in borders:
            ids = np.searchsorted(ends, np.arange(21), side="right")[None].repeat(2, 0)
            packed, grads = run(arrays, jnp.asarray(ids, jnp.int32), do, dlse)
            total: Any = 0
            for first, end in itertools.pairwise(ends):
                shift = lambda x, first=first: jnp.roll(x, -first, axis=1)
                rows = {name: x if name == "params" else shift(x) for name, x in arrays.items()}
                alone = jnp.asarray(np.where(np.arange(21) < end - first, 0, -1)[None].repeat(2, 0), jnp.int32)
                out, part = run(rows, alone, shift(do), shift(dlse))
                for a, b in zip(packed, out, strict=True):
                    np.testing.assert_allclose(a[:, first:end], b[:, : end - first], atol=1e-13)
                for name in arrays.keys() - {"params"}:
                    np.testing.assert_allclose(
                        grads[name][:, first:end], part[name][:, : end - first], atol=1e-12, err_msg=name
                    )
                total = jax.tree.map(lambda x, y: x + y, part["params"], total) if first else part["params"]
            assert_close(grads["params"], total, 1e-12)


def test_what_is_stored_at_padding_does_not_matter() -> None:
    """NaN there changes nothing, gives zero output, lse −∞ and gradients exactly 0; a row of padding alone as well."""
    ids = np.array(documents(3, 2, 21))
    ids[0, :2], ids[0, 9], ids[1] = -1, -5, -1
    pad = ids < 0
    with x64():
        arrays = draw(ROW, 0, prior="ggd")
        for plan in (TWO_LEVELS, "reference"):
            run, weights = compiled_gradients(FULL, plan), cotangents(arrays)
            want = run(arrays, jnp.asarray(ids), *weights)
            poison = {name: x if name == "params" else x.at[pad].set(np.nan) for name, x in arrays.items()}
            (o, lse), grads = got = run(poison, jnp.asarray(ids), *weights)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(a, b)
            assert not np.asarray(o)[pad].any()
            assert np.isneginf(np.asarray(lse)[pad]).all()
            assert np.isfinite(np.asarray(lse)[~pad]).all()
            assert not any(np.asarray(grads[name])[pad].any() for name in arrays.keys() - {"params"})


def test_the_future_has_no_influence() -> None:
    """Gradients of one token's output are exactly zero for every later token and not zero for any earlier one."""
    with x64():
        arrays = draw(ROW, 0, prior="ggd")
        do, dlse = cotangents(arrays)
        for t in (0, 7, 8, 20):
            only = jnp.arange(21) == t
            _, grads = compiled_gradients(FULL, TWO_LEVELS)(
                arrays, jnp.zeros((2, 21), jnp.int32), do * only[None, :, None, None], dlse * only[None, :, None]
            )
            for name in arrays.keys() - {"params"}:
                touched = np.abs(np.asarray(grads[name])).reshape(2, 21, -1).max(-1)
                assert not touched[:, t + 1 :].any(), name
                if name in ("k", "v"):
                    assert touched[:, : t + 1].all(), name


# ---- Precision ----


def test_gates_keep_their_resolution() -> None:
    """Differences of gate sums after strong forgetting, in float32: −60 per token for long, then almost none."""
    shape = Shape(1, 600, 1, 4)
    arrays = draw(shape, 0, dtype=np.float32, sharpness=False)
    gates = np.full((1, 600, 1), -60.0, np.float32)
    gates[:, 300:] = -np.exp(np.random.default_rng(0).uniform(-6, -2, (1, 300, 1)))
    arrays["log_gates"] = jnp.asarray(gates)
    arrays["beta"] = jnp.zeros_like(arrays["beta"])
    o, lse = compiled(Options(), Plan(5, 128, 16))(arrays, None)
    q, k, v = (np.asarray(arrays[name], np.float64)[0, :, 0] for name in ("q", "k", "v"))
    sums = np.cumsum(gates[0, :, 0].astype(np.float64))
    z = np.where(np.tri(600, dtype=bool), q @ k.T / 2 + sums[:, None] - sums[None, :], -np.inf)
    exact = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
    assert np.abs(np.asarray(lse)[0, :, 0] - exact).max() < 5e-6
    assert relative_rms(o[0, :, 0], np.exp(z - exact[:, None]) @ v) < 2e-6


@pytest.mark.parametrize("plan", [TWO_LEVELS, None], ids=["superblocks", "one"])
def test_strong_gates_at_a_length_that_no_plan_divides(plan: Plan | None) -> None:
    """Gates that sum to far below −88, the logarithm of the largest float32, and rows that end inside a block: what
    fills the block up must not overflow in the backward pass."""
    arrays = draw(ROW, 0, dtype=np.float32, sharpness=False)  # at padding a sharpness would be 0 and hide it
    rng = np.random.default_rng(0)
    arrays["log_gates"] = jnp.asarray(-rng.uniform(5, 300, (2, 21, 4)) * (rng.random((2, 21, 4)) < 0.5), jnp.float32)
    ids = None if plan is None else jnp.zeros((2, 21), jnp.int32)  # 0 is what fills up the ids
    got = gradients(arrays, Options(), plan, ids)
    with x64():
        exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        want = gradients(exact, Options(), "reference", ids)
    assert_close(got, want, 1e-5)


LONG = Shape(1, 384, 2, 64, kv_heads=1)
LIMITS = {  # relative RMS of o, dq, dk, dv, dw, dbeta, dgates against float64
    "bfloat16": (5e-3, 8e-3, 8e-3, 8e-3, 1.5e-2, 2e-2, 2e-2),
    "float16": (1e-3, 1e-3, 1e-3, 1e-3, 2e-3, 2e-3, 2e-3),
    "float32": (2e-5, 2e-5, 2e-5, 2e-5, 1e-4, 1e-4, 2e-5),
}


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=pytest.mark.slow) if d == "float16" else d for d in LIMITS])
def test_error_against_float64(dtype: str) -> None:
    """beta near 2, different and repeated tokens; limits as in the tests of the released kernels, or tighter."""
    for seed, (beta, repeated) in enumerate([((1.5, 2.0), False), ((1.99, 1.99), False), ((1.99, 1.99), True)]):
        arrays = draw(LONG, seed, dtype=dtype, beta=beta, repeated=repeated, sharpness=False)
        do, dlse = cotangents(arrays)
        (o, _), grads = compiled_gradients(Options(), Plan(2, 192, 48))(arrays, None, do, 0 * dlse)
        with x64():
            exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
            weights = do.astype(jnp.float64), jnp.zeros(dlse.shape, jnp.float64)
            (want, _), slopes = compiled_gradients(Options(), "reference")(exact, None, *weights)
        errors = [relative_rms(o, want)]
        errors += [relative_rms(grads[name], slopes[name]) for name in ("q", "k", "v", "w", "beta", "log_gates")]
        assert (np.array(errors) < LIMITS[dtype]).all(), (beta, repeated, errors)


def test_small_cotangents_lose_nothing() -> None:
    arrays = draw(LONG, 0, dtype=np.float32, beta=(1.5, 2.0), sharpness=False)
    do, dlse = cotangents(arrays)
    run = compiled_gradients(Options(), Plan(2, 192, 48))
    (_, want), (_, got) = run(arrays, None, do, dlse), run(arrays, None, do * 1e-6, dlse * 1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_rms(np.asarray(a) * 1e6, b) < 1e-5


def test_two_runs_give_the_same_bits() -> None:
    arrays = draw(LONG, 0, dtype=np.float32, sharpness=False)
    run = compiled_gradients(Options(), Plan(2, 192, 48))
    first, second = (run(arrays, None, *cotangents(arrays)) for _ in range(2))
    chex.assert_trees_all_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.9, 1.99, 2.0])
def test_the_same_token_again_and_again(beta: float) -> None:
    """4096 equal tokens in float32 and bfloat16: finite, close to float64, in both passes."""
    shape = Shape(1, 4096, 1, 64)
    for dtype, limit in (("float32", 5e-3), ("bfloat16", 2e-2)):
        for seed in range(2):
            arrays = draw(shape, seed, dtype=dtype, beta=(beta, beta), repeated=True, gates=False, sharpness=False)
            got = gradients(arrays, Options(), None)
            with x64():
                exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
                want = gradients(exact, Options(), None)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert relative_rms(a, b) < limit
