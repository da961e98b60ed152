"""The TPU kernels in Pallas' interpreter against the dense reference, and what they refuse."""

import functools
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from kernels.attention import api, masks, pallas_tpu, pallas_tpu_plan, pallas_tpu_table
from kernels.attention.api import DistancePrior, attention
from kernels.attention.call import make_call
from kernels.attention.pallas_tpu_kernels import fold
from kernels.attention.pallas_tpu_prior import Refused, inline
from tests.helpers import relative_rms


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128, so that short rows have several."""
    monkeypatch.setattr(pallas_tpu_plan, "block_size", lambda *_: 128)


@pytest.fixture
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_tpu_table, "LONGEST", 0)


@pytest.fixture
def two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for rows whose dq does not fit in VMEM."""
    monkeypatch.setattr(pallas_tpu_plan, "RESIDENT_DQ", 0)


def ggd(params: Any, d: jax.Array) -> jax.Array:
    distance = jnp.abs(d.astype(jnp.float32) - params["mu"])
    return -jnp.exp(params["a"] + params["b"] * jnp.log(distance + 1e-5))


def buckets(params: Any, d: jax.Array) -> jax.Array:
    index = jnp.log2(jnp.abs(d).astype(jnp.float32) + 1).astype(jnp.int32)
    return params["table"][jnp.clip(index, 0, params["table"].shape[0] - 1)]


PRIORS = {"ggd": ggd, "buckets": buckets}


class Problem:
    """Random arguments of `attention`, split into what is differentiated and what is not."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        get = lambda name, default: options.pop(name, default)
        batch, length, dim, dtype = get("B", 2), get("T", 150), get("D", 32), get("dtype", jnp.float32)
        keys, heads, kv_heads = get("S", length), get("H", 4), get("Hkv", 2)
        rng = np.random.default_rng(seed)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        self.arrays: dict[str, Any] = {"q": normal(batch, length, heads, dim).astype(dtype)}
        self.arrays["k"] = normal(batch, keys, kv_heads, dim).astype(dtype)
        self.arrays["v"] = normal(batch, keys, kv_heads, get("Dv", dim)).astype(dtype)
        self.prior = get("prior", None)
        if self.prior == "ggd":
            self.arrays["prior"] = {"a": 0.3 * normal(heads), "b": 0.5 + 0.3 * normal(heads), "mu": normal(heads)}
        elif self.prior == "buckets":
            self.arrays["prior"] = {"table": normal(heads, 8)}
        if get("gates", False):
            self.arrays["log_gates"] = -0.3 * jnp.abs(normal(batch, keys, heads))
        if get("sharpness", False):
            self.arrays["sharpness"] = 0.5 + jnp.abs(normal(batch, length, heads))
        self.fixed: dict[str, Any] = {}
        if get("segments", False):
            ids = np.sort(rng.integers(-1, 3, size=(batch, keys)), axis=1)[:, ::-1].copy()
            ids[:, 10:13] = -1
            self.fixed["segment_ids"] = (jnp.asarray(ids[:, keys - length :]), jnp.asarray(ids))
        if get("positions", False):
            self.fixed["positions"] = jnp.asarray(rng.integers(0, keys, size=(batch, length)))
            self.fixed["kv_positions"] = jnp.asarray(rng.integers(0, keys, size=keys))
        self.fixed |= options
        shape = (batch, length, heads)
        self.do, self.dlse = normal(*shape, self.arrays["v"].shape[3]), normal(*shape)

    @functools.cache  # noqa: B019 - one compilation per problem and implementation
    def compiled(self, implementation: str) -> Any:
        def loss(arrays: Any) -> Any:
            params = arrays.get("prior")
            prior = None if params is None else DistancePrior(params, PRIORS[self.prior])
            rest = {n: x for n, x in arrays.items() if n != "prior"}
            o, lse = attention(**rest, prior=prior, **self.fixed, return_lse=True, implementation=implementation)
            finite = jnp.where(jnp.isneginf(lse), 0, lse * self.dlse)
            return (o.astype(jnp.float32) * self.do).sum() + finite.sum(), (o, lse)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    def run(self, implementation: str, arrays: Any = None) -> Any:
        """(o, lse) and gradients of a random linear function of both."""
        (_, out), grads = self.compiled(implementation)(self.arrays if arrays is None else arrays)
        return {"o": out[0], "lse": out[1], **grads}


def in_float32(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), arrays)


def check(problem: Problem, tolerance: float = 1e-5, arrays: Any = None, loose: dict[str, float] | None = None) -> None:
    got = problem.run("pallas_tpu", arrays)
    want = problem.run("reference", in_float32(problem.arrays))
    seen = np.isfinite(np.asarray(want["lse"]))
    np.testing.assert_array_equal(np.isneginf(np.asarray(got["lse"])), ~seen)
    assert not np.asarray(got["o"])[~seen].any()
    assert not np.asarray(got["q"])[~seen].any()
    got["lse"], want["lse"] = (jnp.where(seen, x["lse"], 0) for x in (got, want))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert a.shape == b.shape, name
        assert relative_rms(a, b) < (loose or {}).get(name, tolerance), (name, relative_rms(a, b))


def test_prior_and_sharpness_causal_the_same_bits_twice() -> None:
    problem = Problem(prior="ggd", sharpness=True)
    check(problem)
    first, second = (problem.run("pallas_tpu") for _ in range(2))
    chex.assert_trees_all_equal(first, second)


def test_gates_segments_and_sharpness_of_content_alone(two_passes: None) -> None:
    check(Problem(T=200, prior="ggd", gates=True, segments=True, sharpness=True, sharpen_prior=False))


def test_explicit_positions_and_segments_compute_the_prior_in_the_tile() -> None:
    check(Problem(prior="ggd", positions=True, segments=True, sharpness=True))


def test_window_both_ways_with_a_table_of_buckets() -> None:
    check(Problem(T=300, Hkv=4, prior="buckets", causal=False, window=40))


def test_more_keys_than_queries_and_a_narrow_value() -> None:
    check(Problem(T=70, S=200, D=48, Dv=16, gates=True, prior="ggd"))


def test_bfloat16_gates_and_sharpness() -> None:
    problem = Problem(D=64, gates=True, sharpness=True, dtype=jnp.bfloat16)
    check(problem, 1e-2)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"H": 2, "Hkv": 1, "causal": False},
    {"window": 40, "T": 300, "prior": "ggd"},
    {"window": 130, "T": 300, "prior": "ggd", "sharpness": True, "segments": True},
    {"T": 1, "S": 300, "prior": "ggd", "gates": True, "sharpness": True},
    {"T": 300, "S": 40, "prior": "ggd"},
    {"T": 128, "D": 20, "prior": "ggd"},
    {"T": 129, "D": 256, "H": 1, "Hkv": 1},
    {"positions": True, "causal": False, "prior": "ggd"},
    {"positions": True, "window": 30, "gates": True},
    {"prior": "buckets", "S": 300, "T": 140, "sharpness": True, "segments": True},
    {"prior": "ggd", "causal": False, "segments": True, "sharpness": True},
    {"B": 1, "gates": True, "sharpness": True, "sharpen_prior": False},
    {"dtype": jnp.bfloat16, "prior": "ggd", "D": 48, "segments": True},
    {"dtype": jnp.bfloat16, "sharpness": True, "prior": "buckets", "gates": True},
]
ROUTES = [(options, route) for options in OPTIONS for route in ("table", "two_passes")]
ROUTES += [(options, "tile") for options in OPTIONS if options.get("prior") == "ggd"]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "route"), ROUTES)
def test_every_option(options: dict[str, Any], route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if route == "tile":
        monkeypatch.setattr(pallas_tpu_table, "LONGEST", 0)
    if route == "two_passes":
        monkeypatch.setattr(pallas_tpu_plan, "RESIDENT_DQ", 0)
    low = options.get("dtype") == jnp.bfloat16
    # The gradient of a scale nearly cancels, so bfloat16 scores leave more of it undetermined; xla shows the same.
    check(Problem(seed=1, **options), 2e-2 if low else 2e-5, loose={"['prior']['a']": 8e-2} if low else None)


@pytest.mark.slow
def test_blocks_as_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    check(Problem(B=1, T=1100, H=2, Hkv=1, prior="ggd", sharpness=True, gates=True), 2e-5)


def test_nan_of_unseen_keys_and_dead_queries_does_not_leak() -> None:
    problem = Problem(segments=True, prior="ggd", T=150, H=2, Hkv=1)
    queries, keys = (np.asarray(s) < 0 for s in problem.fixed["segment_ids"])
    poison = lambda x, dead: jnp.where(jnp.asarray(dead)[:, :, None, None], jnp.nan, x)
    arrays = {n: poison(x, queries if n == "q" else keys) if n in "qkv" else x for n, x in problem.arrays.items()}
    check(problem, arrays=arrays)
    for name, x in problem.run("pallas_tpu", arrays).items():
        if name in ("k", "v"):
            assert not np.asarray(x)[keys].any()


def test_a_seen_nan_is_not_hidden() -> None:
    problem = Problem(segments=True, H=2, Hkv=2, T=140)
    for name in ("k", "v"):
        broken = problem.arrays[name].at[0, 3].set(jnp.nan)
        o, _ = pallas_tpu.attend(
            make_call(**{**problem.arrays, name: broken}, **NOTHING, segment_ids=problem.fixed["segment_ids"])
        )
        seen = masks.visible(
            jnp.arange(140)[:, None],
            jnp.arange(140)[None, :],
            problem.fixed["segment_ids"][0][0][:, None],
            problem.fixed["segment_ids"][1][0][None, :],
            causal=True,
            window=None,
        )[:, 3]
        np.testing.assert_array_equal(np.isnan(np.asarray(o)[0]).all((1, 2)), np.asarray(seen))


def test_extreme_priors_keep_every_gradient_finite_and_right(no_table: None) -> None:
    problem = Problem(prior="ggd", T=140, H=4, Hkv=4, sharpness=True)
    beta = jnp.asarray([-6.0, -1.0, 0.0, 3.0])
    problem.arrays["prior"] = {"a": jnp.zeros(4), "b": beta, "mu": jnp.zeros(4)}
    got, want = problem.run("pallas_tpu"), problem.run("reference")
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(got))
    for name in ("o", "q", "k", "v"):
        assert relative_rms(got[name], want[name]) < 1e-4, name


def test_sharded_gradients_equal_the_reference_on_one_device() -> None:
    problem = Problem(prior="ggd", sharpness=True)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads = P("data", None, "model")
    specs = {n: P("model") if n == "prior" else heads for n in problem.arrays}
    specs["prior"] = dict.fromkeys(problem.arrays["prior"], P("model"))

    def call(x: Any, implementation: str = "pallas_tpu") -> Any:
        rest = {n: a for n, a in x.items() if n != "prior"}
        return attention(**rest, prior=DistancePrior(x["prior"], ggd), implementation=implementation)

    sharded = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=heads, check_vma=False)
    dense = functools.partial(call, implementation="reference")
    gradients = [jax.jit(jax.grad(lambda x, f=f: (f(x) * problem.do).sum()))(problem.arrays) for f in (dense, sharded)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert relative_rms(b, a) < 1e-5


# ---- Pieces ----


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 700),
    keys=st.integers(1, 700),
    window=st.none() | st.integers(1, 400),
    causal=st.booleans(),
    blocks=st.tuples(st.sampled_from([128, 256, 384]), st.sampled_from([128, 256, 384])),
)
def test_the_blocks_a_plan_visits_are_those_that_see_something(
    length: int, keys: int, window: int | None, causal: bool, blocks: tuple[int, int]
) -> None:
    plan = make_plan(length, keys, window=window, causal=causal, blocks=blocks)
    q_pos, k_pos = np.arange(plan.padded_queries) + keys - length, np.arange(keys)
    ahead = q_pos[:, None] - k_pos[None, :]
    seen = (ahead >= 0) if causal else np.ones_like(ahead, bool)
    if window is not None:
        seen &= (ahead if causal else np.abs(ahead)) < window
    seen = np.pad(seen, ((0, 0), (0, plan.padded_keys - keys)))
    tiles = seen.reshape(plan.q_blocks, blocks[0], plan.k_blocks, blocks[1]).any((1, 3))
    for i in range(plan.q_blocks):
        first, last = plan.keys_of(i)
        visited = {plan.key_block(i, step) for step in range(plan.key_steps) if first + step <= last}
        assert set(np.flatnonzero(tiles[i])) <= visited
    for j in range(plan.k_blocks):
        first, last = plan.queries_of(j)
        visited = {plan.query_block(j, step) for step in range(plan.query_steps) if first + step <= last}
        assert set(np.flatnonzero(tiles[:, j])) <= visited


NOTHING: dict[str, Any] = {
    "prior": None, "log_gates": None, "sharpness": None, "sharpen_prior": True, "positions": None,
    "kv_positions": None, "window": None, "causal": True, "scale": None,
}  # fmt: skip


def shapes_call(length: int, keys: int, dtype: Any = jnp.float32, dim: int = 16, **options: Any) -> Any:
    shape = lambda n: jax.ShapeDtypeStruct((1, n, 1, dim), dtype)
    build = lambda q, k, v: make_call(q, k, v, **{**NOTHING, "segment_ids": None, **options})
    return jax.eval_shape(build, shape(length), shape(keys), shape(keys))


def make_plan(length: int, keys: int, *, blocks: tuple[int, int] = (128, 128), **options: Any) -> pallas_tpu_plan.Plan:
    plan = pallas_tpu_plan.make_plan(shapes_call(length, keys, **options), True)
    return replace(plan, block_q=blocks[0], block_k=blocks[1])


@pytest.mark.parametrize("blocks", [(128, 128), (128, 384), (256, 128)])
def test_a_table_is_sheared_into_tiles_and_summed_back(blocks: tuple[int, int]) -> None:
    plan = make_plan(300, 500, blocks=blocks, causal=False)
    entries = jnp.asarray(np.random.default_rng(0).normal(size=pallas_tpu_table.length(plan)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(blocks[1], blocks[0])), jnp.float32)
    i, j = 1, plan.k_blocks - 1
    start = pallas_tpu_table.first_piece(plan, i, j) * pallas_tpu_table.piece(plan)
    tile = jax.jit(functools.partial(pallas_tpu_table.shear, plan))(entries[None, start : start + sum(blocks)])
    ahead = (i * blocks[0] + np.arange(blocks[0]) + plan.shift)[None, :] - (j * blocks[1] + np.arange(blocks[1]))[
        :, None
    ]
    index = ahead + plan.padded_keys - 1 - plan.shift
    np.testing.assert_array_equal(np.asarray(tile), np.asarray(entries)[index])
    sums = np.zeros((1, 8, entries.size), np.float32)
    stretch = jax.jit(functools.partial(pallas_tpu_table.diagonal_sums, plan))(weights)
    sums[0, :, start : start + sum(blocks)] = stretch
    want = np.zeros(entries.size, np.float64)
    np.add.at(want, index, np.asarray(weights, np.float64))
    assert relative_rms(pallas_tpu_table.collect(jnp.asarray(sums))[0, 0], want) < 1e-6


def test_fold_keeps_the_sum() -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, size=(256, 384)), jnp.float32)
    assert fold(x).shape == (8, 128)
    assert float(fold(x).sum()) == float(x.sum())


def test_a_program_hoists_parameters_and_differentiates() -> None:
    def prior(p: Any, d: jax.Array) -> jax.Array:
        x = d.astype(jnp.float32) - 2 * jnp.sinh(p["mu"])
        return -jnp.exp(p["a"]) * jnp.where(p["b"] > 0, jnp.log1p(x * jax.lax.stop_gradient(jnp.sign(x)) * p["b"]), 0)

    theta = {"a": jnp.float32(0.3), "b": jnp.float32(0.7), "mu": jnp.float32(0.2)}
    leaves, tree = jax.tree.flatten(theta)
    program = inline(
        prior, tree, ((), jnp.dtype("float32")) * 0 or tuple(((), x.dtype) for x in leaves), (16, 128), True
    )
    outside = {e.primitive.name for e in program.outside}
    assert {"exp", "sinh"} <= outside
    assert "sinh" not in {e.primitive.name for e in program.inside}
    d = jnp.arange(16)[:, None] - jnp.arange(128)[None, :]

    @jax.jit
    def both(theta: Any) -> Any:
        scalars = program.scalars(jax.tree.leaves(theta))
        return program.tile(lambda n: scalars[n], d), prior(theta, d), jax.jacfwd(lambda t: prior(t, d))(theta)

    (value, *slopes), dense, want = both(theta)
    np.testing.assert_allclose(value, dense, rtol=1e-6)
    for got, name in zip(slopes, sorted(theta), strict=True):
        np.testing.assert_allclose(got, want[name], rtol=1e-5, atol=1e-6)


def test_a_program_refuses_what_a_tile_cannot_do() -> None:
    leaf = lambda *shape: ((shape, jnp.dtype("float32")),)
    tree = jax.tree.structure(0)
    with pytest.raises(Refused, match=r"parameter of shape \(8,\)"):
        inline(lambda p, d: p[jnp.clip(d, 0, 7)], tree, leaf(8), (16, 128), True)
    with pytest.raises(Refused, match="cumsum"):
        inline(lambda p, d: p * jnp.cumsum(d, 0), tree, leaf(), (16, 128), False)
    long = lambda p, d: functools.reduce(lambda x, n: jnp.sin(x) + n * p, range(60), d.astype(jnp.float32))
    with pytest.raises(Refused, match="operations per score"):
        inline(long, tree, leaf(), (16, 128), False)


# ---- Choice of the backend ----


def test_a_tpu_gets_these_kernels_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert api.choose(shapes_call(4, 4)) == "pallas_tpu"
    assert api.choose(shapes_call(4, 4, dtype=jnp.float16)) == "xla"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"dtype": jnp.float16}, "float16"), ({"dim": 320}, "head_dim 320 is over 256")],
)
def test_supports_says_why_not(change: dict[str, Any], words: str) -> None:
    assert words in str(pallas_tpu.supports(shapes_call(4, 4, **change)))


def test_a_table_prior_with_explicit_positions_is_refused_by_name() -> None:
    q = jnp.zeros((1, 8, 2, 16))
    prior = DistancePrior({"table": jnp.zeros((2, 8))}, buckets)
    with pytest.raises(ValueError, match=r"prior .*buckets.* its table needs default positions"):
        attention(q, q, q, prior=prior, positions=jnp.arange(8), implementation="pallas_tpu")


def test_forward_and_backward_lower_for_tpus_on_any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # blocks as on a TPU
    problem = Problem(T=600, prior="ggd", gates=True, sharpness=True, segments=True, dtype=jnp.bfloat16, D=48)
    prior = lambda x: DistancePrior(x["prior"], ggd)

    def loss(x: Any) -> Any:
        rest = {n: a for n, a in x.items() if n != "prior"}
        return attention(**rest, prior=prior(x), **problem.fixed, implementation="pallas_tpu").astype(jnp.float32).sum()

    exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(problem.arrays)
    assert exported.mlir_module().count("tpu_custom_call") == 2
