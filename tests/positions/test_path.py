"""PaTH: unit vectors and strengths, the short convolution, and its state over chunks, documents and padding."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.positions import Geometry, Slots, Tokens, parse
from bampath.positions.conv import empty_conv, short_conv
from bampath.positions.directions import directions
from bampath.positions.module import PositionalEncoding
from bampath.positions.projections import project, project_together
from tests.helpers import relative_rms, x64
from tests.positions import oracles

GEOMETRY = Geometry(dim=6, heads=4, kv_heads=2, head_dim=4, train_length=64)
OPTIONS = [
    "path",
    "path(rank=full)",
    "path(rank=3)",
    "path(conv=0)",
    "path(conv=2)",
    "path(conv=1)",
    "path(silu=false)",
    "path(beta_max=1.2)",
]


def _params(spec, seed=0):
    """Parameters large enough that every part of the formula shows."""
    return oracles.random_params(parse(spec).at(0).parts, GEOMETRY, seed)["path"]


def _tokens(x, ids=None, positions=None):
    batch, length = x.shape[:2]
    if positions is None:
        positions = np.broadcast_to(np.arange(length), (batch, length))
    ids = np.zeros((batch, length)) if ids is None else ids
    positions, ids = jnp.asarray(positions, jnp.int32), jnp.asarray(ids, jnp.int32)
    return Tokens(jnp.asarray(x, jnp.float32), positions, positions + 1, ids)


@functools.partial(jax.jit, static_argnums=0)
def _run(spec, params, tokens, carry):
    part = parse(spec).at(0).parts[0]
    q = jnp.zeros((*tokens.x.shape[:2], 4, 4))
    slots, carry = part.fill(params, GEOMETRY, Slots(q, q[:, :, :2]), tokens, carry)
    return slots.householder, carry


def _expected(spec, params, x):
    """One document, token by token, in float64."""
    part = parse(spec).at(0).parts[0]
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    if "w" in p:
        u = np.einsum("td,dhk->thk", x, p["w"])
    else:
        u = np.einsum("td,dr,rhk->thk", x, p["w_down"], p["w_up"])
    w = u
    if "conv" in p:
        width = len(p["conv"])
        w = np.zeros_like(u)
        for t in range(len(x)):
            for back in range(min(width, t + 1)):
                w[t] += p["conv"][width - 1 - back] * u[t - back]
        w = w / (1 + np.exp(-w)) if part.silu else w
    w = w / np.sqrt((w**2).sum(-1, keepdims=True) + part.eps)
    beta = 2 / (1 + np.exp(-(x @ p["beta_kernel"] + p["beta_bias"])))
    return w, np.minimum(beta, part.beta_max)


@pytest.mark.parametrize("spec", OPTIONS)
def test_formula(spec):
    x = np.random.default_rng(5).normal(size=(2, 7, 6))
    params = _params(spec)
    (w, beta), carry = _run(spec, params, _tokens(x), None)
    assert w.dtype == beta.dtype == jnp.float32
    assert carry is None
    for row in range(2):
        want_w, want_beta = _expected(spec, params, x[row])
        np.testing.assert_allclose(w[row], want_w, atol=2e-5)
        np.testing.assert_allclose(beta[row], want_beta, atol=2e-6)
    np.testing.assert_allclose(np.sum(np.square(w), -1), 1, atol=1e-3)
    assert np.all((np.asarray(beta) > 0) & (np.asarray(beta) <= 2))


@pytest.mark.parametrize("spec", ["path(rank=3)", "path(rank=3,conv=0)", "path(rank=full)"])
def test_gradients_of_every_parameter_and_of_the_input(spec):
    """Of w and beta together, for two packed documents and two key heads, against float64 central differences."""
    rng, lengths = np.random.default_rng(8), (4, 7)
    point = {"x": rng.normal(size=(1, sum(lengths), 6))} | _params(spec)
    point = {name: np.asarray(a, np.float32).astype(np.float64) for name, a in point.items()}
    cotangents = rng.normal(size=(1, sum(lengths), 2, 4)), rng.normal(size=(1, sum(lengths), 2))

    def exact(values):
        documents = np.split(values["x"][0], [lengths[0]])
        found = [_expected(spec, {n: a for n, a in values.items() if n != "x"}, x) for x in documents]
        w, beta = (np.concatenate(own) for own in zip(*found, strict=True))
        return (w * cotangents[0][0]).sum() + (beta * cotangents[1][0]).sum()

    def slopes(name):
        out = np.zeros(point[name].size)
        for place in range(out.size):
            step = np.zeros(out.size)
            step[place] = 1e-6
            step = step.reshape(point[name].shape)
            out[place] = (exact(point | {name: point[name] + step}) - exact(point | {name: point[name] - step})) / 2e-6
        return out.reshape(point[name].shape)

    ids = np.repeat([0, 1], lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]

    def loss(values):
        tokens = _tokens(values["x"], ids, positions)
        made = _run.__wrapped__(spec, {n: a for n, a in values.items() if n != "x"}, tokens, None)[0]
        return sum((a * c).sum() for a, c in zip(made, cotangents, strict=True))

    got = jax.jit(jax.grad(loss))({n: jnp.asarray(a, jnp.float32) for n, a in point.items()})
    for name in point:
        assert relative_rms(got[name], slopes(name)) < 1e-4, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_the_narrow_projections(dtype):
    rng = np.random.default_rng(12)
    x = jnp.asarray(rng.normal(size=(2, 9, 6)), dtype)
    kernels = {"path": {"w_down": 3, "beta_kernel": 2}, "fox": {"kernel": 4}}
    kernels = jax.tree.map(lambda n: jnp.asarray(rng.normal(size=(6, n)), jnp.float32), kernels)
    made, pull = jax.vjp(project_together, x, kernels)
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("float32")}
    d = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), made)
    dx, dkernels = pull(d)
    wide = lambda a: np.asarray(a, np.float64)
    flat = [wide(kernel.astype(dtype)) for kernel in jax.tree.leaves(kernels)]
    slopes = [wide(own) for own in jax.tree.leaves(d)]
    want = (
        *(wide(x) @ kernel for kernel in flat),
        sum(own @ kernel.T for own, kernel in zip(slopes, flat, strict=True)),
        *(np.einsum("bti,btn->in", wide(x), own) for own in slopes),
    )
    for ours, exact in zip((*jax.tree.leaves(made), dx, *jax.tree.leaves(dkernels)), want, strict=True):
        assert relative_rms(ours, exact) < (1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize(
    "spec", ["path+fox", "path(rank=full)+fox", "path(rank=4)+fox(fixed)", "path+fox(bias_only)+bam"]
)
def test_a_layer_projects_once_for_all_parts(spec):
    """One narrow product per layer, and the slots that the parts fill one by one."""
    composition, tokens = parse(spec).at(0), _tokens(np.random.default_rng(3).normal(size=(2, 7, 6)))
    params, q = composition.init_params(jax.random.key(1), GEOMETRY), jnp.ones((2, 7, 4, 4))
    slots = Slots(q, q[:, :, :2])
    for part in composition.layer_parts:
        slots, _ = part.fill(params.get(part.NAME, {}), GEOMETRY, slots, tokens, None)
    run = lambda params: PositionalEncoding(composition, GEOMETRY).apply({"params": params}, q, q[:, :, :2], tokens)[0]
    chex.assert_trees_all_close(run(params), slots, rtol=1e-5, atol=1e-6)
    products = str(jax.make_jaxpr(lambda params: jax.tree.leaves(run(params)))(params)).count("dot_general")
    assert products == 2  # with w's second one, or its only one


def test_start():
    """beta = 1 (a projection), matrices N(0, 0.02): the parameter count of the paper's size."""
    big = Geometry(dim=2048, heads=32, kv_heads=32, head_dim=64)
    shapes = {name: p.shape for name, p in parse("path").at(0).parts[0].parameters(big).items()}
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 202_784
    start = parse("path(conv=0)").init_params(jax.random.key(0), GEOMETRY)["path"]
    np.testing.assert_array_equal(start["beta_bias"], np.zeros(2))
    assert start["w_down"].std() == pytest.approx(0.02, rel=0.3)
    (_, beta), _ = _run("path(conv=0)", start | {"beta_kernel": jnp.zeros((6, 2))}, _tokens(np.ones((1, 3, 6))), None)
    np.testing.assert_array_equal(beta, np.ones((1, 3, 2)))


def _plain_directions(w, kernel, before, silu):
    """Directions by matrices before[m] [B, T, T], which take each token to the m-th before it in its document."""
    if kernel is not None:
        w = sum(jnp.einsum("bts,bshd->bthd", before[m], w) * kernel[-1 - m][None, None] for m in range(len(kernel)))
        w = w / (1 + jnp.exp(-w)) if silu else w
    return w / jnp.sqrt(jnp.sum(w * w, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [0, 1, 3])
@pytest.mark.parametrize("silu", [True, False])
def test_gradients_of_directions(dtype, width, silu):
    """Packed rows, padding at the ends, restarting positions; against the plain formula in float64."""
    rng = np.random.default_rng([width, silu])
    ids = np.asarray([[-1, 0, 0, 0, 0, 1, 2, 2, 2, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
    positions = np.asarray([[0, 0, 1, 2, 3, 0, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    document = np.cumsum((np.diff(ids, axis=1, prepend=-2) != 0) | (positions == 0), axis=1)
    real = (ids >= 0).astype(np.float64)
    before = [
        np.stack([np.eye(10, k=-m) * (row[:, None] == row[None, :]) for row in document]) for m in range(max(1, width))
    ]
    w = jnp.asarray(rng.normal(size=(2, 10, 2, 4)), dtype)
    kernel = jnp.asarray(rng.normal(size=(width, 2, 4)), jnp.float32) if width else None
    d = jnp.asarray(rng.normal(size=w.shape) * real[:, :, None, None], jnp.float32)
    tokens = _tokens(np.zeros((2, 10, 6)), ids, positions)

    def both(run, w, kernel, d):
        out, pull = jax.vjp(run, w, kernel)
        return out, *pull(d)

    got = both(lambda w, kernel: directions(w, kernel, tokens, None, silu, 1e-6)[0], w, kernel, d)
    assert (got[0].dtype, got[1].dtype) == (jnp.float32, dtype)
    with x64():
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (w, kernel, d))
        want = both(lambda w, kernel: _plain_directions(w, kernel, before, silu), *wide)
    seen = ids >= 0
    np.testing.assert_allclose(np.asarray(got[0])[seen], np.asarray(want[0])[seen], atol=2e-5)
    for ours, exact in zip(jax.tree.leaves(got[1:]), jax.tree.leaves(want[1:]), strict=True):
        assert relative_rms(ours, exact) < (1e-5 if dtype == "float32" else 1e-2)


def test_a_zero_vector_has_no_direction_and_a_gradient():
    zeros, tokens = jnp.zeros((1, 2, 1, 4)), _tokens(np.zeros((1, 2, 6)))
    run = lambda w: directions(w, None, tokens, None, True, 1e-6)[0]
    np.testing.assert_array_equal(run(zeros), zeros)
    grad = jax.grad(lambda w: run(w)[0, 0, 0, 0])(zeros)
    np.testing.assert_allclose(grad[0, 0, 0], [1000, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounded", [True, False])
def test_gradients_of_projections(dtype, rounded):
    rng = np.random.default_rng(11)
    x, kernel = jnp.asarray(rng.normal(size=(2, 9, 6)), dtype), jnp.asarray(rng.normal(size=(6, 2, 3)), jnp.float32)
    out, pull = jax.vjp(lambda x, kernel: project(x, kernel, rounded), x, kernel)
    assert out.dtype == (dtype if rounded else "float32")
    d = jnp.asarray(rng.normal(size=out.shape), out.dtype)
    dx, dkernel = pull(d)
    assert (dx.dtype, dkernel.dtype) == (dtype, "float32")
    wide = [np.asarray(a, np.float64) for a in (x, kernel.astype(dtype), d)]
    want = {
        "out": (out, np.einsum("bti,ihk->bthk", wide[0], wide[1])),
        "dx": (dx, np.einsum("bthk,ihk->bti", wide[2], wide[1])),
        "dkernel": (dkernel, np.einsum("bti,bthk->ihk", wide[0], wide[2])),
    }
    for ours, exact in want.values():
        assert relative_rms(ours, exact) < (1e-6 if dtype == "float32" else 5e-3)


def test_bfloat16_input_gives_float32_slots():
    params = _params("path")
    x = np.random.default_rng(0).normal(size=(1, 5, 6))
    tokens = _tokens(x)
    half = Tokens(tokens.x.astype(jnp.bfloat16), tokens.positions, tokens.counts, tokens.segment_ids)
    (w, beta), _ = _run("path", params, half, None)
    assert w.dtype == beta.dtype == jnp.float32
    np.testing.assert_allclose(np.sum(np.square(w), -1), 1, atol=1e-4)  # rounded to 16 bits it would be off by 1e-3


@pytest.mark.parametrize("spec", ["path", "path(conv=2)", "path(rank=full,silu=false)"])
def test_packed_documents_equal_their_solo_runs(spec):
    """Three documents and padding at both ends of a row; a document of one token is among them."""
    lengths, rng = [4, 1, 6], np.random.default_rng(2)
    docs = [rng.normal(size=(1, n, 6)) for n in lengths]
    pad = lambda n: rng.normal(size=(1, n, 6))
    row = np.concatenate([pad(2), *docs, pad(3)], axis=1)
    ids = np.asarray([[-1] * 2 + [0] * 4 + [1] + [2] * 6 + [-1] * 3])
    positions = np.asarray([[0, 0, *range(4), 0, *range(6), 0, 0, 0]])
    params = _params(spec)
    (w, beta), _ = _run(spec, params, _tokens(row, ids, positions), None)
    start = 2
    for doc in docs:
        solo_w, solo_beta = _expected(spec, params, doc[0])
        stop = start + doc.shape[1]
        np.testing.assert_allclose(w[0, start:stop], solo_w, atol=2e-5)
        np.testing.assert_allclose(beta[0, start:stop], solo_beta, atol=2e-6)
        start = stop
    np.testing.assert_array_equal(beta[:, [0, 1, -3, -2, -1]], np.zeros((1, 5, 2)))  # padding moves nothing


def test_positions_that_restart_start_a_document():
    """Same segment id, positions 0 1 2 | 0 | 0 1 2: as three separate rows."""
    x = np.random.default_rng(3).normal(size=(1, 7, 6))
    positions = np.asarray([[0, 1, 2, 0, 0, 1, 2]])
    params = _params("path")
    (w, _), _ = _run("path", params, _tokens(x, positions=positions), None)
    for piece in (slice(0, 3), slice(3, 4), slice(4, 7)):
        np.testing.assert_allclose(w[0, piece], _expected("path", params, x[0, piece])[0], atol=2e-5)


@st.composite
def _ragged_calls(draw):
    """Rows of tokens split into calls; in each call every row gets its next tokens and padding on either side."""
    rows = 2
    calls = draw(st.lists(st.sampled_from([1, 4]), min_size=1, max_size=6))
    fill = [[draw(st.integers(0, width)) for _ in range(rows)] for width in calls]
    left = [[draw(st.booleans()) for _ in range(rows)] for _ in calls]
    return rows, calls, fill, left


_conv = jax.jit(short_conv)


@given(_ragged_calls(), st.sampled_from([2, 3]))
@settings(max_examples=40, deadline=None)
def test_convolution_in_ragged_pieces_equals_the_whole(layout, width):
    rows, calls, fill, left = layout
    rng = np.random.default_rng(sum(calls) + width)
    kernel = rng.normal(size=(width, 3)).astype(np.float32)
    totals = [sum(counts[r] for counts in fill) for r in range(rows)]
    data = [rng.normal(size=(total, 3)).astype(np.float32) for total in totals]
    carry = empty_conv(width, 3, rows)
    got: list[list[np.ndarray]] = [[] for _ in range(rows)]
    done = [0] * rows
    for size, counts, sides in zip(calls, fill, left, strict=True):
        x = rng.normal(size=(rows, size, 3)).astype(np.float32)  # what stands at padding must not matter
        ids, positions = np.full((rows, size), -1, np.int32), np.zeros((rows, size), np.int32)
        places = []
        for r in range(rows):
            start = size - counts[r] if sides[r] else 0
            place = slice(start, start + counts[r])
            x[r, place] = data[r][done[r] : done[r] + counts[r]]
            ids[r, place], positions[r, place] = 0, np.arange(done[r], done[r] + counts[r])
            done[r] += counts[r]
            places.append(place)
        y, carry = _conv(x, kernel, ids, positions, carry)
        for r in range(rows):
            got[r].append(np.asarray(y[r, places[r]]))
    for r in range(rows):
        before = np.concatenate([np.zeros((width - 1, 3), np.float32), data[r]])
        want = sum(kernel[m] * before[m : m + totals[r]] for m in range(width))
        np.testing.assert_allclose(np.concatenate(got[r]), want, atol=1e-5)


def test_state_starts_anew_with_a_new_document():
    """A second document in the same stream of calls: nothing of the first reaches it."""
    rng = np.random.default_rng(7)
    x, kernel = jnp.asarray(rng.normal(size=(1, 6, 3)), jnp.float32), jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)
    ids, positions = jnp.asarray([[0, 0, 0, 1, 1, 1]]), jnp.asarray([[0, 1, 2, 0, 1, 2]])
    whole, _ = _conv(x, kernel, ids, positions)
    carry, pieces = empty_conv(3, 3, 1), []
    for t in range(6):
        y, carry = _conv(x[:, t : t + 1], kernel, ids[:, t : t + 1], positions[:, t : t + 1], carry)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), whole, atol=1e-6)


def test_causal_and_differentiable():
    """Later inputs have exactly no influence; the kernel's gradient matches finite differences."""
    rng = np.random.default_rng(8)
    x, kernel = jnp.asarray(rng.normal(size=(1, 8, 2)), jnp.float32), jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    steps = jnp.arange(8, dtype=jnp.int32)[None, :]
    out = jax.jit(lambda x, kernel: short_conv(x, kernel, jnp.zeros_like(steps), steps)[0])
    by_x = jax.jit(jax.grad(lambda x: out(x, kernel)[0, 4].sum()))(x)
    assert not by_x[:, 5:].any()
    assert by_x[:, 2:5].all()
    assert not by_x[:, :2].any()
    by_kernel = jax.jit(jax.grad(lambda k: (out(x, k) ** 2).sum()))(kernel)
    f = lambda k: float(np.square(np.asarray(out(x, k), np.float64)).sum())
    for i, j in np.ndindex(3, 2):
        step = np.zeros((3, 2), np.float32)
        step[i, j] = 1e-2
        np.testing.assert_allclose(by_kernel[i, j], (f(kernel + step) - f(kernel - step)) / 2e-2, rtol=2e-3)
