"""The public entry point: errors, the choice of a backend, transformations of JAX, memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kernels.attention.call import DistancePrior
from kernels.path import api
from kernels.path.api import choose, path_attention
from kernels.path.plan import Plan
from kernels.path.shapes import Shape
from tests.kernels.attention.support import PRIORS
from tests.kernels.path.support import Options, Row, call_of, draw

SHAPE = Shape(2, 12, 4, 8, kv_heads=2)
ROWS = ("q", "k", "v", "w", "beta")


def row(seed: int = 0, shape: Shape = SHAPE, dtype: Any = np.float32) -> Row:
    return draw(shape, seed, dtype=dtype, prior="ggd")


def run(arrays: Row, **options: Any) -> Any:
    prior = DistancePrior(arrays["params"], PRIORS["ggd"][0])
    given = {"log_gates": arrays["log_gates"], "sharpness": arrays["sharpness"], "prior": prior}
    return path_attention(*(arrays[name] for name in ROWS), **(given | options))


# ---- Errors ----


def of(**change: Any) -> Any:
    return lambda a: change


ERRORS: dict[str, tuple[type[Exception], str, Any]] = {
    "half-precision w": (
        TypeError,
        "w has dtype bfloat16, must be float32",
        lambda a: {"w": a["w"].astype("bfloat16")},
    ),
    "half-precision beta": (
        TypeError,
        "beta has dtype float16, must be float32",
        lambda a: {"beta": a["beta"].astype("float16")},
    ),
    "half-precision gates": (
        TypeError,
        "log_gates has dtype bfloat16",
        lambda a: {"log_gates": a["log_gates"].astype("bfloat16")},
    ),
    "integer q": (TypeError, "q has dtype int32", lambda a: {"q": a["q"].astype("int32")}),
    "list": (TypeError, "v must be an array, got list", of(v=[1.0])),
    "three axes": (ValueError, r"q has shape \(2, 12, 4\)", lambda a: {"q": a["q"][..., 0]}),
    "other length": (
        ValueError,
        r"k has shape \(2, 11, 2, 8\), must be \[B=2, T=12, Hkv, D=8\]",
        lambda a: {"k": a["k"][:, 1:]},
    ),
    "w per query head": (
        ValueError,
        r"w has shape \(2, 12, 4, 8\), must be \[B=2, T=12, Hkv=2, D=8\]",
        lambda a: {"w": a["q"]},
    ),
    "beta per query head": (ValueError, r"beta has shape \(2, 12, 4\)", lambda a: {"beta": a["log_gates"]}),
    "gates per key head": (
        ValueError,
        r"log_gates has shape \(2, 12, 2\), must be \[B=2, T=12, H=4\]",
        lambda a: {"log_gates": a["beta"]},
    ),
    "heads": (ValueError, "q has H=3 heads, must be a multiple of the Hkv=2", lambda a: {"q": a["q"][:, :, :3]}),
    "empty": (ValueError, "every dimension must be at least 1", lambda a: {name: a[name][:, :0] for name in ROWS}),
    "sharpness": (ValueError, "sharpness has shape", lambda a: {"sharpness": a["sharpness"][:, 0]}),
    "pair of ids": (ValueError, "segment_ids must be one array", lambda a: {"segment_ids": (a["beta"], a["beta"])}),
    "float ids": (
        TypeError,
        "segment_ids has dtype float32",
        lambda a: {"segment_ids": a["beta"][..., 0]},
    ),
    "shape of ids": (ValueError, "segment_ids has shape", lambda a: {"segment_ids": jnp.zeros((2, 11), jnp.int32)}),
    "prior": (TypeError, "prior must be a DistancePrior, got function", of(prior=PRIORS["ggd"][0])),
    "prior of other heads": (
        ValueError,
        r"prior.params has shape \(3,\)",
        of(prior=DistancePrior(jnp.ones(3), PRIORS["alibi"][0])),
    ),
    "flag": (TypeError, "sharpen_prior must be True or False, got 1", of(sharpen_prior=1)),
    "gate scale without gates": (ValueError, "scale_gates=True needs log_gates", of(scale_gates=True, log_gates=None)),
    "traced scale": (TypeError, "use sharpness to learn it", of(scale="0.5x")),
    "infinite scale": (ValueError, "scale=inf must be finite", of(scale=np.inf)),
    "unknown backend": (
        ValueError,
        "implementation='triton' is not one of 'reference', 'xla'",
        of(implementation="triton"),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument_and_what_is_right(name: str) -> None:
    kind, words, change = ERRORS[name]
    arrays = row()
    new = change(arrays)
    options = {key: x for key, x in new.items() if key not in ROWS}
    with pytest.raises(kind, match=words):
        run(arrays | {key: new[key] for key in ROWS if key in new}, **options)


def test_a_named_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(row(), Options("ggd"))
    assert choose(call) == "xla"
    assert choose(call, "reference") == "reference"
    monkeypatch.setattr("kernels.path.xla.supports", lambda call: "it is Sunday")
    with pytest.raises(ValueError, match="implementation='xla' cannot serve this call: it is Sunday"):
        choose(call, "xla")
    with pytest.raises(ValueError, match="no backend can serve this call: xla: it is Sunday"):
        choose(call)
    assert set(api.PREFERENCE) == {"cpu", "gpu", "tpu"}


# ---- Dtypes ----


def test_the_output_has_the_dtype_of_q() -> None:
    arrays = row()
    mixed = arrays | {"q": arrays["q"].astype("bfloat16"), "v": arrays["v"].astype("float16")}
    o, lse = jax.eval_shape(partial(run, return_lse=True), mixed)
    assert (o.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    assert (o.shape, lse.shape) == ((2, 12, 4, 8), (2, 12, 4))


# ---- Transformations ----


def loss(arrays: Row) -> Any:
    o, lse = run(arrays, return_lse=True)
    return (o * jnp.cos(jnp.arange(8.0))[None, None, None]).sum() + jnp.sin(lse).sum()


def assert_same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, err_msg=jax.tree_util.keystr(path))


def test_remat_changes_nothing() -> None:
    arrays = row()
    want = jax.jit(jax.grad(loss))(arrays)
    assert_same(jax.jit(jax.grad(jax.checkpoint(loss)))(arrays), want)
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    assert_same(jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(arrays), want)


def test_vmap_is_a_loop() -> None:
    many = jax.tree.map(lambda *x: jnp.stack(x), *(row(seed) for seed in range(3)))
    got = jax.jit(jax.vmap(jax.grad(loss)))(many)
    one = jax.jit(jax.grad(loss))
    want = jax.tree.map(lambda *x: jnp.stack(x), *(one(jax.tree.map(lambda x, i=i: x[i], many)) for i in range(3)))
    assert_same(got, want)


def test_eight_devices_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch over 4 devices and heads over 2: each device has its heads' parameters, gradients add up over the batch."""
    monkeypatch.setattr("kernels.path.xla.choose_plan", lambda *_: Plan(2, 8, 8))
    arrays = row(shape=Shape(4, 13, 4, 8, kv_heads=2))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tokens, heads = PartitionSpec("data", None, "model"), PartitionSpec("model")
    specs = {name: jax.tree.map(lambda _: heads, x) if name == "params" else tokens for name, x in arrays.items()}
    here = partial(run, return_lse=True)

    def value(attend: Any, arrays: Row) -> Any:
        o, lse = attend(arrays)
        return (o * jnp.cos(jnp.arange(8.0))[None, None, None]).sum() + jnp.sin(lse).sum()

    want = jax.jit(jax.value_and_grad(partial(value, here)))(arrays)
    for check_vma in (True, False):
        split = jax.shard_map(here, mesh=mesh, in_specs=(specs,), out_specs=(tokens, tokens), check_vma=check_vma)
        assert_same(jax.jit(jax.value_and_grad(partial(value, split)))(arrays), want, 1e-4)


# ---- Memory ----


def test_memory_of_both_passes_grows_with_the_length() -> None:
    """Doubling T doubles it, up to T = 65,536, and it stays far below one T × T array."""

    def temporary(length: int) -> int:
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
        rows = {name: shape(1, length, 1, 32) for name in ("q", "k", "v", "w")}
        given = rows | {"beta": shape(1, length, 1), "log_gates": shape(1, length, 1)}

        def loss(a: Row) -> Any:
            return path_attention(*(a[name] for name in ROWS), log_gates=a["log_gates"]).sum()

        return jax.jit(jax.grad(loss)).lower(given).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(2**15), temporary(2**16)
    assert large < 2.05 * small
    row_bytes = 2**16 * 32 * 4
    assert large < 25 * row_bytes
