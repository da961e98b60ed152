"""Rows that see nothing or one key, poisoned padding, causality, extreme priors, merging over halves of the keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.api import DistancePrior, attention
from kernels.attention.shapes import Shape
from tests.helpers import x64
from tests.kernels.attention import support
from tests.kernels.attention.support import Arrays, Case

BACKENDS = ["reference", "xla"]
ROW = Shape(2, 30, 2, 8)
DOCUMENTS = Case(ROW, "ggd", "log", "inside", "left")  # also used with other ids: what differs is data
NOTHING = {
    "padding-left": DOCUMENTS,
    "padding-right": Case(ROW, "table", "pair", "outside", "right", window=7),
    "window": Case(ROW, "ggd", "log", "inside", window=2),
    "future": Case(ROW, "alibi", "log", "outside"),
    "more-queries": Case(Shape(2, 30, 2, 8, kv_length=9), "ggd", "log", "inside"),
}


def run(case: Case, diff: Arrays, fixed: Arrays, backend: str, weights: Any = None) -> Any:
    grid = support.small_grid(case) if backend == "xla" else None
    weights = support.cotangents(case, 0) if weights is None else weights
    return jax.tree.map(np.asarray, support.gradients(case, diff, fixed, weights, backend, grid))


def documents(ids: Any) -> Arrays:
    return {"segment_ids": jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (2, 30))}


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing_are_zero(backend: str, name: str) -> None:
    case = NOTHING[name]
    diff, fixed = support.draw(case, 0, np.float32)
    if name == "window":  # the keys lie 50 positions back: the window excludes all of them
        fixed = {"kv_positions": jnp.arange(30) - 50, "positions": jnp.arange(30)}
    if name == "future":  # the first ten queries come before every key
        fixed = {"kv_positions": jnp.arange(30), "positions": jnp.arange(30) - 10}
    empty = {
        "padding-left": lambda b, t: b == 1 or t < 10,
        "padding-right": lambda b, t: b == 1 or t >= 20,
        "window": lambda b, t: True,
        "future": lambda b, t: t < 10,
        "more-queries": lambda b, t: t < 21,
    }[name]
    rows = np.array([[empty(b, t) for t in range(30)] for b in range(2)])
    o, lse, grads = run(case, diff, fixed, backend)
    assert (o[rows] == 0).all()
    assert (lse[rows] == -np.inf).all()
    assert np.isfinite(lse[~rows]).all()
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all()
    assert (grads["q"][rows] == 0).all()
    assert (grads["sharpness"][rows] == 0).all()
    if rows.all():
        assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
    else:
        assert all(leaf.any() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["padding-left", "padding-right", "future"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_unseen_keys_do_not_matter(backend: str, name: str, poison: float) -> None:
    case = NOTHING[name]
    diff, fixed = support.draw(case, 0, np.float32)
    unseen = np.zeros((2, 30), bool)
    if name == "future":  # unused cache slots: keys after the last query
        fixed = {"kv_positions": jnp.arange(30), "positions": jnp.arange(30) - 10}
        unseen[:, 20:] = True
    else:
        unseen = np.asarray(fixed["segment_ids"]) < 0
    spoil = lambda x: jnp.where(unseen.reshape(2, 30, *[1] * (x.ndim - 2)), poison, x)
    names = ["k", "v"] if name == "future" else ["k", "v", "q", "sharpness", "log_gates"]  # padding spoils all of them
    bad = diff | {n: jax.tree.map(spoil, diff[n]) for n in names}
    want, got = run(case, diff, fixed, backend), run(case, bad, fixed, backend)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_has_no_gradient_to_later_tokens_or_other_documents(backend: str) -> None:
    diff, _ = support.draw(DOCUMENTS, 0, np.float32)
    # Weights of the farthest keys must not underflow: what is 0 then has another reason.
    diff["log_gates"], diff["params"]["alpha"] = diff["log_gates"] / 10, diff["params"]["alpha"] - 3
    fixed = documents([np.arange(30) // 30, np.arange(30) // 13])  # one document, and three
    for t in (0, 13, 22, 29):
        here = jnp.zeros((2, 30, 2)).at[:, t].set(1)
        weights = here[..., None] * support.cotangents(DOCUMENTS, 0)[0], here
        grads = run(DOCUMENTS, diff, fixed, backend, weights)[2]
        for name in ("k", "v", "log_gates"):
            for row, start in ((0, 0), (1, t // 13 * 13)):
                size = np.abs(grads[name][row]).reshape(30, -1).max(1)
                assert not size[t + 1 :].any(), (name, row, t)
                assert not size[:start].any(), (name, row, t)
                if name == "log_gates":  # no pair of a document has its first gate between them
                    assert size[start] == 0
                elif t > start:
                    assert size[start : t + 1].all(), (name, row, t)


def test_a_document_in_a_packed_row_equals_its_solo_run() -> None:
    solo = Case(Shape(2, 10, 2, 8), "ggd", "log", "inside")
    diff, _ = support.draw(DOCUMENTS, 0, np.float32)
    packed, _, grads = run(DOCUMENTS, diff, documents(np.arange(30) // 10), "xla")
    weights = support.cotangents(DOCUMENTS, 0)
    for part in (slice(0, 10), slice(10, 20), slice(20, 30)):
        alone = {n: x if n == "params" else x[:, part] for n, x in diff.items()}
        o, _, solo_grads = run(solo, alone, {}, "xla", tuple(w[:, part] for w in weights))
        np.testing.assert_allclose(packed[:, part], o, atol=2e-6)
        for name in ("q", "k", "v", "sharpness", "log_gates"):
            np.testing.assert_allclose(grads[name][:, part], solo_grads[name], atol=3e-5, err_msg=name)


@pytest.mark.parametrize("beta", [-6.0, -1.0, 3.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_one_key_is_its_value_and_has_no_score_gradient(backend: str, beta: float) -> None:
    diff, _ = support.draw(DOCUMENTS, 0, np.float32)
    diff["params"] = {"alpha": jnp.zeros(2), "beta": jnp.full(2, beta), "mu": jnp.zeros(2)}
    fixed = documents(np.arange(30))  # thirty documents of one token
    weights = support.cotangents(DOCUMENTS, 0, lse=0)
    for sharp in (diff["sharpness"], jnp.zeros_like(diff["sharpness"])):  # 0: SSMax of one key
        o, _, grads = run(DOCUMENTS, diff | {"sharpness": sharp}, fixed, backend, weights)
        np.testing.assert_array_equal(o, diff["v"])
        np.testing.assert_allclose(grads["v"], weights[0], rtol=1e-6)
        for name in ("q", "k", "sharpness", "params", "log_gates"):
            assert not any(x.any() for x in jax.tree.leaves(grads[name])), name


@pytest.mark.parametrize("beta", [-6.0, -2.0, 0.0, 3.0])
def test_extreme_priors_give_the_gradients_of_the_reference(beta: float) -> None:
    weights = support.cotangents(DOCUMENTS, 0, lse=0)
    with x64():
        diff, _ = support.draw(DOCUMENTS, 0)
        exact = diff | {"params": {"alpha": jnp.zeros(2), "beta": jnp.full(2, beta), "mu": jnp.zeros(2)}}
        want = run(DOCUMENTS, exact, documents(np.arange(30) // 16), "reference", weights)
    single = jax.tree.map(lambda x: x.astype(jnp.float32), exact)
    got = run(DOCUMENTS, single, documents(np.arange(30) // 16), "xla", weights)
    errors = support.distances((got[0], got[2]), (want[0], want[2]))
    assert max(errors.values()) < 2e-4, errors


def halves(args: Arrays, where: int, backend: str) -> tuple[jax.Array, jax.Array]:
    """Attention over keys before `where` and from it on, merged by their lse."""
    size = args["k"].shape[1]
    c_q, c_k = args.pop("log_gates")
    parts = []
    for part in (slice(0, where), slice(where, size)):
        cut = {name: args[name][:, part] for name in ("k", "v")}
        more = {"log_gates": (c_q, c_k[:, part]), "kv_positions": jnp.arange(size)[part]}
        more["positions"] = jnp.arange(args["q"].shape[1]) + size - args["q"].shape[1]
        parts.append(attention(**(args | cut | more), return_lse=True, implementation=backend))
    (o1, l1), (o2, l2) = parts
    lse = jnp.logaddexp(l1, l2)
    share = lambda l: jnp.exp(l - lse)[..., None]
    return share(l1) * o1 + share(l2) * o2, lse


def test_two_halves_of_the_keys_merge_into_the_whole() -> None:
    case = Case(Shape(2, 12, 4, 8, kv_heads=2, kv_length=30), "ggd", "pair", "inside")
    with x64():
        diff, _ = support.draw(case, 0)
        w_o, w_lse = support.cotangents(case, 0)

        def loss(diff: Arrays, merge: bool) -> Any:
            args = {"q": diff["q"], "k": diff["k"], "v": diff["v"], "log_gates": diff["log_gates"]}
            args |= {"sharpness": diff["sharpness"], "prior": DistancePrior(diff["params"], support.ggd)}
            whole = lambda: attention(**args, return_lse=True, implementation="reference")
            o, lse = halves(args, 13, "xla") if merge else whole()
            return (o * w_o).sum() + (lse * w_lse).sum()

        value = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        errors = support.distances(value(diff, True), value(diff, False))
    assert max(errors.values()) < 1e-11, errors
