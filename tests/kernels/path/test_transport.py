"""Spans: triangular inverses, joins in any order, and products that neither grow nor lose precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.path.decode import summarise
from kernels.path.plan import Plan, check_plan, choose_plan
from kernels.path.reference import carried_scores
from kernels.path.shapes import ODD_LENGTHS
from kernels.path.transport import Span, span, span_scores, unit_lower_inverse
from tests.helpers import relative_rms, x64


def draw(seed: int, length: int, dim: int, groups: int = 2, dtype: Any = np.float64) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(2, length, dim))
    arrays = (
        rng.normal(size=(2, groups, length, dim)),
        rng.normal(size=(2, length, dim)),
        w / np.linalg.norm(w, axis=-1, keepdims=True),
        rng.uniform(0, 2, (2, length)),
    )
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def by_definition(q: Any, k: Any, w: Any, beta: Any) -> Span:
    """The span of one transition after the other."""
    scores = jax.vmap(carried_scores)(jnp.moveaxis(q, 1, 2), k, w, beta)
    eye = np.eye(k.shape[-1])
    h = eye - np.asarray(beta)[..., None, None] * np.asarray(w)[..., :, None] * np.asarray(w)[..., None, :]
    m, keys, queries = np.broadcast_to(eye, (2, *eye.shape)), np.asarray(k).copy(), np.zeros(q.shape)
    for t in range(k.shape[1]):
        m = m @ h[:, t]
        queries[:, :, t] = np.einsum("bgd,bed->bge", q[:, :, t], m)
        keys[:, :t] = keys[:, :t] @ h[:, t]
    return Span(jnp.moveaxis(scores, 1, 2), queries, keys, m)


def assert_same(got: Span, want: Span, tolerance: float) -> None:
    np.testing.assert_allclose(np.tril(got.scores), np.tril(want.scores), atol=tolerance)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)


@pytest.mark.parametrize(("length", "block"), [(1, 1), (12, 3), (16, 1), (20, 20), (32, 32), (64, 16)])
def test_span_is_one_transition_after_the_other(length: int, block: int) -> None:
    with x64():
        arrays = draw(length, length, 5)
        got = jax.jit(span, static_argnums=4)(*arrays, block)
        assert_same(got, by_definition(*arrays), 1e-13)


def test_scores_alone_are_those_of_the_span() -> None:
    with x64():
        arrays = draw(0, 24, 5)
        for block in (24, 6):
            scores = jax.jit(span_scores, static_argnums=4)(*arrays, block)
            np.testing.assert_allclose(np.tril(scores), np.tril(by_definition(*arrays).scores), atol=1e-13)


@pytest.mark.parametrize("size", [1, 7, 16, 32, 44, 64])
def test_inverse_of_unit_triangles(size: int) -> None:
    with x64():
        lower = jnp.asarray(np.tril(np.random.default_rng(size).normal(size=(3, size, size)), -1) / size**0.5)
        got = jax.jit(unit_lower_inverse)(lower)
        np.testing.assert_allclose(got, np.linalg.inv(np.eye(size) + np.asarray(lower)), atol=1e-10)


def test_gradient_of_the_inverse() -> None:
    with x64():
        rng = np.random.default_rng(0)
        lower, weight, step = (jnp.asarray(np.tril(rng.normal(size=(20, 20)), -1)) for _ in range(3))
        value = jax.jit(lambda x: (unit_lower_inverse(jnp.tril(x * 0.3, -1)) * weight).sum())
        slope = (value(lower + 1e-6 * step) - value(lower - 1e-6 * step)) / 2e-6
        np.testing.assert_allclose((jax.grad(value)(lower) * step).sum(), slope, rtol=1e-7)


@pytest.mark.parametrize("kind", ["random", "repeated", "correlated"])
@pytest.mark.parametrize("beta", [1.99, 2.0])
def test_float32_inverse_near_two(kind: str, beta: float) -> None:
    """The worst case for a triangular solve, nearly equal w and beta near 2: entries stay below 2, errors small."""
    rng = np.random.default_rng(1)
    w = rng.normal(size=(4, 64, 64))
    w = {"random": w, "repeated": np.broadcast_to(w[:, :1], w.shape), "correlated": w[:, :1] * 2 + w}[kind]
    w32 = np.float32(w / np.linalg.norm(w, axis=-1, keepdims=True))
    lower = np.tril(beta * w32.astype(np.float64) @ np.swapaxes(w32, -1, -2), -1)
    got = jax.jit(unit_lower_inverse)(jnp.asarray(lower, jnp.float32))
    assert np.abs(got).max() < 2.01
    assert np.abs(got - np.linalg.inv(np.eye(64) + lower)).max() < 1e-4


def tokens(kind: str, beta: float, seed: int, length: int = 4096, dim: int = 64) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(1, 1 if kind == "repeated" else length, 1, dim))
    w = np.broadcast_to(w / np.linalg.norm(w, axis=-1, keepdims=True), (1, length, 1, dim))
    q, k = rng.normal(size=(2, 1, length, 1, dim))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, w, np.full((1, length, 1), beta)))


@pytest.mark.parametrize("kind", ["random", "repeated"])
def test_long_products_stay_contractions(kind: str) -> None:
    """4096 tokens, all different or all the same, beta at and near 2, five seeds: no vector grows, none is lost at 2.

    The same token 4096 times at beta = 2 adds up rounding errors of one sign: hence the wider bound.
    """
    slack = {"random": 1e-3, "repeated": 1e-2}[kind]
    run = jax.jit(summarise)
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float64), axis=-1)
    for beta in (1.9, 1.99, 2.0):
        for seed in range(5):
            q, k, w, b = tokens(kind, beta, seed)
            chunk = run(q, k, w, b)
            assert np.linalg.norm(np.asarray(chunk.m[0, 0], np.float64), 2) <= 1 + slack
            for moved, raw in ((chunk.q, q), (chunk.k, k)):
                assert (norm(moved) <= norm(raw) * (1 + slack)).all()
                if beta == 2.0:
                    assert (norm(moved) >= norm(raw) * (1 - slack)).all()


def test_long_products_in_float32_are_precise() -> None:
    """Against float64 after 4096 random reflections."""
    arrays = tokens("random", 2.0, 0)
    run = jax.jit(summarise)
    got = run(*arrays)
    with x64():
        want = run(*(jnp.asarray(x, jnp.float64) for x in arrays))
    for a, b in zip(got, want, strict=True):
        assert relative_rms(a, b) < 2e-5


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
def test_plans_cover_every_row_with_little_padding(dim: int) -> None:
    for length in (*ODD_LENGTHS, 255, 256, 257, 1000, 4096, 5000, 65536):
        plan = choose_plan(length, dim)
        check_plan(plan, length)
        assert plan.length < 1.25 * length + 16


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(1, 24, 5), r"block · 2ⁿ"),
        (Plan(1, 24, 8), r"block · 2ⁿ"),
        (Plan(1, 34, 34), "halvings"),
        (Plan(2, 8, 8), "the row has 20"),
    ],
)
def test_plans_that_cannot_work(plan: Plan, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_plan(plan, 20)
