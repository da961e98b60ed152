"""The chunked loss is the dense loss, in value, gradient and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.loss import chunk_columns, cross_entropy
from tests.helpers import relative_rms, x64


def dense(hidden, kernel, targets, weights):
    """Float64 loss in numpy: the sum over tokens of weight × (log-sum-exp − target logit)."""
    logits = np.einsum("btd,dv->btv", np.asarray(hidden, np.float64), np.asarray(kernel, np.float64))
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    picked = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    return float(((lse - picked) * np.asarray(weights, np.float64)).sum())


def dense_gradients(hidden, kernel, targets, weights):
    hidden, kernel = np.asarray(hidden, np.float64), np.asarray(kernel, np.float64)
    logits = np.einsum("btd,dv->btv", hidden, kernel)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    d = (p - np.eye(kernel.shape[1])[np.asarray(targets)]) * np.asarray(weights, np.float64)[..., None]
    return np.einsum("btv,dv->btd", d, kernel), np.einsum("btd,btv->dv", hidden, d)


def problem(seed, batch=2, length=13, dim=8, vocab=37, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(batch, length, dim)), dtype)
    kernel = jnp.asarray(rng.normal(size=(dim, vocab)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(batch, length)) * (rng.uniform(size=(batch, length)) > 0.3), jnp.float32)
    return hidden, kernel, targets, weights


@settings(max_examples=6, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(1, 17), chunk=st.integers(1, 40), seed=st.integers(0, 99))
def test_value_is_dense_for_any_length_and_chunk(batch, length, chunk, seed):
    args = problem(seed, batch, length)
    total, weight = jax.jit(cross_entropy, static_argnames="chunk")(*args, chunk=chunk)
    assert np.isclose(total, dense(*args), rtol=1e-5, atol=1e-5)
    assert np.isclose(weight, np.asarray(args[3]).sum(), rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 6, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_gradients_are_dense(chunk, dtype, tolerance):
    hidden, kernel, targets, weights = problem(0, dtype=dtype)
    mean = lambda h, k: cross_entropy(h, k, targets, weights, chunk=chunk)[0] / 100
    d_hidden, d_kernel = jax.jit(jax.grad(mean, argnums=(0, 1)))(hidden, kernel)
    want_hidden, want_kernel = dense_gradients(hidden, kernel.astype(dtype), targets, weights)
    assert d_hidden.dtype == dtype
    assert d_kernel.dtype == jnp.float32
    assert relative_rms(d_hidden, want_hidden / 100) < tolerance
    assert relative_rms(d_kernel, want_kernel / 100) < tolerance


def test_gradients_agree_with_finite_differences_in_float64():
    with x64():
        hidden, kernel, targets, weights = problem(1)
        hidden, kernel = hidden.astype(jnp.float64), kernel.astype(jnp.float64)
        loss = lambda h, k: cross_entropy(h, k, targets, weights, chunk=6)[0]
        grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, kernel)
        rng = np.random.default_rng(0)
        for i, gradient in enumerate(grads):
            direction = rng.normal(size=gradient.shape)
            step = [np.asarray(hidden), np.asarray(kernel)]
            ends = []
            for sign in (1, -1):
                moved = list(step)
                moved[i] = step[i] + sign * 1e-6 * direction
                ends.append(dense(*moved, targets, weights))
            assert np.isclose((ends[0] - ends[1]) / 2e-6, (np.asarray(gradient) * direction).sum(), rtol=1e-6)


def test_tokens_without_weight_cannot_spoil_the_loss():
    hidden, kernel, targets, weights = problem(2)
    weights = weights.at[:, 4].set(0)
    poisoned = hidden.at[:, 4].set(jnp.nan)
    targets = targets.at[:, 4].set(-1)
    loss = lambda h, k: cross_entropy(h, k, targets, weights, chunk=6)[0]
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, grads = gradient(poisoned, kernel)
    clean, clean_grads = gradient(hidden, kernel)
    assert value == clean
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(clean_grads), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not grads[0][:, 4].any()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16])
def test_targets_may_be_small_integers(dtype):
    hidden, _, targets, weights = problem(4)
    kernel = jnp.asarray(np.random.default_rng(5).normal(size=(8, 300)), jnp.float32)  # more words than 8 bits count
    small = cross_entropy(hidden, kernel, np.asarray(targets).astype(dtype), weights)[0]
    assert small == cross_entropy(hidden, kernel, targets, weights)[0]


def test_gradient_of_the_weights_is_the_loss_of_each_token():
    hidden, kernel, targets, weights = problem(3)
    weights = weights + 0.1
    got = jax.grad(lambda w: cross_entropy(hidden, kernel, targets, w, chunk=6)[0])(weights)
    each = [dense(hidden[:1, t : t + 1], kernel, targets[:1, t : t + 1], np.ones((1, 1))) for t in range(3)]
    np.testing.assert_allclose(got[0, :3], each, rtol=1e-5)


def temporary_bytes(length: int, vocab: int, dim: int = 64) -> int:
    shapes = [((1, length, dim), jnp.bfloat16), ((dim, vocab), jnp.float32), ((1, length), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(*s) for s in [*shapes, ((1, length), jnp.float32)]]
    step = jax.jit(jax.value_and_grad(lambda *a: cross_entropy(*a)[0], argnums=(0, 1)))
    return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_logits_of_a_long_row_never_exist_at_once():
    """T = 65,536 over 50,257 words: the dense logits alone are 13 GB; a chunk is 0.8 GB."""
    at_64k = temporary_bytes(65_536, 50_257)
    assert at_64k < 3.5e9
    assert at_64k - temporary_bytes(32_768, 50_257) < 1.5 * 32_768 * 64 * 4  # growth is of hidden states, not logits


def test_pieces_are_even_and_within_the_bound():
    assert chunk_columns(8, 512, 4096) == 512
    assert chunk_columns(8, 513, 4096) == 257  # two pieces of 257 rather than 512 + 1
    assert chunk_columns(9000, 512, 4096) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": jnp.zeros((2, 13, 9))}, "kernel"),
        ({"targets": jnp.zeros((2, 12), jnp.int32)}, "targets"),
        ({"weights": jnp.zeros((13,))}, "weights"),
        ({"chunk": 0}, "chunk=0"),
        ({"hidden": jnp.zeros((2, 0, 8))}, r"hidden has shape \(2, 0, 8\); every dimension must be at least 1"),
        ({"targets": jnp.zeros((2, 13))}, "targets has dtype float32; it must be int32"),
    ],
)
def test_wrong_shapes_are_named(change, message):
    hidden, kernel, targets, weights = problem(0)
    given = {"hidden": hidden, "kernel": kernel, "targets": targets, "weights": weights, "chunk": 8} | change
    chunk = given.pop("chunk")
    with pytest.raises((ValueError, TypeError), match=message):
        cross_entropy(*given.values(), chunk=chunk)
