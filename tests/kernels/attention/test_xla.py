"""The blockwise backend: outputs, lse and every gradient against the dense reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import tiles
from kernels.attention.call import make_call
from kernels.attention.shapes import HEAD_DIMS, ODD_LENGTHS, TEST, Shape
from tests.helpers import x64
from tests.kernels.attention import support
from tests.kernels.attention.support import Case


def agrees(case: Case, seeds: int, tolerance: float, dtype: Any = np.float64, whole: bool = False) -> None:
    """The backend equals the reference on the same (rounded) inputs, with relative RMS errors below the tolerance."""
    grid = None if whole else support.small_grid(case)
    for seed in range(seeds):
        with x64():
            diff, fixed = support.draw(case, seed, dtype)
            exact = jax.tree.map(lambda x: x.astype(jnp.float64), diff)
            weights = support.cotangents(case, seed)
            want = support.gradients(case, exact, fixed, weights, "reference")
            if dtype == np.float64:
                got = support.gradients(case, diff, fixed, weights, "xla", grid)
        if dtype != np.float64:
            got = support.gradients(case, diff, fixed, support.cotangents(case, seed), "xla", grid)
        errors = support.distances(got, want)
        assert max(errors.values()) < tolerance, (seed, errors)


def sometimes(values: Any, slow: Any) -> list[Any]:
    """Parameters of a test, the slow ones marked so."""
    return [pytest.param(x, marks=pytest.mark.slow) if x in slow else x for x in values]


@pytest.mark.parametrize("length", sometimes(ODD_LENGTHS, (2, 3, 63, 65, 127)))
def test_any_length(length: int) -> None:
    agrees(Case(TEST[f"length-{length}"], "ggd", "log", "inside"), 3, 1e-11)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims_in_float32(dim: int) -> None:
    agrees(Case(TEST[f"head-dim-{dim}"]), 2, 1e-5, np.float32, whole=True)


ROW = Shape(2, 50, 4, 8, kv_heads=2)
OPTIONS = {
    "plain": Case(ROW),
    "both-ways": Case(ROW, "alibi", None, "inside", causal=False),
    "window": Case(ROW, "ggd", "log", "outside", window=11),
    "window-both-ways": Case(ROW, "kerple", window=9, causal=False, scale=0.5),
    "packed": Case(ROW, "ggd", "log", "inside", "packed"),
    "packed-both-ways": Case(ROW, None, None, "inside", "packed", causal=False),
    "padded-left": Case(ROW, "table", "log", None, "left", window=20),
    "padded-right": Case(ROW, "alibi", "pair", "outside", "right"),
    "positions": Case(ROW, "ggd", "log", "inside", "packed", "given", window=15),
    "shuffled-keys": Case(ROW, "table", None, "outside", "right", "shuffled"),
    "grouped": Case(TEST["grouped"], "ggd", "pair", "inside", positions="given", causal=True),
    "one-key-head": Case(TEST["one-key-head"], "kerple", "log", "outside"),
    "decode": Case(TEST["decode"], "ggd", "log", "inside", "right"),
    "decode-positions": Case(TEST["decode"], "alibi", "pair", "outside", positions="given"),
    "chunk": Case(TEST["chunk"], "ggd", "log", "inside", "packed", window=40),
    "more-queries": Case(TEST["more-queries"], "alibi", "log", "inside"),
    "extreme": Case(Shape(2, 50, 4, 8), "ggd-extreme", None, "inside"),
}


DEFAULT = ("both-ways", "window", "packed", "padded-right", "positions", "shuffled-keys", "decode", "chunk")
REST = tuple(name for name in OPTIONS if name not in DEFAULT)


@pytest.mark.parametrize("name", sometimes(OPTIONS, REST))
def test_every_option(name: str) -> None:
    agrees(OPTIONS[name], 2, 1e-11)


# Relative RMS against float64 on the same rounded inputs. In bfloat16 (8 bits) probabilities and score gradients are
# rounded before each product, and o before it enters Σ do·o; sums over many pairs (prior parameters) feel that most.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("packed", jnp.bfloat16, 2e-2),
        pytest.param("window", jnp.float16, 2e-3, marks=pytest.mark.slow),
        pytest.param("window", jnp.bfloat16, 2e-2, marks=pytest.mark.slow),
        pytest.param("packed", jnp.float16, 2e-3, marks=pytest.mark.slow),
    ],
)
def test_half_precision(name: str, dtype: Any, tolerance: float) -> None:
    agrees(OPTIONS[name], 2, tolerance, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_as_one_tile_in_float32(name: str) -> None:
    agrees(OPTIONS[name], 3, 2e-5, np.float32, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 33])
@pytest.mark.parametrize("cols", [8, 64])
def test_other_tiles(rows: int, cols: int) -> None:
    case = Case(Shape(1, 100, 2, 8), "ggd", "log", "inside", "packed", window=30)
    with x64():
        diff, fixed = support.draw(case, 0)
        weights = support.cotangents(case, 0)
        want = support.gradients(case, diff, fixed, weights, "reference")
        got = support.gradients(case, diff, fixed, weights, "xla", tiles.make_grid(100, 100, rows, cols))
    assert max(support.distances(got, want).values()) < 1e-11


def test_sums_of_diagonals_agree() -> None:
    rng = np.random.default_rng(0)
    tile, factor = rng.normal(size=(2, 3, 5, 8)), rng.normal(size=(2, 3, 5))
    scaled = tile * factor[..., None]
    want = np.stack([np.trace(scaled, offset, 2, 3) for offset in range(-4, 8)], axis=2)
    for sums in (tiles._diagonals_by_rows, tiles._diagonals_by_cutting):
        np.testing.assert_allclose(
            sums(jnp.asarray(tile, np.float32), jnp.asarray(factor, np.float32)), want, atol=1e-5
        )


def test_blocks_adapt_to_the_call() -> None:
    def grid(batch: int, length: int, heads: int, size: int) -> tiles.Grid:
        q, k = jnp.zeros((batch, length, heads, 8)), jnp.zeros((batch, size, heads, 8))
        none = dict.fromkeys(
            ("prior", "log_gates", "sharpness", "segment_ids", "positions", "kv_positions", "window", "scale")
        )
        return tiles.choose_grid(make_call(q, k, k, causal=True, sharpen_prior=True, **none))

    assert grid(8, 256, 4, 256) == (128, 128, 2, 2)  # small enough for a cache, and half of the causal work is left out
    assert grid(1, 4096, 4, 4096) == (256, 512, 16, 8)
    assert grid(1, 1, 4, 100_000)[:1] == (1,)
    assert grid(1, 1, 4, 100_000).col_blocks == 1
    assert grid(1, 97, 1, 97) == (97, 97, 1, 1)


def visited(case: Case, fixed: support.Arrays, rows: int, cols: int) -> int:
    """Number of tiles that a call visits."""
    diff, _ = support.draw(case, 0, np.float32)
    call = make_call(**support.arguments(case, diff, fixed))
    grid = tiles.make_grid(case.shape.length, case.shape.length, rows, cols)
    bounds = tiles.key_ranges(call, grid)
    return sum(int(end) - int(first) for first, end in (bounds(i) for i in range(grid.row_blocks)))


def test_tiles_that_nobody_sees_are_not_visited() -> None:
    shape = Shape(1, 256, 1, 4)
    assert visited(Case(shape, causal=False), {}, 16, 16) == 16 * 16
    assert visited(Case(shape), {}, 16, 16) == 16 * 17 // 2
    assert visited(Case(shape, window=17), {}, 16, 16) == 2 * 16 - 1
    assert visited(Case(shape, window=17, causal=False), {}, 16, 16) == 3 * 16 - 2
    documents = {"segment_ids": jnp.arange(256)[None] // 64}
    assert visited(Case(shape), documents, 16, 16) == 4 * (4 * 5 // 2)
    padded = {"segment_ids": jnp.where(jnp.arange(256)[None] < 64, -1, 0)}
    assert visited(Case(shape), padded, 16, 16) == 12 * 13 // 2
    swapped = {"kv_positions": (jnp.arange(256) + 128) % 256}  # the later half of the keys is stored first
    assert visited(Case(shape), swapped, 256, 128) == 2
    assert visited(Case(shape, window=1), {"positions": jnp.full(256, 1000)}, 16, 16) == 0
