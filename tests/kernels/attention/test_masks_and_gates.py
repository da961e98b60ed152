"""Visibility, places of queries, and the resolution of gate sums."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import gates as gate_sums
from kernels.attention import masks
from kernels.attention.api import attention
from kernels.attention.gates import document_sums, extended_sums, running_sums, starts_of
from tests.helpers import x64


def brute(q: np.ndarray, k: np.ndarray, ids: Any, causal: bool, window: int | None) -> np.ndarray:
    """Visibility [B, T, S] by three loops."""
    seen = np.zeros((len(q), q.shape[1], k.shape[1]), bool)
    for b, i, j in np.ndindex(seen.shape):
        d = q[b, i] - k[b, j]
        near = window is None or (d < window and (causal or -d < window))
        same = ids is None or (ids[0][b, i] == ids[1][b, j] and ids[0][b, i] >= 0)
        seen[b, i, j] = near and same and (d >= 0 or not causal)
    return seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("segments", [False, True])
def test_visibility_equals_loops(causal: bool, window: int | None, segments: bool) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.integers(0, 12, (2, 7)), rng.integers(0, 12, (2, 11))
    ids = (rng.integers(-1, 3, (2, 7)), rng.integers(-1, 3, (2, 11))) if segments else None
    want = brute(q, k, ids, causal, window)
    columns = (None, None) if ids is None else (ids[0][:, :, None], ids[1][:, None, :])
    got = masks.visible(jnp.asarray(q)[:, :, None], jnp.asarray(k)[:, None, :], *columns, causal=causal, window=window)
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


def test_last_visible_key_in_storage_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    q, k = rng.integers(0, 12, (2, 7)), rng.integers(0, 12, (2, 11))
    ids = rng.integers(-1, 3, (2, 7)), rng.integers(-1, 3, (2, 11))
    seen = brute(q, k, ids, True, None)
    want = [[max(np.flatnonzero(row), default=-1) for row in rows] for rows in seen]
    for pairs in (masks._PAIRS, 1, 7 * 4):  # one block, one key at a time, blocks that overlap at the end
        monkeypatch.setattr(masks, "_PAIRS", pairs)
        got = masks.last_visible(jnp.asarray(q), jnp.asarray(k), tuple(map(jnp.asarray, ids)))
        np.testing.assert_array_equal(got, want)


def test_differences_of_gate_sums_do_not_lose_resolution_with_length() -> None:
    length = 65_536
    rng = np.random.default_rng(0)
    gates = -np.log1p(np.exp(-rng.normal(size=(1, length, 2)))).astype(np.float32)
    gates[0, 1000] = -1e5  # one gate that shuts completely
    exact = np.cumsum(gates.astype(np.float64), axis=1)
    high, low = (np.asarray(x) for x in running_sums(jnp.asarray(gates)))
    plain = np.cumsum(gates, axis=1, dtype=np.float32)
    for lag in (1, 64, 5000):
        late = slice(40_000, length - lag)
        difference = lambda x, lag=lag, late=late: (np.roll(x, -lag, 1) - x)[:, late]
        want = difference(exact)
        error = np.abs((difference(high) + difference(low)) / want - 1).max()
        assert error < 3e-7, (lag, error)
        assert np.abs(difference(plain) - want).max() > 1e-3  # what a single float32 sum would have done


@pytest.mark.parametrize("form", [gate_sums._by_places, gate_sums._by_chunks])
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 255, 257, 4100])
def test_both_forms_of_gate_sums_are_those_of_float64(form: Any, length: int) -> None:
    rng = np.random.default_rng(length)
    high = -np.exp(3 * rng.normal(size=(2, length, 3))).astype(np.float32)
    low = (high * rng.uniform(-(2.0**-25), 2.0**-25, high.shape)).astype(np.float32)
    starts = rng.uniform(size=(2, length, 1)) * length < 10
    total = np.zeros((2, 3))
    want = np.empty(high.shape)
    for i in range(length):
        total = np.where(starts[:, i], 0, total) + high[:, i].astype(np.float64) + low[:, i]
        want[:, i] = total
    got = jax.jit(form)(*map(jnp.asarray, (high, low, starts)))
    assert np.abs(np.asarray(got[1]) / np.asarray(got[0])).max(initial=0) <= 2.0**-24  # lo is what hi rounds off
    np.testing.assert_allclose(np.asarray(got[0], np.float64) + np.asarray(got[1]), want, rtol=3e-14)


@pytest.mark.parametrize("shape", [(0, 5, 2), (0, 40, 2), (2, 40, 0), (1, 0, 2)])
def test_sums_of_no_gates_are_none(shape: tuple[int, ...]) -> None:
    high, low = jax.jit(running_sums)(jnp.zeros(shape))
    assert high.shape == low.shape == shape


@pytest.mark.parametrize("form", [gate_sums._by_places, gate_sums._by_chunks])
@pytest.mark.parametrize("length", [1, 16, 17, 250, 257, 4099])  # one chunk, one level of them, two, three
@pytest.mark.parametrize("shut", [False, True])
def test_sums_of_documents_and_their_gradients_are_those_of_float64(
    form: Any, length: int, shut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_sums, "_running", form)
    rng = np.random.default_rng(length)
    ids = np.sort(rng.integers(0, 4, (2, length)), axis=1)
    ids[:, length - length // 5 :] = -1  # packed documents, then padding
    gates = -np.exp(2 * rng.normal(size=(2, length, 3))).astype(np.float32)
    if shut:
        closed = rng.random(gates.shape) < 0.1
        gates = np.where(closed, -(10.0 ** rng.uniform(3, 38, gates.shape)), gates).astype(np.float32)
        gates[rng.random(gates.shape) < 0.02] = -np.inf
    do = rng.normal(size=gates.shape).astype(np.float32)
    (high, low), back = jax.vjp(jax.jit(lambda x: document_sums(x, jnp.asarray(ids))), jnp.asarray(gates))
    got, grad = np.asarray(high, np.float64) + np.asarray(low), back((jnp.asarray(do), jnp.zeros_like(high)))[0]

    real = (ids >= 0)[:, :, None]
    starts = np.asarray(starts_of(jnp.asarray(ids)))
    used = np.where(real, np.maximum(gates.astype(np.float64), gate_sums.SHUT), 0)
    want, want_grad, size = np.empty(got.shape), np.zeros(got.shape), np.zeros(got.shape)
    for b in range(2):
        for begin, end in itertools.pairwise([*np.flatnonzero(starts[b]), length]):
            want[b, begin:end] = np.cumsum(used[b, begin:end], axis=0)
            later = lambda x, part=slice(begin, end), b=b: np.cumsum(x[b, part].astype(np.float64)[::-1], axis=0)[::-1]
            want_grad[b, begin:end], size[b, begin:end] = later(do), later(np.abs(do))
    open_ = real & ~starts[:, :, None] & (gates >= gate_sums.SHUT)
    np.testing.assert_allclose(got, want, rtol=3e-14)
    assert (np.abs(np.where(open_, grad - want_grad, grad)) <= 2.0**-23 * size).all()
    assert not np.asarray(grad)[~np.broadcast_to(open_, grad.shape)].any()


def test_gate_sums_are_written_down_on_a_cpu_and_have_no_loop_elsewhere() -> None:
    """A loop's result cannot be made over again inside what reads it; on a GPU each turn would be a kernel."""
    traced = jax.jit(jax.grad(lambda x: jnp.square(running_sums(x)[0]).sum())).trace(jnp.zeros((2, 300, 3)))
    text = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")}
    # Each way: two loops over tokens, two over chunks of them, one over the two chunks of those.
    assert {name: text[name].count("stablehlo.while") for name in text} == {"cpu": 10, "cuda": 0, "tpu": 0}
    if jax.default_backend() == "cpu":
        compiled = jax.jit(lambda x: running_sums(x)[0]).lower(jnp.zeros((2, 300, 3))).compile()
        assert " while(" in compiled.as_text()


def test_gradient_of_gate_sums() -> None:
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.sort(rng.integers(-1, 3, (2, 30)), axis=1))
    starts = starts_of(ids)
    with x64():
        x, w = rng.normal(size=(2, 30, 3)), rng.normal(size=(2, 30, 3))
        total, back = jax.vjp(lambda x: running_sums(x, starts)[0], jnp.asarray(x))
        want, grad = np.zeros_like(x), np.zeros_like(x)
        for b, i, j in np.ndindex(2, 30, 30):
            if j <= i and not np.asarray(starts)[b, j + 1 : i + 1].any():
                want[b, i] += x[b, j]
                grad[b, j] += w[b, i]
        np.testing.assert_allclose(total, want, atol=1e-12)
        np.testing.assert_allclose(back(jnp.asarray(w))[0], grad, atol=1e-12)


def test_sums_restart_only_where_no_document_reaches_across() -> None:
    ids = jnp.array([[-1, 0, 0, -1, 0, 1, 1, 2, -1], [5, 5, 3, 3, 5, 6, 6, 2, 2]])
    want = [[1, 1, 0, 0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(starts_of(ids), np.array(want, bool))


def test_sums_that_grow_token_by_token_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    gates = -np.log1p(np.exp(-rng.normal(size=(2, 40_000, 2)))).astype(np.float32)
    step = jax.jit(extended_sums)
    cuts = np.r_[0, 30_000, 30_001 + np.arange(200), 40_000]
    sums = jnp.zeros((2, 2)), jnp.zeros((2, 2))
    parts = []
    for begin, end in itertools.pairwise(cuts):
        parts.append(step(sums, jnp.asarray(gates[:, begin:end])))
        sums = jax.tree.map(lambda x: x[:, -1], parts[-1])
    high, low = (np.concatenate(x, axis=1).astype(np.float64) for x in zip(*parts, strict=True))
    exact = np.cumsum(gates.astype(np.float64), axis=1)
    for lag in (1, 500):
        got, want = (high + low)[:, lag:] - (high + low)[:, :-lag], exact[:, lag:] - exact[:, :-lag]
        assert np.abs(got / want - 1).max() < 3e-7


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_sums_given_as_pairs_are_the_gates_they_come_from(implementation: str) -> None:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = draw(2, 3, 4, 8), draw(2, 30, 2, 8), draw(2, 30, 2, 8)
    gates, do = -jnp.exp(draw(2, 30, 4)), draw(2, 3, 4, 8)

    def run(gates: jax.Array, pair: bool) -> jax.Array:
        high, low = running_sums(gates)
        given = ((high[:, -3:], low[:, -3:]), (high, low)) if pair else gates
        return (do * attention(q, k, v, log_gates=given, implementation=implementation)).sum()

    (want, grad), (got, back) = (jax.value_and_grad(run)(gates, pair) for pair in (False, True))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(back[:, 1:], grad[:, 1:], atol=1e-5)  # the first gate lies between no two tokens
