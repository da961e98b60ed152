"""What the blockwise backend compiles to: memory, compilations, transforms, sharding, bitwise repeatability."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from kernels.attention import xla
from kernels.attention.api import DistancePrior, attention
from kernels.attention.shapes import Shape
from tests.helpers import x64
from tests.kernels.attention import support
from tests.kernels.attention.support import Arrays, Case

P = jax.P


def loss(diff: Arrays, fixed: Arrays, implementation: str = "xla") -> Any:
    prior = DistancePrior(diff["params"], support.ggd)
    args = {name: x for name, x in diff.items() if name != "params"}
    o, lse = attention(**args, **fixed, prior=prior, implementation=implementation, return_lse=True)
    return (jnp.sin(o) * jnp.arange(1, 1 + o.shape[1])[None, :, None, None]).sum() + jnp.where(
        lse > -jnp.inf, lse, 0
    ).sum()


def inputs(shape: Shape, seed: int = 0, dtype: Any = np.float32) -> Arrays:
    return support.draw(Case(shape, "ggd", "log", "inside"), seed, dtype)[0]


grads = jax.jit(jax.grad(loss), static_argnames="implementation")


def test_memory_of_both_passes_grows_linearly() -> None:
    used = {}
    for length in (32_768, 65_536):
        like = jax.eval_shape(lambda n=length: inputs_like(n))
        memory = grads.lower(like, {}).compile().memory_analysis()
        used[length] = memory.temp_size_in_bytes
    assert used[65_536] < 2.1 * used[32_768]
    assert used[65_536] < 65_536 * 2 * 16 * 4 * 40  # forty arrays of the size of q; one T × T row of scores has 4,000
    assert used[65_536] < 65_536**2 // 8


def inputs_like(length: int) -> Arrays:
    rows = lambda *shape: jnp.zeros((1, length, 2, *shape))
    params = {name: jnp.zeros(2) for name in ("alpha", "beta", "mu")}
    return {"q": rows(16), "k": rows(16), "v": rows(16), "params": params, "log_gates": rows(), "sharpness": rows()}


def test_twenty_layouts_compile_once() -> None:
    compiled = jax.jit(jax.grad(loss))
    diff, rng = inputs(Shape(1, 40, 2, 8)), np.random.default_rng(0)
    for _ in range(20):
        ids = np.sort(rng.integers(-1, rng.integers(1, 6), (1, 40)), axis=1)
        compiled(diff, {"segment_ids": jnp.asarray(ids, jnp.int32)})
    assert compiled._cache_size() == 1


def test_calls_outside_jit_compile_once() -> None:
    before = xla._forward._cache_size(), xla._backward._cache_size()
    for seed in range(3):
        jax.grad(loss)(inputs(Shape(1, 11, 2, 8), seed), {})
    assert (xla._forward._cache_size(), xla._backward._cache_size()) == (before[0] + 1, before[1] + 1)


def test_two_runs_agree_bit_for_bit() -> None:
    diff = inputs(Shape(2, 300, 2, 8))
    first, second = grads(diff, {}), grads(diff, {})
    chex.assert_trees_all_equal(first, second)


def test_vmap_over_calls_and_over_parameters() -> None:
    case = Case(Shape(1, 50, 2, 8), "ggd", "log", "inside", "packed")
    weights = support.cotangents(case, 0)
    stack = [support.draw(case, seed, np.float32) for seed in range(3)]
    one = lambda diff, fixed: support.gradients(case, diff, fixed, weights, "xla", support.small_grid(case))
    got = jax.jit(jax.vmap(one))(*jax.tree.map(lambda *x: jnp.stack(x), *stack))
    want = jax.tree.map(lambda *x: jnp.stack(x), *(one(*each) for each in stack))
    assert max(support.distances(got, want).values()) < 1e-5
    diff, fixed = stack[0]
    params = jax.tree.map(lambda *x: jnp.stack(x), *(other["params"] for other, _ in stack))
    got = jax.jit(jax.vmap(lambda p: one(diff | {"params": p}, fixed)))(params)
    want = [one(diff | {"params": other["params"]}, fixed) for other, _ in stack]
    assert max(support.distances(got, jax.tree.map(lambda *x: jnp.stack(x), *want)).values()) < 1e-5


def count(jaxpr: Any, name: str) -> int:
    """Number of jitted functions of that name in a program, nested ones included."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.params.get("name") == name
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    total += count(getattr(inner, "jaxpr", inner), name)
    return total


def test_remat_recomputes_or_keeps_the_named_results() -> None:
    diff = inputs(Shape(1, 30, 2, 8))
    keep = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    for policy, forwards in ((None, 2), (keep, 1)):
        remat = jax.grad(jax.checkpoint(functools.partial(loss, fixed={}), policy=policy))
        assert count(jax.make_jaxpr(remat)(diff).jaxpr, "_forward") == forwards
    assert max(support.distances(jax.jit(remat)(diff), grads(diff, {})).values()) < 1e-6


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_over_batch_and_heads(check: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    diff = inputs(Shape(4, 24, 4, 8, kv_heads=2))
    fixed = {"segment_ids": jnp.asarray(np.arange(24)[None] // np.array([[9], [30], [5], [12]]), jnp.int32)}
    rows, heads = P("data", None, "model"), P("model")
    specs = {name: heads if name == "params" else rows for name in diff}

    def local(diff: Arrays, fixed: Arrays) -> Any:
        return loss(diff, fixed)[None, None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data", "model"), check_vma=check)
    got = jax.jit(jax.grad(lambda diff: mapped(diff, fixed).sum()))(diff)
    assert max(support.distances(got, grads(diff, fixed)).values()) < 1e-5


def test_devices_exchange_only_gradients_of_the_prior() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    diff = inputs(Shape(4, 200, 4, 8))  # several tiles
    specs = {name: P("model") if name == "params" else P("data", None, "model") for name in diff}
    put = lambda x, spec: jax.tree.map(lambda a: jax.device_put(a, jax.NamedSharding(mesh, spec)), x)
    placed = {name: put(x, specs[name]) for name, x in diff.items()}
    program = grads.lower(placed, {}).compile()
    moved = re.findall(r"f32\[([\d,]*)\]\S* (?:all-\w+|collective-permute|reduce-scatter)\(", program.as_text())
    sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in moved]
    assert len(sizes) <= 8, moved  # the prior's parameters, the sums along its diagonals; nothing of the size of q
    assert max(sizes) <= 4 * 399, moved
    assert max(support.distances(program(placed, {}), grads(diff, {})).values()) < 1e-5


shapes = st.builds(
    Shape,
    batch=st.integers(1, 2),
    length=st.integers(1, 40),
    heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([1, 4, 16]),
    kv_heads=st.just(1),
    kv_length=st.none() | st.integers(1, 60),
)
calls = st.builds(
    Case,
    shapes,
    st.sampled_from([None, "ggd", "alibi", "table"]),
    st.sampled_from([None, "log", "pair"]),
    st.sampled_from([None, "inside", "outside"]),
    st.sampled_from([None, "packed", "left", "right"]),
    st.sampled_from([None, "given", "shuffled"]),
    st.none() | st.integers(1, 30),
)


# No shrinking: each example compiles two programs.
quick = functools.partial(settings, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


def equals_reference(case: Case, seed: int) -> None:
    with x64():
        diff, fixed = support.draw(case, seed)
        weights = support.cotangents(case, seed)
        want = support.gradients(case, diff, fixed, weights, "reference")
        got = support.gradients(case, diff, fixed, weights, "xla", support.small_grid(case))
    errors = support.distances(got, want)
    assert max(errors.values()) < 1e-10, errors


@quick(max_examples=4)
@given(case=calls, seed=st.integers(0, 99))
def test_any_call_equals_the_reference(case: Case, seed: int) -> None:
    equals_reference(case, seed)


@pytest.mark.slow
@quick(max_examples=60)
@given(case=calls, seed=st.integers(0, 99))
def test_many_calls_equal_the_reference(case: Case, seed: int) -> None:
    equals_reference(case, seed)
