"""The oracle itself: against the formula in plain Python loops, and its gradients against central differences."""

from typing import Any

import jax
import numpy as np
import pytest

from kernels.attention.shapes import Shape
from tests.helpers import x64
from tests.kernels.attention import support
from tests.kernels.attention.support import PRIORS, Case

Arrays = dict[str, Any]


def by_loops(case: Case, diff: Arrays, fixed: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """o and lse, one query and one head at a time."""
    args = {name: None if x is None else jax.tree.map(np.asarray, x) for name, x in (diff | fixed).items()}
    q, k, v, s = args["q"], args["k"], args["v"], case.shape
    size = k.shape[1]
    row = lambda x, b: x if x.ndim == 1 else x[b]
    ids = args.get("segment_ids")
    q_ids, k_ids = ids if isinstance(ids, tuple) else (ids, ids)
    o, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, i, h in np.ndindex(s.batch, s.length, s.heads):
        k_pos = row(args.get("kv_positions", np.arange(size)), b)
        q_pos = row(args.get("positions", np.arange(s.length) + size - s.length), b)[i]
        same = [q_ids is None or (q_ids[b, i] == k_ids[b, j] and k_ids[b, j] >= 0) for j in range(size)]
        past = [j for j in range(size) if same[j] and k_pos[j] <= q_pos]
        reach = case.window or 10**9
        seen = [j for j in (past if case.causal else range(size)) if same[j] and abs(q_pos - k_pos[j]) < reach]
        if not seen:
            continue
        gate = np.zeros(size)
        if case.gates == "pair":
            gate = args["log_gates"][0][b, i, h] - args["log_gates"][1][b, :, h]
        elif case.gates == "log":
            kept = args["log_gates"][b, :, h] * (1 if k_ids is None else k_ids[b] >= 0)
            sums = np.cumsum(kept)
            gate = sums[i if s.length == size else max(past)] - sums
        r = args["sharpness"][b, i, h] if case.sharpness else 1.0
        scale = s.head_dim**-0.5 if case.scale is None else case.scale
        logits = np.zeros(len(seen))
        for n, j in enumerate(seen):
            bias = gate[j]
            if case.prior:
                params = jax.tree.map(lambda x, h=h: x[h], args["params"])
                bias += float(PRIORS[case.prior][0](params, np.asarray(k_pos[j] - q_pos)))
            content = scale * q[b, i, h] @ k[b, j, h * k.shape[2] // s.heads]
            logits[n] = r * content + bias if case.sharpness == "outside" else r * (content + bias)
        top = logits.max()
        weights = np.exp(logits - top)
        lse[b, i, h] = top + np.log(weights.sum())
        o[b, i, h] = weights / weights.sum() @ v[b, seen, h * k.shape[2] // s.heads]
    return o, lse


TINY = Shape(2, 7, 4, 3, kv_heads=2)
FORMULA = {
    "all": Case(TINY, "ggd", "log", "inside", "packed"),
    "outside": Case(TINY, "alibi", None, "outside", "left", window=3, scale=0.7),
    "chunk": Case(Shape(1, 3, 2, 3, kv_length=8), "kerple", "log", segments="right"),
    "more-queries": Case(Shape(1, 8, 2, 3, kv_length=5), None, "log"),
    "positions": Case(Shape(1, 5, 2, 3, kv_length=8), "ggd", "log", positions="given"),
    "both-ways": Case(TINY, "alibi", positions="shuffled", window=4, causal=False),
    "sums": Case(TINY, None, "pair", "inside", positions="given", segments="packed"),
}


@pytest.mark.parametrize("name", FORMULA)
def test_equals_the_formula_in_loops(name: str) -> None:
    case = FORMULA[name]
    with x64():
        diff, fixed = support.draw(case, 0)
        o, lse, _ = support.gradients(case, diff, fixed, support.cotangents(case, 0), "reference")
        errors = support.distances((o, lse), by_loops(case, diff, fixed))
    assert max(errors.values()) < 1e-12, errors


SMALL = Shape(2, 9, 4, 4, kv_heads=2)
DIFFERENCES = {
    "ggd": Case(SMALL, "ggd", "log", "inside"),
    "ggd-extreme": Case(SMALL, "ggd-extreme", None, "outside"),
    "alibi": Case(SMALL, "alibi", "pair", "outside", "packed"),
    "kerple": Case(Shape(2, 5, 2, 4, kv_length=9), "kerple", "log", "inside", positions="given"),
    "table": Case(SMALL, "table", None, "inside", "left", window=5, causal=False),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_gradient_equals_central_differences(name: str) -> None:
    case = DIFFERENCES[name]
    with x64():
        for seed in range(2):
            diff, fixed = support.draw(case, seed)
            # lse itself is −1e30 in a row whose only key is at distance 0 of an extreme prior: leave it out there.
            w_o, w_lse = support.cotangents(case, seed, lse=0 if "extreme" in name else 0.3)

            def loss(x: Arrays, fixed: Arrays = fixed, w: Any = (w_o, w_lse)) -> float:
                o, lse, _ = support.gradients(case, x, fixed, w, "reference")
                return float((np.asarray(o) * w[0]).sum() + (np.where(np.isfinite(lse), lse, 0) * w[1]).sum())

            _, _, grads = support.gradients(case, diff, fixed, (w_o, w_lse), "reference")
            rng = np.random.default_rng(seed)
            leaves, tree = jax.tree.flatten(diff)
            for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
                way = rng.normal(size=leaf.shape)
                step = [tree.unflatten([*leaves[:i], leaf + t * way, *leaves[i + 1 :]]) for t in (1e-5, -1e-5)]
                numeric = (loss(step[0]) - loss(step[1])) / 2e-5
                exact = float((np.asarray(grad) * way).sum())
                assert abs(numeric - exact) < 1e-6 * max(1, abs(exact)), (tree, i, numeric, exact)
                assert np.abs(grad).max() > 1e-3, f"gradient {i} of {tree} is suspiciously small"
