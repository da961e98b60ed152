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
NOTHING = {
    "padding-left": Case(ROW, "ggd", "log", "inside", "left"),
    "padding-right": Case(ROW, "table", "pair", "outside", "right", window=7),
    "window": Case(ROW, "ggd", "log", "inside", window=2),
    "future": Case(ROW, "alibi", "log", "outside"),
    "more-queries": Case(Shape(2, 30, 2, 8, kv_length=9), "ggd", "log", "inside"),
}


def run(case: Case, diff: Arrays, fixed: Arrays, backend: str, seed: int = 0) -> Any:
    grid = support.small_grid(case) if backend == "xla" else None
    return jax.tree.map(np.asarray, support.gradients(case, diff, fixed, support.cotangents(case, seed), backend, grid))


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
    assert (grads["sharpness" if case.sharpness else "q"][rows] == 0).all()
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
    bad = dict(diff)
    for key in ("k", "v"):
        bad[key] = jnp.where(unseen[:, :, None, None], poison, diff[key])
    if name != "future":  # the queries of padding too, and their gates
        bad["q"] = jnp.where(unseen[:, :, None, None], poison, diff["q"])
        bad["sharpness"] = jnp.where(unseen[:, :, None], poison, diff["sharpness"])
        if case.gates == "log":
            bad["log_gates"] = jnp.where(unseen[:, :, None], poison, diff["log_gates"])
        else:
            bad["log_gates"] = tuple(jnp.where(unseen[:, :, None], poison, x) for x in diff["log_gates"])
    want, got = run(case, diff, fixed, backend), run(case, bad, fixed, backend)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_has_no_gradient_to_later_tokens_or_other_documents(backend: str) -> None:
    shape = Shape(1, 24, 2, 8)
    document = jnp.arange(24)[None] // 13
    for case, ids in (
        (Case(shape, "ggd", "log", "inside"), None),
        (Case(shape, "ggd", "log", "inside", "packed"), document),
    ):
        diff, _ = support.draw(case, 0, np.float32)
        fixed = {} if ids is None else {"segment_ids": ids}
        for t in (0, 13, 22):
            here = jnp.zeros((1, 24, 2)).at[:, t].set(1)
            weights = here[..., None] * support.cotangents(case, 0)[0], here
            grid = support.small_grid(case) if backend == "xla" else None
            _, _, grads = support.gradients(case, diff, fixed, weights, backend, grid)
            start = 13 if ids is not None and t >= 13 else 0
            for name in ("k", "v", "log_gates"):
                g = np.abs(np.asarray(grads[name])).reshape(24, -1).max(1)
                assert not g[t + 1 :].any(), name
                assert not g[:start].any(), name
                if name != "log_gates":
                    assert t == start or g[start : t + 1].all(), name


@pytest.mark.parametrize("beta", [-6.0, -1.0, 3.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_one_key_is_its_value_and_has_no_score_gradient(backend: str, beta: float) -> None:
    case = Case(Shape(2, 20, 2, 8), "ggd", None, "inside", "packed")
    diff, fixed = support.draw(case, 0, np.float32)
    diff["params"] = {"alpha": jnp.zeros(2), "beta": jnp.full(2, beta), "mu": jnp.zeros(2)}
    fixed = {"segment_ids": jnp.broadcast_to(jnp.arange(20), (2, 20))}  # twenty documents of one token
    for sharp in (diff["sharpness"], jnp.zeros_like(diff["sharpness"])):
        grid = support.small_grid(case) if backend == "xla" else None
        weights = support.cotangents(case, 0, lse=0)
        o, _, grads = support.gradients(case, diff | {"sharpness": sharp}, fixed, weights, backend, grid)
        np.testing.assert_array_equal(o, diff["v"])
        np.testing.assert_allclose(grads["v"], weights[0], rtol=1e-6)
        for name in ("q", "k", "sharpness", "params"):
            assert not any(np.asarray(x).any() for x in jax.tree.leaves(grads[name])), name


@pytest.mark.parametrize("beta", [-6.0, -2.0, 0.0, 3.0])
def test_extreme_priors_give_the_gradients_of_the_reference(beta: float) -> None:
    case = Case(Shape(1, 40, 2, 8), "ggd", None, "inside")
    with x64():
        diff, fixed = support.draw(case, 0)
        exact = diff | {"params": {"alpha": jnp.zeros(2), "beta": jnp.full(2, beta), "mu": jnp.zeros(2)}}
        want = support.gradients(case, exact, fixed, support.cotangents(case, 0, lse=0), "reference")
    single = jax.tree.map(lambda x: x.astype(jnp.float32), exact)
    got = support.gradients(case, single, fixed, support.cotangents(case, 0, lse=0), "xla", support.small_grid(case))
    for leaf in jax.tree.leaves(got[2]):
        assert np.isfinite(leaf).all()
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_halves_of_the_keys_merge_into_the_whole(backend: str) -> None:
    case = Case(Shape(2, 12, 4, 8, kv_heads=2, kv_length=30), "ggd", "pair", "inside")
    with x64():
        diff, _ = support.draw(case, 0)
        w_o, w_lse = support.cotangents(case, 0)

        def loss(diff: Arrays, merge: bool) -> Any:
            args = {"q": diff["q"], "k": diff["k"], "v": diff["v"], "log_gates": diff["log_gates"]}
            args |= {"sharpness": diff["sharpness"], "prior": DistancePrior(diff["params"], support.ggd)}
            whole = lambda: attention(**args, return_lse=True, implementation=backend)
            o, lse = halves(args, 13, backend) if merge else whole()
            return (o * w_o).sum() + (lse * w_lse).sum()

        value = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        errors = support.distances(value(diff, True), value(diff, False))
    assert max(errors.values()) < 1e-11, errors


def test_a_document_in_a_packed_row_equals_its_solo_run() -> None:
    case = Case(Shape(1, 36, 2, 8), "ggd", "log", "inside", "packed")
    solo = Case(Shape(1, 12, 2, 8), "ggd", "log", "inside")
    diff, _ = support.draw(case, 0, np.float32)
    packed, _, grads = run(case, diff, {"segment_ids": jnp.arange(36)[None] // 12}, "xla")
    weights = support.cotangents(case, 0)
    for part in (slice(0, 12), slice(12, 24), slice(24, 36)):
        alone = {n: x if n == "params" else x[:, part] for n, x in diff.items()}
        o, _, solo_grads = support.gradients(solo, alone, {}, tuple(w[:, part] for w in weights), "xla")
        np.testing.assert_allclose(packed[:, part], o, atol=2e-6)
        for name in ("q", "k", "v", "sharpness", "log_gates"):
            np.testing.assert_allclose(grads[name][:, part], solo_grads[name], atol=3e-5, err_msg=name)
