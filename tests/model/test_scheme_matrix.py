"""Every scheme in the whole model: causality, packing, rematerialisation, and training = prefill = decode.

The list of schemes comes from the registry's matrix, so a new part or option cannot be left out.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.config import ModelConfig
from bampath.generate import stream_features
from bampath.model import LM, head_kernel, init_cache
from bampath.params import unbox
from bampath.positions import parse
from tests.positions.matrix import FEW, SPECS

CONFIG = ModelConfig(
    vocab_size=97,
    dim=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    position="nope",
    train_length=64,
    init="normal",
    init_std=0.2,
)
# These run in every suite. The rest of the matrix runs too, but is marked slow.
HEADLINE = ("nope", "sinusoidal", "rope", "alibi", "bam+ssmax", "fox", "path", "path+fox", "path+bam+ssmax")


def matrix(every_time: Sequence[str], without: str = "") -> list[Any]:
    """The whole matrix as test parameters; what is not in `every_time` is marked slow, specs with `without` are out."""
    mark = lambda spec: spec if spec in every_time else pytest.param(spec, marks=pytest.mark.slow)
    return [mark(spec) for spec in sorted({*SPECS, *HEADLINE}) if not without or without not in spec]


@cache
def build(spec: str, **changes: object) -> tuple[LM, dict]:
    """A tiny model with this scheme and random parameters (positional ones moved away from their initial values).

    A pattern of layers appears whole.
    """
    layers = max(CONFIG.layers, len(parse(spec).layers))
    model = LM(dataclasses.replace(CONFIG, **{"layers": layers, "position": spec, **changes}))
    params = unbox(model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return model, jax.tree.unflatten(tree, moved)


def random_tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, shape), jnp.int32)


@pytest.mark.parametrize("spec", matrix(HEADLINE))
def test_nothing_flows_from_the_future(spec: str) -> None:
    model, params = build(spec)
    tokens = jnp.arange(40, dtype=jnp.int32)[None, :]  # each position owns one row of the embedding

    def at(table: jax.Array) -> jax.Array:
        hidden = model.apply({"params": params | {"embedding": table}}, tokens, method="features")
        return (hidden[0, 25] * jnp.arange(1.0, CONFIG.dim + 1)).sum()

    reach = np.abs(np.asarray(jax.jit(jax.grad(at))(params["embedding"])))[:40].sum(1)
    assert not reach[26:].any()
    assert reach[20:26].all()  # further back a window may hide tokens


@pytest.mark.parametrize("spec", matrix(HEADLINE, without="count=absolute"))  # which counts across documents
def test_packed_documents_equal_solo_runs_in_values_and_gradients(spec: str) -> None:
    model, params = build(spec)
    documents = random_tokens(2, 17)
    row = jnp.concatenate([documents[0], documents[1], jnp.zeros(4, jnp.int32)])[None, :]
    ids = jnp.asarray([[0] * 17 + [1] * 17 + [-1] * 4])
    weights = jax.random.normal(jax.random.key(3), (34, CONFIG.dim))

    def packed(p: dict) -> jax.Array:
        return (model.apply({"params": p}, row, ids, method="features")[0, :34] * weights).sum()

    def solo(p: dict) -> jax.Array:
        return (model.apply({"params": p}, documents, method="features").reshape(34, -1) * weights).sum()

    (a, grad_a), (b, grad_b) = (jax.jit(jax.value_and_grad(f))(params) for f in (packed, solo))
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4)
    wanted = dict(jax.tree_util.tree_leaves_with_path(grad_b))
    for path, x in jax.tree_util.tree_leaves_with_path(grad_a):
        scale = max(float(jnp.abs(wanted[path]).max()), 1e-3)
        np.testing.assert_allclose(x / scale, wanted[path] / scale, atol=2e-4, err_msg=jax.tree_util.keystr(path))


def decode_gap(spec: str, length: int, prompt: int, chunk: int, **changes: object) -> float:
    """Largest difference between the full forward and chunked prefill followed by one-token decode."""
    model, params = build(spec, **changes)
    tokens = random_tokens(2, length)
    full = jax.jit(lambda t: model.apply({"params": params}, t, method="features"))(tokens)
    step = jax.jit(lambda cache, new: model.apply({"params": params}, new, cache, new >= 0, method="extend"))
    state, parts = init_cache(model.config, 2, length + 3), []
    for start in range(0, prompt, chunk):
        hidden, state = step(state, tokens[:, start : min(start + chunk, prompt)])
        parts.append(hidden)
    for t in range(prompt, length):
        hidden, state = step(state, tokens[:, t : t + 1])
        parts.append(hidden)
    return float(jnp.abs(jnp.concatenate(parts, axis=1) - full).max())


@pytest.mark.parametrize("spec", matrix([*HEADLINE, *FEW]))
def test_prefill_and_decode_equal_the_full_forward(spec: str) -> None:
    assert decode_gap(spec, length=40, prompt=30, chunk=15) < 1e-4


@pytest.mark.parametrize(
    "options", [(("qk_norm", True), ("tie_embeddings", True)), (("kv_heads", 1), ("head_dim", 16))]
)
def test_options_of_the_model_act_in_decode_as_in_training(options: tuple[tuple[str, object], ...]) -> None:
    assert decode_gap("rope+bam+ssmax", length=20, prompt=15, chunk=8, **dict(options)) < 1e-4


@pytest.mark.parametrize("spec", HEADLINE)
def test_three_hundred_decoded_tokens_do_not_drift(spec: str) -> None:
    assert decode_gap(spec, length=301, prompt=1, chunk=1) < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spec", matrix(["rope", "bam+ssmax", "fox", "path+fox"]))
def test_a_padded_row_equals_its_solo_run(spec: str, side: str) -> None:
    model, params = build(spec)
    lengths, width, more = (11, 4, 17), 17, 3
    extend = jax.jit(lambda cache, new, mask: model.apply({"params": params}, new, cache, mask, method="extend"))
    tokens = np.zeros((3, width), np.int32)
    mask = np.zeros((3, width), bool)
    rows = [np.asarray(random_tokens(n + more, seed=n)) for n in lengths]
    for i, n in enumerate(lengths):
        place = slice(width - n, width) if side == "left" else slice(0, n)
        tokens[i, place], mask[i, place] = rows[i][:n], True
    state = init_cache(model.config, 3, width + more)
    hidden, state = extend(state, jnp.asarray(tokens), jnp.asarray(mask))
    tail = []
    for t in range(more):
        new = jnp.asarray([[rows[i][n + t]] for i, n in enumerate(lengths)])
        out, state = extend(state, new, jnp.ones((3, 1), bool))
        tail.append(out)
    padded = jnp.asarray(
        [np.pad(row, (0, width + more - len(row))) for row in rows]
    )  # causal: the tail changes nothing
    want = jax.jit(lambda t: model.apply({"params": params}, t, method="features"))(padded)
    for i, n in enumerate(lengths):
        got = jnp.concatenate([hidden[i][mask[i]], *[out[i] for out in tail]])
        np.testing.assert_allclose(got, want[i, : n + more], atol=1e-4)


@pytest.mark.parametrize("spec", ["rope+fox", "path+bam+ssmax"])
def test_what_stands_in_unused_slots_and_under_padding_does_not_matter(spec: str) -> None:
    model, params = build(spec)
    tokens, mask = random_tokens(2, 12), np.ones((2, 12), bool)
    mask[0, :5] = False
    extend = jax.jit(lambda cache, new, mask: model.apply({"params": params}, new, cache, mask, method="extend"))
    found = []
    for value in (0.0, np.nan):
        state = init_cache(model.config, 2, 20)
        fill = lambda a, value=value: a + jnp.asarray(value, a.dtype)
        fields = ("k", "v", "log_gates", "gate_sums")
        layers = [
            dataclasses.replace(m, **{name: jax.tree.map(fill, getattr(m, name)) for name in fields})
            for m in state.layers
        ]
        hidden, state = extend(state.replace(layers=tuple(layers)), tokens, jnp.asarray(mask))
        last, _ = extend(state, tokens[:, :1], jnp.ones((2, 1), bool))
        found.append(np.concatenate([np.asarray(hidden)[mask].ravel(), np.asarray(last).ravel()]))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("spec", ["rope", "path+bam+ssmax"])
def test_rematerialisation_changes_no_number(spec: str) -> None:
    tokens, grads = random_tokens(2, 24), []
    _, params = build(spec)
    for remat in ("none", "full", "attention"):
        model, _ = build(spec, remat=remat)
        loss = lambda p, m=model: jnp.square(m.apply({"params": p}, tokens)).mean()
        grads.append(jax.jit(jax.grad(loss))(params))
    for other in grads[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads[0], other)


@pytest.mark.parametrize("spec", ["rope", "bam+ssmax", "path+fox"])
def test_bfloat16_stays_near_float32_and_positions_stay_exact(spec: str) -> None:
    model, params = build(spec)
    half, _ = build(spec, dtype="bfloat16")
    tokens = random_tokens(1, 50)
    want, got = (jax.jit(m.apply)({"params": params}, tokens) for m in (model, half))
    assert got.dtype == jnp.float32
    assert float(jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2))) < 0.05


def test_streamed_features_equal_the_whole_row() -> None:
    model, params = build("path+bam+ssmax")
    tokens = np.asarray(random_tokens(2, 61))
    whole = model.apply({"params": params}, jnp.asarray(tokens), method="features")
    pieces = [hidden for _, hidden in stream_features(model, params, tokens, chunk=16)]
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=1e-4)


def test_head_kernel_gives_the_logits() -> None:
    for tie in (False, True):
        model, params = build("rope", tie_embeddings=tie)
        tokens = random_tokens(1, 9)
        hidden = model.apply({"params": params}, tokens, method="features")
        np.testing.assert_allclose(hidden @ head_kernel(params), model.apply({"params": params}, tokens), atol=1e-5)
        assert ("head" in params) is not tie
