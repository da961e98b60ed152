"""The Mosaic kernels of PaTH in the GPU interpreter, against the Triton kernels that they stand for and float64.

The interpreter has no products of operands in registers: `_product` is replaced by one that reads its references.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.path.levels import Level
from kernels.path.transport import block_span
from tests.helpers import relative_rms, x64

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the GPU interpreter needs jax >= 0.11.2")


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parameters of the interpreter, which looks for races as well."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from kernels.path import mosaic_keys, mosaic_moves, mosaic_products, mosaic_queries

    def product(shape: tuple[int, int], *terms: tuple[Any, Any]) -> Any:
        total = jnp.zeros(shape, jnp.float32)
        for a, b in terms:
            total = total + jnp.matmul(a[...], b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # what the tensor cores read needs no fence
        return total

    for module in (mosaic_keys, mosaic_moves, mosaic_products, mosaic_queries):
        monkeypatch.setattr(module, "_product", product)
    return plgpu.InterpretGPUParams(detect_races=True)


def races() -> bool:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call.get_races().races_found


@pytest.mark.slow
@pytest.mark.parametrize("same", [None, 0.0, 0.01], ids=["random", "repeated", "nearly repeated"])
def test_keys_of_a_block(interpreter: Any, same: float | None) -> None:
    """Everything that a block's keys leave behind, at beta = 1.99, as the Triton kernels make it; keys and the product
    against float64."""
    from kernels.path import gpu_keys, mosaic_keys

    rng = np.random.default_rng(0)
    k, w = rng.normal(size=(2, 1, 256, 2, 128)).astype(np.float32)
    w = w if same is None else w[:, :1] + same * w
    w = (w / np.linalg.norm(w, axis=-1, keepdims=True)).astype(np.float32)
    beta = np.full((1, 2, 256), 1.99, np.float32)
    given = jnp.asarray(k, jnp.bfloat16), jnp.asarray(w), jnp.asarray(beta)
    keep = same is None
    got = mosaic_keys.block_keys(*given, keep=keep, interpret=interpreter)
    assert not races()
    want = gpu_keys.block_keys(*given, interpret=True)
    want = {n: x for n, x in want.items() if keep or n not in ("x16", "x_low")}
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].shape == x.shape
        if not name.endswith("low"):  # of parts that are small because the others are close
            assert relative_rms(got[name], x) < 2e-4, name
    with x64():
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64)[0, 128:, 1])
        exact = block_span(wide(given[0])[None], wide(given[0]), wide(w), jnp.asarray(beta[0, 1, 128:], jnp.float64))
    assert relative_rms(got["p16"][0, 1, 1].astype(jnp.float32) + got["p_low"][0, 1, 1], np.asarray(exact.m).T) < 1e-5
    assert relative_rms(got["k16"][0, 128:, 1], exact.k) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("top", [False, True])
def test_products_of_a_level(interpreter: Any, top: bool) -> None:
    """Runs, left edges and whole products of two parents of three children, as the Triton kernel makes them."""
    from kernels.path import gpu_products, mosaic_products
    from kernels.path.gpu_blocks import split

    rng = np.random.default_rng(0)
    p = np.linalg.qr(rng.normal(size=(1, 1, 6, 128, 128)))[0].astype(np.float32)
    level = Level(3, 128)
    got = mosaic_products.runs(split(jnp.asarray(p)), level, top, interpret=interpreter)
    assert not races()
    want = gpu_products.runs(split(jnp.asarray(p)), level, top, True)
    assert relative_rms(got[0], want[0]) < 1e-6
    if not top:
        assert relative_rms(got[1], want[1]) < 1e-6
        assert relative_rms(*(sum(x.astype(jnp.float32) for x in made[2]) for made in (got, want))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("edges", [False, True])
def test_carried_keys(interpreter: Any, edges: bool) -> None:
    """Keys for the queries of two levels, as the Triton kernel carries them."""
    from kernels.path import gpu_moves, mosaic_moves

    rng = np.random.default_rng(0)
    levels = (Level(3, 128), Level(2, 384))
    k = jnp.asarray(rng.normal(size=(1, 768, 1, 128)), jnp.float16)
    first = np.linalg.qr(rng.normal(size=(1, 1, 2, 6, 128, 128)))[0]
    first[:, :, :, [0, 2, 5]] = np.eye(128)  # from a child to the next
    second = np.broadcast_to(np.eye(128), (1, 1, 1, 1, 128, 128))
    given = (k, [jnp.asarray(x, jnp.float16) for x in (first, second)], levels, jnp.bfloat16)
    got = mosaic_moves.carry(*given, edges=edges, interpret=interpreter)
    assert not races()
    want = gpu_moves.carry(*given, edges=edges, interpret=True)
    assert [len(x) for x in got] == [len(x) for x in want] == [2, 2 if edges else 0]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert relative_rms(x, y) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1])
def test_queries_of_a_block(interpreter: Any, count: int) -> None:
    """Outputs and queries of two blocks whose keys two heads share, as the Triton kernel makes them."""
    from kernels.path import gpu_blocks, gpu_keys, mosaic_queries

    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    w = draw(1, 256, 1, 128)
    w, beta = w / jnp.linalg.norm(w, axis=-1, keepdims=True), jnp.full((1, 1, 256), 1.99)
    x: dict[str, Any] = {n: draw(1, 256, 1 + (n == "q"), 128).astype(jnp.bfloat16) for n in "qkv"}
    x |= dict.fromkeys(mosaic_queries.ABSENT)
    keys = gpu_keys.block_keys(x["k"], w, beta, interpret=True)
    moves = [(2, jnp.asarray(np.linalg.qr(rng.normal(size=(1, 1, 1, 128, 128)))[0], jnp.float16))] * count
    options = gpu_blocks.BlockOptions(128**-0.5, True, True)
    got = mosaic_queries.block_queries(options, x, keys, moves, interpret=interpreter)
    assert not races()
    want = gpu_blocks.block_queries(options, x, keys, moves)
    assert relative_rms(got["lse"], want["lse"]) < 1e-3
    assert len(got["queries"]) == len(want["queries"]) == 1 + count
    for a, b in zip([got["o"], *got["queries"]], [want["o"], *want["queries"]], strict=True):
        assert a.dtype == b.dtype
        assert relative_rms(a, b) < 1e-3


def test_queries_with_options_are_not_served() -> None:
    from kernels.path import mosaic_queries

    x: dict[str, Any] = {"q": jnp.zeros((1, 128, 1, 128), jnp.bfloat16)} | dict.fromkeys(mosaic_queries.ABSENT)
    assert mosaic_queries.serves(x, mosaic_queries.MOVES)
    assert not mosaic_queries.serves(x, mosaic_queries.MOVES + 1)
    assert not any(mosaic_queries.serves(x | {n: x["q"]}, 0) for n in mosaic_queries.ABSENT)
