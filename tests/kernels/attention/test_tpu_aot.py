"""The TPU kernels compiled for real chips with libtpu. A compile failure is a test failure; no TPU is needed."""

import importlib.util
from typing import Any

import pytest

from bampath import config
from kernels.attention import aot

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -r requirements-tpu.txt"
)
CASES = {case.name: case for case in aot.CASES + aot.EXTRA}


@pytest.mark.parametrize("name", [case.name for case in aot.CASES])
def test_the_named_configurations_are_the_compiled_shapes(name: str) -> None:
    model, case = config.get(name).model, CASES[name]
    heads, kv_heads = model.heads, model.kv_heads or model.heads
    assert (case.length, case.heads, case.kv_heads) == (model.train_length, heads, kv_heads)
    assert case.head_dim == (model.head_dim or model.dim // heads)
    assert case.dtype == model.dtype


@needs_libtpu
@pytest.mark.aot
@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", aot.TOPOLOGIES)
@pytest.mark.parametrize("name", list(CASES))
def test_forward_and_backward_compile_inside_shard_map(name: str, topology: str) -> None:
    compiled, row = aot.compile_case(CASES[name], topology, backward=True)
    # One forward kernel, and one for the gradients, or two where dq of a row does not fit in VMEM.
    assert row["kernels"] == (3 if name in ("multi-query", "long") else 2)
    # No head dimension pays for padding in HBM (rows that are no multiple of 128 lanes pad the lengths).
    if row["T"] % 512 == 0:
        assert row["argument_bytes"] < 1.02 * row["unpadded_input_bytes"] + 2**16
    # Linear memory: inputs, outputs, gradients and float32 sums of the gradients, never T × T.
    assert row["memory_bytes"] < 12 * row["unpadded_input_bytes"] + 2**26
    assert collectives(compiled) <= {"all-reduce"}


def collectives(compiled: Any) -> set[str]:
    """Which collectives the program contains; only the sum of prior gradients over the batch is expected."""
    text = compiled.as_text()
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return {name for name in names if f" {name}(" in text or f" {name}-start(" in text}
