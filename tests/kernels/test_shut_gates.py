"""A forget gate of −inf, or so small that it might as well be, ends a document, and spoils nothing after it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.api import attention
from kernels.attention.gates import SHUT, extended_sums, running_sums
from kernels.path.api import path_attention
from kernels.path.decode import path_extend

BATCH, LENGTH, HEADS = 2, 20, 4


def problem(seed: int = 0) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Arrays of a call with some gates shut, the same gates with those at 0, and the documents that they cut."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=(BATCH, LENGTH, *shape))
    w = normal(2, 8)
    arrays = {"q": normal(HEADS, 8), "k": normal(2, 8), "v": normal(2, 8)}
    arrays |= {"w": w / np.linalg.norm(w, axis=-1, keepdims=True), "beta": rng.uniform(0, 2, (BATCH, LENGTH, 2))}
    gates, shut = -np.exp(rng.uniform(-5, 1, (BATCH, LENGTH, HEADS))), rng.random((BATCH, LENGTH)) < 0.25
    depth = -(10.0 ** rng.uniform(7, 38, gates.shape))
    depth = np.where(rng.random(gates.shape) < 0.3, -np.inf, depth)
    exact = lambda x: jnp.asarray(x, jnp.float32)
    arrays["log_gates"] = exact(np.where(shut[:, :, None], depth, gates))
    soft = exact(np.where(shut[:, :, None], 0, gates))
    return {name: exact(x) for name, x in arrays.items()}, soft, jnp.asarray(np.cumsum(shut, axis=1), jnp.int32)


def run(arrays: dict[str, Any], operation: str, **options: Any) -> jax.Array:
    if operation == "attention":
        return attention(*(arrays[name] for name in "qkv"), log_gates=arrays["log_gates"], **options)
    rows = (arrays[name] for name in ("q", "k", "v", "w", "beta"))
    return path_attention(*rows, log_gates=arrays["log_gates"], scale_gates=operation == "scaled", **options)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("operation", ["attention", "path", "scaled"])
def test_shut_gates_are_borders_of_documents(operation: str, implementation: str) -> None:
    arrays, soft, documents = problem()
    do = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, LENGTH, HEADS, 8)), jnp.float32)

    def loss(arrays: dict[str, Any], segment_ids: Any = None) -> Any:
        o = run(arrays, operation, segment_ids=segment_ids, implementation=implementation)
        return (o * do).sum(), o

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, o), got = gradient(arrays)
    (_, want_o), want = gradient(arrays | {"log_gates": soft}, documents)
    np.testing.assert_allclose(o, want_o, atol=1e-5)
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], atol=2e-5 * max(1, float(jnp.abs(want[name]).max())), err_msg=name)
    assert not got["log_gates"][arrays["log_gates"] < SHUT].any()


def test_path_goes_on_behind_shut_gates_in_decode() -> None:
    arrays, soft, documents = problem(2)
    want = run(arrays | {"log_gates": soft}, "path", segment_ids=documents, implementation="reference")
    past, new = ({name: x[:, part] for name, x in arrays.items()} for part in (slice(0, 12), slice(12, None)))
    at = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, LENGTH))
    ids = jnp.zeros_like(at)
    nothing = {name: jnp.zeros_like(past[name]) for name in ("k", "v", "log_gates")}

    def extend(new: Any, past: Any, where: slice, old: slice, filled: int) -> Any:
        return path_extend(
            *(new[name] for name in ("q", "k", "v", "w", "beta")),
            log_gates=new["log_gates"],
            past_k=past["k"],
            past_v=past["v"],
            past_log_gates=past["log_gates"],
            past_positions=at[:, old],
            past_segment_ids=ids[:, old] + filled,
            positions=at[:, where],
            segment_ids=ids[:, where],
        )

    first, _, keys = extend(past, nothing, slice(0, 12), slice(0, 12), -1)
    second, *_ = extend(new, past | {"k": keys}, slice(12, None), slice(0, 12), 0)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), want, atol=1e-5)


def test_sums_that_are_continued_stay_numbers() -> None:
    gates = problem(3)[0]["log_gates"]
    start = jnp.zeros((BATCH, HEADS)), jnp.zeros((BATCH, HEADS))
    head = extended_sums(start, gates[:, :7])
    tail = extended_sums((head[0][:, -1], head[1][:, -1]), gates[:, 7:])
    got = np.concatenate([np.asarray(a, np.float64) + np.asarray(b) for a, b in (head, tail)], axis=1)
    want = np.cumsum(np.maximum(np.asarray(gates, np.float64), SHUT), axis=1)
    last_bits = 4 * 2.0**-48 * np.abs(want).max()  # of the pairs that hold the sums
    np.testing.assert_allclose(np.diff(got, axis=1), np.diff(want, axis=1), rtol=1e-6, atol=last_bits)
    whole = running_sums(gates)
    np.testing.assert_allclose(got, np.asarray(whole[0], np.float64) + np.asarray(whole[1]), rtol=1e-12)
