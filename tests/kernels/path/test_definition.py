"""What the logits are: the definition against explicit matrix products, and the cases with a closed form."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.api import attention
from kernels.path.api import path_attention
from kernels.path.plan import Plan
from kernels.path.shapes import Shape
from tests.helpers import x64
from tests.kernels.path.support import Options, attend, compiled, compiled_gradients, cotangents, draw, logits

SHAPE = Shape(2, 11, 4, 6, kv_heads=2)
SCALE = 6**-0.5
FULL = Options("ggd", scale_gates=True, sharpen_prior=True, scale=0.4)
WAYS: dict[str, Any] = {"reference": "reference", "xla": Plan(3, 4, 2)}
both = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def plain(seed: int, **options: Any) -> dict[str, Any]:
    return draw(SHAPE, seed, gates=False, sharpness=False, **options)


def lower(z: np.ndarray) -> np.ndarray:
    """The visible logits."""
    return z[..., *np.tril_indices(z.shape[-1])]


def carried(arrays: dict[str, Any], scale: float) -> np.ndarray:
    """scale · q_iᵀ H_i … H_{j+1} k_j by multiplying matrices out, [B, H, T, T]."""
    q, k, w, beta = (np.asarray(arrays[name]) for name in ("q", "k", "w", "beta"))
    batch, length, heads, dim = q.shape
    out = np.zeros((batch, heads, length, length))
    for b, h in itertools.product(range(batch), range(heads)):
        kv = h // (heads // k.shape[2])
        for i, j in itertools.product(range(length), range(length)):
            product = np.eye(dim)
            for t in range(j + 1, i + 1):  # H_{j+1} acts on the key first
                product = (np.eye(dim) - beta[b, t, kv] * np.outer(w[b, t, kv], w[b, t, kv])) @ product
            out[b, h, i, j] = scale * q[b, i, h] @ product @ k[b, j, kv]
    return out


def softmax(z: np.ndarray, v: Any) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) of logits [B, H, T, T]."""
    seen = np.where(np.tril(np.ones_like(z[0, 0], bool)), z, -np.inf)
    lse = np.log(np.exp(seen).sum(-1))
    v = np.repeat(np.asarray(v), z.shape[1] // v.shape[2], axis=2)
    return np.einsum("bhts,bshd->bthd", np.exp(seen - lse[..., None]), v), np.moveaxis(lse, 1, 2)


@both
def test_logits_are_products_of_transitions(way: Any) -> None:
    with x64():
        arrays = plain(0)
        np.testing.assert_allclose(lower(logits(arrays, way)), lower(carried(arrays, SCALE)), atol=1e-13)


@both
@pytest.mark.parametrize(
    "options", [FULL, Options("ggd", sharpen_prior=False, scale=0.4)], ids=["inside-the-scale-and-sharpened", "outside"]
)
def test_prior_gates_and_sharpness_add_up(way: Any, options: Options) -> None:
    with x64():
        arrays = draw(SHAPE, 3, prior="ggd")
        index = np.arange(SHAPE.length)
        distance = np.minimum(index[None, :] - index[:, None], 0)
        alpha, power, mu = (np.asarray(arrays["params"][name])[:, None, None] for name in ("alpha", "beta", "mu"))
        prior = -np.exp(alpha) * (np.abs(distance[None] - 2 * np.sinh(mu)) + 1e-5) ** power
        sums = np.moveaxis(np.cumsum(arrays["log_gates"], 1), 1, 2)
        bias = prior[None] + (0.4 if options.scale_gates else 1.0) * (sums[..., :, None] - sums[..., None, :])
        r = np.moveaxis(np.asarray(arrays["sharpness"]), 1, 2)[..., None]
        content = carried(arrays, 0.4)
        want = r * (content + bias) if options.sharpen_prior else r * content + bias
        for a, b in zip(compiled(options, way)(arrays, None), softmax(want, arrays["v"]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


@both
def test_two_tokens(way: Any) -> None:
    """The query's own transition acts, the key's own does not; the first token's has nothing to act on."""
    with x64():
        arrays = plain(1)
        q, k, w, beta = (np.asarray(arrays[name]) for name in ("q", "k", "w", "beta"))
        k, w, beta = (np.repeat(x, 2, axis=2) for x in (k, w, beta))
        z = logits(arrays, way)
        np.testing.assert_allclose(z[:, :, 0, 0], SCALE * (q[:, 0] * k[:, 0]).sum(-1), atol=1e-14)
        np.testing.assert_allclose(z[:, :, 1, 1], SCALE * (q[:, 1] * k[:, 1]).sum(-1), atol=1e-14)
        moved = k[:, 0] - (beta[:, 1] * (w[:, 1] * k[:, 0]).sum(-1))[..., None] * w[:, 1]
        np.testing.assert_allclose(z[:, :, 1, 0], SCALE * (q[:, 1] * moved).sum(-1), atol=1e-14)


@both
def test_first_transition_does_nothing(way: Any) -> None:
    with x64():
        arrays = draw(SHAPE, 1, prior="ggd")
        out, grads = compiled_gradients(FULL, way)(arrays, None, *cotangents(arrays))
        assert not np.asarray(grads["w"])[:, 0].any()
        assert not np.asarray(grads["beta"])[:, 0].any()
        other = arrays | {"w": arrays["w"].at[:, 0].set(7.0), "beta": arrays["beta"].at[:, 0].set(1.3)}
        again, _ = compiled_gradients(FULL, way)(other, None, *cotangents(arrays))
        for a, b in zip(out, again, strict=True):
            np.testing.assert_array_equal(a, b)


@jax.jit
def fox(q: Any, k: Any, v: Any, log_gates: Any, sharpness: Any) -> Any:
    common: Any = {"log_gates": log_gates, "sharpness": sharpness, "return_lse": True}
    return attention(q, k, v, implementation="reference", **common)


@both
@pytest.mark.parametrize("still", ["w", "beta"])
def test_without_transitions_it_is_attention(way: Any, still: str) -> None:
    """w = 0 or beta = 0: plain attention, with gates the forgetting transformer."""
    with x64():
        arrays = draw(SHAPE, 2)
        arrays[still] = jnp.zeros_like(arrays[still])
        want = fox(*(arrays[name] for name in ("q", "k", "v", "log_gates", "sharpness")))
        for a, b in zip(compiled(Options(), way)(arrays, None), want, strict=True):
            np.testing.assert_allclose(a, b, atol=3e-13)


@both
def test_gate_conventions(way: Any) -> None:
    """Open gates are no gates; gates inside the scale equal gates outside that are √D times smaller."""
    with x64():
        arrays = draw(SHAPE, 4) | {"sharpness": jnp.ones((2, 11, 4))}
        inside, outside = compiled(Options(scale_gates=True), way), compiled(Options(), way)
        open_gates = arrays | {"log_gates": jnp.zeros_like(arrays["log_gates"])}
        want = softmax(carried(arrays, SCALE), arrays["v"])
        for run in (inside, outside):
            for a, b in zip(run(open_gates, None), want, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-13)
        smaller = arrays | {"log_gates": arrays["log_gates"] * SCALE}
        for a, b in zip(inside(arrays, None), outside(smaller, None), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-13)


@both
def test_one_reflection_repeated(way: Any) -> None:
    """Constant w with beta = 2: H² = I, so only the parity of the distance matters."""
    with x64():
        arrays = plain(5, repeated=True) | {"beta": jnp.full((2, 11, 2), 2.0)}
        q, k, w = (np.asarray(arrays[name]) for name in ("q", "k", "w"))
        k, w = np.repeat(k, 2, axis=2), np.repeat(w, 2, axis=2)
        flipped = k - 2 * (w * k).sum(-1, keepdims=True) * w
        even, odd = (SCALE * np.einsum("bihd,bjhd->bhij", q, x) for x in (k, flipped))
        index = np.arange(11)
        want = np.where((index[:, None] - index[None, :]) % 2 == 0, even, odd)
        np.testing.assert_allclose(lower(logits(arrays, way)), lower(want), atol=1e-13)


@both
def test_one_projection_repeated(way: Any) -> None:
    """Constant w with beta = 1: every earlier key has lost its part along w, once and for all."""
    with x64():
        arrays = plain(6, repeated=True) | {"beta": jnp.ones((2, 11, 2))}
        q, k, w = (np.asarray(arrays[name]) for name in ("q", "k", "w"))
        k, w = np.repeat(k, 2, axis=2), np.repeat(w, 2, axis=2)
        projected = k - (w * k).sum(-1, keepdims=True) * w
        own, past = (SCALE * np.einsum("bihd,bjhd->bhij", q, x) for x in (k, projected))
        want = np.where(np.eye(11, dtype=bool), own, past)
        np.testing.assert_allclose(lower(logits(arrays, way)), lower(want), atol=1e-13)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_one_layer_decides_permutation_words(implementation: str) -> None:
    """The construction of Theorem 2.1 (arXiv 2505.16381): swaps of five elements after a '#'; is the word the identity?

    Reflections along (e_x − e_y)/√2 permute the key of '#', the first head's query tests whether it is back in order,
    the second head knows the length; the sign of their difference is the answer. The middle value of the query, −54.5
    for 1² + … + 5² = 55, separates the identity from every other order.
    """
    count, length = 64, 13
    rng = np.random.default_rng(0)
    pairs = np.array(list(itertools.combinations(range(5), 2)))
    swaps = pairs[rng.integers(0, len(pairs), (count, length - 1))]
    swaps[: count // 2, (length - 1) // 2 :] = swaps[: count // 2, : (length - 1) // 2][:, ::-1]  # half of them undo
    n = rng.integers(1, length, count)
    n[: count // 2] = length - 1
    w = np.zeros((count, length, 2, 6), np.float32)
    order = np.tile(np.arange(5), (count, 1))
    for row, words in enumerate(swaps):
        for t, (x, y) in enumerate(words[: n[row]]):
            w[row, t + 1, 0, [x, y]] = 0.5**0.5, -(0.5**0.5)
            order[row, [x, y]] = order[row, [y, x]]
    q, k, v = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    q[:, :, 0] = n[:, None, None] * np.array([1, 2, 3, 4, 5, -54.5], np.float32)
    k[:, 0, 0] = 1, 2, 3, 4, 5, 1
    v[:, 0, :, 0] = 1
    beta = np.full(w.shape[:3], 2, np.float32)
    run = jax.jit(lambda *x: path_attention(*x, scale=1.0, implementation=implementation))
    o = np.asarray(run(*(jnp.asarray(x) for x in (q, k, v, w, beta))))[np.arange(count), n, :, 0]
    identity = (order == np.arange(5)).all(1)
    assert identity.sum() >= count // 2
    assert not identity.all()
    np.testing.assert_array_equal(o[:, 0] > o[:, 1], identity)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_two_layers_solve_the_flip_flop_language(implementation: str) -> None:
    """The construction of Theorem A.1 (arXiv 2505.16381): pairs of an instruction (write, read, ignore) and a bit; the
    answer to the last read is the bit that was written last.

    Layer 1 gives every bit the instruction before it: instructions have the key e1 and project e1 away from all earlier
    keys. A clipped linear map marks the bits that were written. In layer 2 these have the key e1 and project it away
    from earlier ones, so that the newest alone is left for the query of the last token.
    """
    count, pairs = 48, 20
    rng = np.random.default_rng(1)
    instruction = rng.choice(3, (count, pairs), p=[0.3, 0.3, 0.4])  # write, read, ignore
    instruction[:, 0], instruction[:, -1] = 0, 1
    bit = rng.integers(0, 2, (count, pairs))
    last = np.array([np.flatnonzero(row == 0)[-1] for row in instruction])
    length = 2 * pairs - 1  # it ends with the last read
    one_hot = np.zeros((count, 2 * pairs, 5), np.float32)  # instructions, then bits
    one_hot[:, 0::2, :3] = np.eye(3)[instruction]
    one_hot[:, 1::2, 3:] = np.eye(2)[bit]
    x = jnp.asarray(one_hot[:, :length])
    run = jax.jit(lambda *z: path_attention(*(a[:, :, None] for a in z), scale=1.0, implementation=implementation))
    e1, e2 = jnp.eye(5)[:2, None, None]
    is_instruction = x[..., :3].sum(-1, keepdims=True)
    w = is_instruction * e1 + (1 - is_instruction) * e2
    q = jnp.broadcast_to(length * e1, x.shape)
    ones = jnp.ones(x.shape[:2])
    before = run(q, is_instruction * e1, x, w, ones)[:, :, 0]
    written = jnp.clip(4 * (before[..., :1] + x[..., 3:] - 1.5), 0, 1)  # [count, length, 2], by the value of the bit
    any_bit = written.sum(-1, keepdims=True)
    values = jnp.pad(written, ((0, 0), (0, 0), (0, 3)))
    answer = np.asarray(run(q, any_bit * e1, values, any_bit * e1, any_bit[..., 0]))[:, -1, 0, :2].argmax(-1)
    np.testing.assert_array_equal(answer, bit[np.arange(count), last])


def test_reference_differentiates_the_definition() -> None:
    """Gradients of the reference against differences in float64, at beta = 0, 1 and 2 as well."""
    with x64():
        arrays = draw(SHAPE, 0, prior="ggd")
        arrays["beta"] = arrays["beta"].at[0, 1:4, 0].set(jnp.array([0.0, 1.0, 2.0]))
        do, dlse = cotangents(arrays)
        _, grads = compiled_gradients(FULL, "reference")(arrays, None, do, dlse)
        leaves, tree = jax.tree.flatten(arrays)
        rng = np.random.default_rng(1)
        step = 3e-5

        @jax.jit
        def value(leaves: Any) -> Any:
            o, lse = attend(jax.tree.unflatten(tree, leaves), FULL, "reference")
            return (o * do).sum() + (lse * dlse).sum()

        for n, (path, slope) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
            direction = rng.normal(size=leaves[n].shape)
            at = [value([*leaves[:n], leaves[n] + t * step * direction, *leaves[n + 1 :]]) for t in (-2, -1, 1, 2)]
            want = (8 * (at[2] - at[1]) - (at[3] - at[0])) / (12 * step)  # fourth order
            got = (slope * direction).sum()
            np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-8, err_msg=jax.tree_util.keystr(path))
