"""RoPE: exact phases, rotations, every rescaling against a separate float64 implementation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.positions import Geometry, Slots, Tokens, parse
from bampath.positions.phases import angle, cos_sin
from bampath.positions.rope import RoPE, rope_frequencies, rotate
from tests.helpers import x64
from tests.positions import oracles


@functools.partial(jax.jit, static_argnums=0)
def _fill(spec, q, k, positions):
    part = parse(spec).at(0).parts[0]
    heads, head_dim = q.shape[2:]
    geometry = Geometry(dim=8, heads=heads, kv_heads=k.shape[2], head_dim=head_dim)
    positions = jnp.asarray(positions, jnp.int32)
    tokens = Tokens(jnp.zeros((*positions.shape, 8)), positions, positions + 1, jnp.zeros_like(positions))
    return part.fill({}, geometry, Slots(q, k), tokens, None)[0]


@functools.partial(jax.jit, static_argnums=1)
def _cos_sin(positions, base):
    return cos_sin(positions, rope_frequencies(RoPE(base=base), 128, 512)[0])


@pytest.mark.parametrize("start", [0, 10**5, 10**6, 2**31 - 40, -(10**6)])
def test_phases_are_exact_at_any_position(start):
    positions = np.arange(start, start + 33, dtype=np.int32)
    for base in (10000.0, 500000.0):
        frequencies = rope_frequencies(RoPE(base=base), 128, 512)[0]
        phase = positions[:, None].astype(np.float64) * frequencies[None, :]
        cos, sin = _cos_sin(positions, base)
        assert cos.dtype == sin.dtype == jnp.float32
        np.testing.assert_allclose(cos, np.cos(phase), atol=1e-6)
        np.testing.assert_allclose(sin, np.sin(phase), atol=1e-6)
    np.testing.assert_allclose(np.cos(angle(jnp.asarray(positions), 0.3)), np.cos(positions * 0.3), atol=1e-6)


def test_phases_refuse_rounded_frequencies():
    with pytest.raises(TypeError, match="float32"):
        cos_sin(jnp.arange(3), np.ones(2, np.float32))
    with pytest.raises(TypeError, match="positions are integers"):
        cos_sin(jnp.arange(3.0), np.ones(2))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_is_the_matrix(layout):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(2, 3, 2, 8))
    positions = np.asarray([[0, 1, 2], [7, 100, 31]])
    slots = _fill(f"rope(10000,layout={layout})", jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32), positions)
    frequencies = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    for given, got in ((q, slots.q), (k, slots.k)):
        for b, t in np.ndindex(2, 3):
            turned = given[b, t] @ oracles.rope_matrix(positions[b, t], frequencies, layout).T
            np.testing.assert_allclose(got[b, t], turned, atol=2e-6)


def test_only_distance_matters_and_layouts_are_a_permutation():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 5, 1, 16)), jnp.float32) for _ in range(2))
    at = np.arange(5)[None, :]
    logits = lambda slots: np.einsum("bthd,bshd->bts", slots.q, slots.k)
    near, far = (logits(_fill("rope", q, k, at + shift)) for shift in (0, 10**6))
    np.testing.assert_allclose(near, far, atol=2e-5)
    shuffle = np.asarray([n + 8 * half for n in range(8) for half in (0, 1)])  # interleaved place -> half-split place
    interleaved = _fill("rope(layout=interleaved)", q[..., shuffle], k[..., shuffle], at)
    np.testing.assert_allclose(logits(interleaved), near, atol=2e-5)


def test_fraction_leaves_slow_pairs_alone():
    frequencies = rope_frequencies(RoPE(fraction=0.25), 64, 512)[0]
    np.testing.assert_array_equal(frequencies[:8], rope_frequencies(RoPE(), 64, 512)[0][:8])
    np.testing.assert_array_equal(frequencies[8:], np.zeros(24))
    q = jnp.ones((1, 2, 1, 8))
    np.testing.assert_array_equal(_fill("rope(fraction=0)", q, q, np.asarray([[5, 9]])).q, q)
    np.testing.assert_array_equal(rope_frequencies(RoPE(fraction=1.0), 20, 512)[0] > 0, np.ones(10, bool))
    np.testing.assert_array_equal(rope_frequencies(RoPE(fraction=0.3), 20, 512)[0] > 0, np.arange(10) < 3)


def test_bfloat16_queries_are_rotated_in_float32():
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.normal(size=(1, 4, 1, 8)), jnp.bfloat16)
    got = _fill("rope", q, q, np.asarray([[10**6, 10**6 + 1, 3, 4]])).q
    exact = _fill("rope", q.astype(jnp.float32), q.astype(jnp.float32), np.asarray([[10**6, 10**6 + 1, 3, 4]])).q
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


# The rescalings, written from their definitions (wavelengths and turns rather than indices).


def _linear(omega, c):
    return omega / c["factor"], 1.0


def _ntk(omega, c):
    length = c.get("length", c["factor"] * c["original"])
    d = 2 * len(omega)
    alpha = max(length / c["original"] * c["factor"] - (c["factor"] - 1), 1.0)
    base = c["base"] * alpha ** (d / (d - 2)) if length > c["original"] else c["base"]
    return np.asarray([1 / base ** (2 * n / d) for n in range(d // 2)]), 1.0


def _yarn(omega, c):
    d, fast, slow = 2 * len(omega), c.get("beta_fast", 32), c.get("beta_slow", 1)
    solve = lambda turns: d * math.log(c["original"] / (turns * 2 * math.pi)) / (2 * math.log(c["base"]))
    low, high = solve(fast), solve(slow)
    if c.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    out = []
    for n, w in enumerate(omega):
        keep = 1 - min(max((n - low) / ((high - low) or 0.001), 0), 1)
        out.append(w / c["factor"] * (1 - keep) + w * keep)
    return np.asarray(out), c.get("attention_factor", 0.1 * math.log(c["factor"]) + 1)


def _llama3(omega, c):
    low, high = c.get("low_freq", 1), c.get("high_freq", 4)
    out = []
    for w in omega:
        wavelength = 2 * math.pi / w
        if wavelength < c["original"] / high:
            out.append(w)
        elif wavelength > c["original"] / low:
            out.append(w / c["factor"])
        else:
            smooth = (c["original"] / wavelength - low) / (high - low)
            out.append((1 - smooth) * w / c["factor"] + smooth * w)
    return np.asarray(out), 1.0


def _longrope(omega, c):
    slowing = c["factors"] * len(omega) if len(c["factors"]) == 1 else c["factors"]
    wavelengths = [2 * math.pi / w * f for w, f in zip(omega, slowing, strict=True)]
    default = math.sqrt(1 + math.log(c["factor"], c["original"])) if "factor" in c else 1.0
    return np.asarray([2 * math.pi / length for length in wavelengths]), c.get("attention_factor", default)


DEFINITIONS = {"linear": _linear, "ntk": _ntk, "yarn": _yarn, "llama3": _llama3, "longrope": _longrope}


@pytest.mark.parametrize(
    "case",
    [
        {"scaling": "linear", "factor": 4},
        {"scaling": "ntk", "factor": 2},
        {"scaling": "ntk", "factor": 2, "length": 6000, "original": 2048},
        {"scaling": "ntk", "factor": 1, "length": 16384, "original": 2048, "base": 10000},
        {"scaling": "ntk", "factor": 4, "length": 100, "original": 2048},
        {"scaling": "yarn", "factor": 16, "original": 4096, "base": 10000},
        {"scaling": "yarn", "factor": 4},
        {"scaling": "yarn", "factor": 8, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25},
        {"scaling": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": 2, "truncate": False, "base": 10000},
        {"scaling": "longrope", "factor": 32, "original": 4096, "factors": (2.5,), "base": 10000},
        {"scaling": "longrope", "factors": (3,)},
        {"scaling": "longrope", "factors": (1.5,), "attention_factor": 1.19},
        {"scaling": "llama3", "factor": 8, "original": 8192},
        {"scaling": "llama3", "factor": 32, "original": 8192, "low_freq": 1, "high_freq": 4},
        {"scaling": "llama3", "factor": 4, "low_freq": 2, "high_freq": 6, "base": 10000},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rescalings_against_their_definitions(case, head_dim):
    rope = RoPE(**case)
    full = {"base": 500000.0, "original": 512} | case
    omega = np.asarray([full["base"] ** (-2 * n / head_dim) for n in range(head_dim // 2)])
    want, amplitude = DEFINITIONS[case["scaling"]](omega, full)
    got, got_amplitude = rope_frequencies(rope, head_dim, 512)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert got_amplitude == pytest.approx(amplitude)
    for start in (0, 10**6):
        positions = np.arange(start, start + 9)
        cos, sin = cos_sin(jnp.asarray(positions, jnp.int32), got)
        phase = positions[:, None] * want[None, :]
        np.testing.assert_allclose(cos, np.cos(phase), atol=1e-6)
        np.testing.assert_allclose(sin, np.sin(phase), atol=1e-6)


def test_longrope_slows_each_pair_by_its_own_number():
    text = "rope(10000,scaling=longrope,factor=4,original=1024,factors=1:1.05:2:8.5)"
    rope = parse(text).at(0).parts[0]
    got, amplitude = rope_frequencies(rope, 8, 512)
    np.testing.assert_allclose(got, [1.0, 0.1 / 1.05, 0.01 / 2, 0.001 / 8.5], rtol=1e-12)
    assert amplitude == pytest.approx(math.sqrt(1.2))  # ln 4 / ln 1024 is 1 / 5
    with pytest.raises(ValueError, match="factors has 4 numbers but must have 8"):
        rope_frequencies(rope, 16, 512)
    with pytest.raises(ValueError, match="divides by ln L, and original=1"):
        rope_frequencies(RoPE(scaling="longrope", factors=(2,), factor=2), 8, 1)


def test_known_llama31_frequencies():
    """Llama 3.1 (base 500,000, factor 8, original 8192, head_dim 128): kept, blended and slowed pairs."""
    plain, scaled = (rope_frequencies(r, 128, 1)[0] for r in (RoPE(), RoPE(scaling="llama3", factor=8, original=8192)))
    np.testing.assert_array_equal(scaled[:29], plain[:29])
    assert np.all(scaled[29:35] < plain[29:35])
    assert np.all(scaled[29:35] > plain[29:35] / 8)
    np.testing.assert_allclose(scaled[35:], plain[35:] / 8, rtol=1e-15)


def test_rescalings_begin_at_plain_rope():
    plain = rope_frequencies(RoPE(), 64, 512)[0]
    for scaling in ("linear", "ntk", "yarn", "llama3"):
        got, amplitude = rope_frequencies(RoPE(scaling=scaling, factor=1 + 1e-12), 64, 512)
        np.testing.assert_allclose(got, plain, rtol=1e-11)
        assert amplitude == pytest.approx(1.0, abs=1e-12)


def test_attention_factor_multiplies_queries_and_keys():
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(1, 3, 1, 16)), jnp.float32)
    spec = "rope(scaling=yarn,factor=4,attention_factor="
    one, two = (_fill(f"{spec}{f})", q, q, np.asarray([[3, 50, 900]])) for f in ("1", "1.5"))
    np.testing.assert_allclose(two.q, 1.5 * one.q, rtol=1e-6)
    np.testing.assert_allclose(two.k, 1.5 * one.k, rtol=1e-6)


def test_odd_head_dim_is_refused():
    q = jnp.ones((1, 2, 1, 5))
    with pytest.raises(ValueError, match="even head_dim, got 5"):
        _fill("rope", q, q, np.asarray([[0, 1]]))
    with pytest.raises(ValueError, match="head_dim >= 4"):
        rope_frequencies(RoPE(scaling="ntk", factor=2), 2, 512)


def test_rotation_keeps_float64():
    with x64():
        x = jnp.ones((1, 1, 1, 4), jnp.float64)
        assert rotate(x, jnp.ones((1, 1, 2)), jnp.zeros((1, 1, 2)), "half").dtype == jnp.float64
