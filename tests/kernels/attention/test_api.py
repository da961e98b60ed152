"""The public entry point: every error names the argument, dispatch never falls back, layouts share one compilation."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import api
from kernels.attention.api import DistancePrior, attention
from tests.kernels.attention import support

F32 = jnp.float32


def arrays(**change: Any) -> dict[str, Any]:
    """q [2, 6, 4, 8], k and v [2, 6, 2, 8], and what a test changes."""
    kv = jnp.ones((2, 6, 2, 8))
    return {"q": jnp.ones((2, 6, 4, 8)), "k": kv, "v": kv} | change


def prior(params: Any = None, log_prior: Any = support.alibi) -> DistancePrior:
    return DistancePrior(jnp.ones(4) if params is None else params, log_prior)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, params: Any, d: Any) -> Any:
        return params * d


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": (arrays(q=jnp.ones((2, 6, 8))), ValueError, r"q has shape \(2, 6, 8\), must be \[B, T, H, D\]"),
    "not an array": (arrays(k=[1.0]), TypeError, "k must be an array, got list"),
    "batch": (
        arrays(k=jnp.ones((3, 6, 2, 8))),
        ValueError,
        r"k has shape \(3, 6, 2, 8\), must be \[B=2, S, Hkv, D=8\]",
    ),
    "keys and values": (
        arrays(v=jnp.ones((2, 7, 2, 8))),
        ValueError,
        r"v has shape .* must be \[B=2, S=6, Hkv=2, Dv\]",
    ),
    "head dim": (arrays(k=jnp.ones((2, 6, 2, 9))), ValueError, r"k has shape \(2, 6, 2, 9\), must be .*D=8"),
    "empty": (arrays(q=jnp.ones((2, 0, 4, 8))), ValueError, "q has shape .* every dimension must be at least 1"),
    "heads": (arrays(q=jnp.ones((2, 6, 3, 8))), ValueError, "H=3 heads, must be a multiple of the Hkv=2 heads"),
    "integers": (arrays(q=jnp.ones((2, 6, 4, 8), int)), TypeError, "q has dtype int32, must be bfloat16, float16"),
    "prior": (arrays(prior=jnp.ones(4)), TypeError, "prior must be a DistancePrior, got ArrayImpl"),
    "prior heads": (arrays(prior=prior(jnp.ones(3))), ValueError, r"prior.params has shape \(3,\), must be \[H=4\]"),
    "prior scalar": (arrays(prior=prior({"a": jnp.ones(())})), ValueError, r"prior.params\['a'\] has shape \(\)"),
    "prior empty": (arrays(prior=prior(())), ValueError, r"prior.params=\(\) holds no array, must .* H=4"),
    "prior half": (
        arrays(prior=prior(jnp.ones(4, jnp.bfloat16))),
        TypeError,
        "prior.params has dtype bfloat16, must be",
    ),
    "prior unhashable": (arrays(prior=prior(log_prior=Unhashable())), TypeError, "log_prior must be hashable"),
    "prior shape": (
        arrays(prior=prior(log_prior=lambda p, d: p)),
        ValueError,
        r"log_prior maps .* \(2, 3\) to .* keep",
    ),
    "prior dtype": (arrays(prior=prior(log_prior=lambda p, d: d)), TypeError, "log_prior returns dtype int32, must be"),
    "gates": (arrays(log_gates=jnp.ones((2, 6, 2))), ValueError, r"log_gates has shape .* must be \[B=2, S=6, H=4\]"),
    "gates half": (arrays(log_gates=jnp.ones((2, 6, 4), jnp.float16)), TypeError, "log_gates has dtype float16"),
    "gates not causal": (
        arrays(log_gates=jnp.ones((2, 6, 4)), causal=False),
        ValueError,
        "log_gates needs causal=True",
    ),
    "gate sums": (arrays(log_gates=(jnp.ones(3),) * 3), ValueError, r"log_gates has 3 parts, must be .* \(c_q, c_k\)"),
    "gate sum parts": (arrays(log_gates=((jnp.ones((2, 6, 4)),),) * 2), ValueError, r"log_gates\[0\] has 1 parts"),
    "gate sums shape": (
        arrays(log_gates=(jnp.ones((2, 6, 4)), jnp.ones(3))),
        ValueError,
        r"log_gates\[1\] has shape",
    ),
    "sharpness": (
        arrays(sharpness=jnp.ones((2, 6))),
        ValueError,
        r"sharpness has shape \(2, 6\), must be \[B=2, T=6, H=4\]",
    ),
    "sharpness half": (arrays(sharpness=jnp.ones((2, 6, 4), jnp.bfloat16)), TypeError, "sharpness has dtype bfloat16"),
    "sharpen": (arrays(sharpen_prior=1), TypeError, "sharpen_prior must be True or False, got 1"),
    "causal": (arrays(causal=None), TypeError, "causal must be True or False, got None"),
    "segments": (
        arrays(segment_ids=jnp.zeros((2, 5), int)),
        ValueError,
        r"segment_ids has shape \(2, 5\), must be \[B=2, T=6\]",
    ),
    "segments float": (
        arrays(segment_ids=jnp.zeros((2, 6))),
        TypeError,
        "segment_ids has dtype float32, must be int32",
    ),
    "segments single": (
        arrays(q=jnp.ones((2, 3, 4, 8)), segment_ids=jnp.zeros((2, 3), int)),
        ValueError,
        "T=3 .* S=6: pass a pair",
    ),
    "segments triple": (arrays(segment_ids=(jnp.zeros((2, 6), int),) * 3), ValueError, "segment_ids has 3 parts"),
    "segments kv": (
        arrays(segment_ids=(jnp.zeros((2, 6), int), jnp.zeros((2, 7), int))),
        ValueError,
        r"segment_ids\[1\] has shape",
    ),
    "positions": (arrays(positions=jnp.arange(5)), ValueError, r"positions has shape \(5,\), must be \[T=6\]"),
    "positions batch": (
        arrays(kv_positions=jnp.zeros((3, 6), int)),
        ValueError,
        r"kv_positions has shape .* must be \[B=2, S=6\]",
    ),
    "positions float": (arrays(positions=jnp.zeros(6)), TypeError, "positions has dtype float32, must be int32"),
    "window zero": (arrays(window=0), ValueError, "window=0 must be at least 1"),
    "window huge": (arrays(window=2**31), ValueError, "window=2147483648 must be at most 2147483647"),
    "window float": (arrays(window=2.5), TypeError, "window must be a Python int .* got 2.5"),
    "window bool": (arrays(window=True), TypeError, "window must be a Python int .* got True"),
    "scale": (arrays(scale="big"), TypeError, "scale must be a Python float .* got 'big'"),
    "scale text": (arrays(scale="0.5"), TypeError, "scale must be a Python float .* got '0.5'"),
    "scale bool": (arrays(scale=True), TypeError, "scale must be a Python float .* got True"),
    "scale nan": (arrays(scale=float("nan")), ValueError, "scale=nan must be finite"),
    "implementation": (
        arrays(implementation="cuda"),
        ValueError,
        "implementation='cuda' is not one of 'reference', 'xla'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_are_named(name: str) -> None:
    args, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        attention(**args)


def test_static_arguments_are_refused_when_traced() -> None:
    with pytest.raises(TypeError, match="window must be a Python int"):
        jax.jit(lambda w: attention(**arrays(window=w)))(3)
    with pytest.raises(TypeError, match="scale must be a Python float"):
        jax.jit(lambda s: attention(**arrays(scale=s)))(0.5)


class Picky:
    """A backend that serves nothing."""

    @staticmethod
    def supports(call: api.Call) -> str | None:
        return f"head_dim={call.q.shape[3]} is not 64"


def test_a_named_backend_never_falls_back_and_the_choice_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api.BACKENDS, "picky", "picky")
    monkeypatch.setitem(sys.modules, "picky", Picky)
    with pytest.raises(ValueError, match="implementation='picky' cannot serve this call: head_dim=8 is not 64"):
        attention(**arrays(implementation="picky"))
    monkeypatch.setitem(api.PREFERENCE, "cpu", ("picky", "xla"))
    call = api.make_call(**arrays(**NONE))
    assert api.choose(call) == "xla"
    monkeypatch.setitem(api.PREFERENCE, "cpu", ("picky",))
    with pytest.raises(ValueError, match="no backend can serve this call: picky: head_dim=8 is not 64"):
        api.choose(call)


NONE: dict[str, Any] = dict.fromkeys(
    ("prior", "log_gates", "sharpness", "segment_ids", "positions", "kv_positions", "window", "scale")
) | {"causal": True, "sharpen_prior": True}


def test_output_has_the_type_of_the_queries() -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 5, 2, 8)).astype(np.float32)  # NumPy arrays are accepted
    k = jnp.asarray(rng.normal(size=(1, 5, 2, 8)), jnp.bfloat16)
    o, lse = attention(q, k, k, return_lse=True)
    assert (o.dtype, o.shape, lse.dtype, lse.shape) == (F32, (1, 5, 2, 8), F32, (1, 5, 2))
    want = attention(q, k.astype(F32), k.astype(F32), implementation="reference")
    np.testing.assert_allclose(o, want, atol=1e-5)
    assert attention(k, q, q).dtype == jnp.bfloat16
    wide = attention(q, q, np.concatenate([q, q, q], axis=3))  # values of another head_dim
    assert wide.shape == (1, 5, 2, 24)
    np.testing.assert_allclose(wide[..., 8:16], attention(q, q, q), atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int64"])
def test_positions_may_be_small_integers(dtype: str) -> None:
    rng = np.random.default_rng(0)
    args = arrays(v=jnp.asarray(rng.normal(size=(2, 6, 2, 8)), F32), prior=prior())
    at = np.array([3, 1, 0, 2, 5, 4])
    want = attention(**args, positions=at.astype(np.int32), kv_positions=at.astype(np.int32))
    got = attention(**args, positions=at.astype(dtype), kv_positions=at.astype(dtype))
    np.testing.assert_array_equal(got, want)


def test_positions_may_be_shared_by_the_batch() -> None:
    args = arrays(v=jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 2, 8)), F32), prior=prior())
    at = jnp.array([3, 1, 0, 2, 5, 4])
    one = attention(**args, positions=at, kv_positions=at)
    each = attention(**args, positions=jnp.stack([at, at]), kv_positions=jnp.stack([at, at]))
    np.testing.assert_allclose(one, each, atol=1e-6)
    in_order = attention(**(args | {"v": args["v"][:, jnp.argsort(at)]}))
    np.testing.assert_allclose(one, in_order[:, at], atol=1e-5)  # keys are all equal: distances alone decide
