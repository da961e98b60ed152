"""The TPU backend: its parts joined on CPU, the kernels interpreted; and compiled ahead of time with libtpu."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath import config
from kernels.path import aot, tpu
from kernels.path.shapes import Shape
from tests.helpers import relative_rms
from tests.kernels.path.support import Options, attend, call_of, cotangents, draw


def compare(shape: Shape, options: Options, ids: Any, **kept: Any) -> dict[str, float]:
    """Relative RMS differences from the definition in float32, outputs and all gradients."""
    arrays = draw(shape, 0, dtype=np.float32, beta=(1.5, 2.0), **kept)
    do, dlse = cotangents(arrays)

    def both(run: Any) -> Any:
        def loss(arrays: Any) -> Any:
            o, lse = run(arrays)
            finite = jnp.where(lse > -jnp.inf, lse, 0)
            return (o * do).sum() + (finite * dlse).sum(), {"o": o, "lse": finite}

        (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
        return out | grads

    got = both(lambda a: tpu.attend(call_of(a, options, ids)))
    want = both(lambda a: attend(a, options, "reference", ids))
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    return {jax.tree_util.keystr(path): relative_rms(a, b) for (path, a), b in pairs}


def test_superblocks_join_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three superblocks, the last one partly full: prior, gates, sharpness, packed rows with padding, grouped heads."""
    monkeypatch.setattr(tpu, "LEAST", 128)
    ids = np.arange(300)[None] * 3 // 300
    ids[:, 70:75] = ids[:, -9:] = -1
    options = Options("ggd", scale_gates=True)
    errors = compare(Shape(1, 300, 2, 32, kv_heads=1), options, jnp.asarray(ids), prior="ggd")
    assert {n: e for n, e in errors.items() if e > 1e-5} == {}


@pytest.mark.slow
def test_superblocks_join_without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "LEAST", 128)
    errors = compare(Shape(1, 400, 2, 64), Options(), None, gates=False, sharpness=False)
    assert {n: e for n, e in errors.items() if e > 1e-5} == {}


@pytest.mark.parametrize("length", [513, 4096, 5000, 65536, 1_000_000])
def test_carried_keys_are_stored_few_times(length: int) -> None:
    size = tpu.superblock(length)
    count = -(-length // size)
    assert size % 128 == 0
    assert 2 <= count <= 8


def test_short_rows_and_float16_are_refused() -> None:
    arrays = draw(Shape(1, 100, 2, 16), 0, dtype=np.float32)
    assert "one superblock" in (tpu.supports(call_of(arrays, Options())) or "")
    arrays |= {n: arrays[n].astype(jnp.float16) for n in "qkv"}
    assert "float16 is neither bfloat16 nor float32" in (tpu.supports(call_of(arrays, Options())) or "")


def test_the_named_configuration_is_the_compiled_shape() -> None:
    model, case = config.get("path-760m").model, aot.CASES[0]
    assert (case.length, case.heads) == (model.train_length, model.heads)
    assert case.head_dim == (model.head_dim or model.dim // model.heads)
    assert case.dtype == model.dtype


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: requirements-tpu.txt")
@pytest.mark.aot
@pytest.mark.slow  # minutes per topology: `make test-tpu-all`
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("case", "topology"),
    [*((aot.CASES[0], topology) for topology in aot.TOPOLOGIES), (aot.CASES[1], aot.TOPOLOGIES[0])],
    ids=lambda value: getattr(value, "name", value),
)
def test_forward_and_backward_compile_inside_shard_map(case: aot.Case, topology: str) -> None:
    _, row = aot.compile_case(case, topology, backward=True)
    assert row["kernels"] >= 2 * (tpu.SUPERBLOCKS - 1)  # per superblock a forward and a backward kernel
    assert row["memory_bytes"] < 40 * row["argument_bytes"]  # linear memory; scores alone would be 100 times
