"""What the Mosaic GPU kernels compute, against float64, on CPU (emulation.py): outputs and every gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import bench_parts
from kernels.attention.bench_cases import Case, function, inputs

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need jax >= 0.11.2")

CASES = (
    Case("fox, some gates shut", 1, 300, 1, 64, gates=True, shut=True, dtype="float16"),
    Case("fox+bam+ssmax, outside, negative, GQA", 1, 150, 2, 64, "ggd", -1.0, True, Hkv=1,
         dtype="float16", options={"sharpen_prior": False}),
    Case("fox+bam+ssmax, window, fewer queries", 1, 140, 1, 64, "ggd", 1.0, True, S=280,
         dtype="float16", options={"window": 199}),
    Case("fox+bam+ssmax, documents", 1, 400, 1, 64, "ggd", 1.0, True, documents=290, dtype="float16"),
    Case("bam+ssmax, documents longer than tiles", 1, 400, 1, 64, "ggd", 1.0, documents=290, dtype="float16"),
    Case("alibi, not causal", 1, 130, 1, 64, "alibi", dtype="float16", options={"causal": False}),
    Case("head 48, GQA, window, fewer queries", 2, 141, 4, 48, Hkv=2, S=190, dtype="float16", options={"window": 99}),
    Case("head 48, fox+bam+ssmax, documents", 1, 201, 2, 48, "ggd", 1.0, True, documents=130, dtype="float16"),
    Case("head 40, bam+ssmax", 1, 133, 3, 40, "ggd", 1.0, dtype="float16"),
    Case("head 20, alibi, not causal", 1, 130, 1, 20, "alibi", dtype="float16", options={"causal": False}),
    Case("head 96", 1, 130, 1, 96, dtype="float16"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_outputs_and_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernels.attention import emulation

    emulation.install(monkeypatch, ("2x128x8", "2x64x8", "2x64x8"))
    x, other, cotangents = inputs(case)
    both = lambda name: bench_parts.with_gradients(function(case, other, name))
    with jax.disable_jit():
        got = jax.device_get(both("mosaic_gpu")(x, cotangents))
    with jax.enable_x64(True):
        wide: Any = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (x, cotangents))
        want = jax.device_get(jax.jit(both("reference"))(*wide))
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    errors = {jax.tree_util.keystr(path): bench_parts.relative_rms(a, b) for (path, a), b in pairs}
    limit = lambda name: 4e-2 if "params" in name else 1e-5 if "gates" in name else bench_parts.LIMITS["float16"]
    assert all(error < limit(name) for name, error in errors.items()), errors
