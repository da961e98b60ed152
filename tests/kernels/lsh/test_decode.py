"""Decoding with a ring of bounded size gives the rows of the whole attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.lsh.api import lsh_attention
from kernels.lsh.call import COMBINE
from kernels.lsh.decode import empty_ring, lsh_extend
from tests.kernels.lsh.test_attention import draw, grids


@pytest.mark.parametrize("combine", COMBINE)
def test_chunks_and_single_tokens_are_the_whole_row(combine: Any) -> None:
    """Two ragged rows: a prompt in two chunks, padded on either side, one chunk longer than the ring, then tokens."""
    arrays, (widths, offsets) = draw(0, length=60), grids(3)
    widths = jnp.minimum(widths, 12)
    offsets = offsets % widths
    want = lsh_attention(**arrays, widths=widths, offsets=offsets, combine=combine, implementation="reference")
    ring = empty_ring(2, 12, 2, 16, 16, jnp.float32)
    extend = jax.jit(lambda *a, **o: lsh_extend(*a, combine=combine, **o))
    at, got = np.array([0, 0]), [[], []]
    for counts, width, right in (([7, 4], 7, False), ([20, 16], 20, True), *[([1, 1], 1, True)] * 9):
        index, mask = np.zeros((2, width), np.int32), np.zeros((2, width), bool)
        for row, count in enumerate(counts):
            places = slice(0, count) if right else slice(width - count, width)
            index[row, places], mask[row, places] = np.arange(at[row], at[row] + count), True
        new = {n: jnp.take_along_axis(x, index[:, :, None, None], axis=1) for n, x in arrays.items()}
        new = {n: jnp.where(mask[:, :, None, None], x, jnp.nan) for n, x in new.items()}
        o, ring = extend(*new.values(), widths, offsets, ring, positions=jnp.asarray(index), mask=jnp.asarray(mask))
        for row in range(2):
            got[row].append(o[row][mask[row]])
            np.testing.assert_array_equal(o[row][~mask[row]], 0)
        at += counts
    for row in range(2):
        np.testing.assert_allclose(jnp.concatenate(got[row]), want[row, : at[row]], atol=1e-5)


def test_many_queries_go_piece_by_piece() -> None:
    arrays, (widths, offsets) = draw(1, length=300), grids(4)
    ring = empty_ring(2, int(widths.max()), 2, 16, 16, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(300), (2, 300))
    o, _ = lsh_extend(*arrays.values(), widths, offsets, ring, positions=positions, mask=positions >= 0)
    np.testing.assert_allclose(o, lsh_attention(**arrays, widths=widths, offsets=offsets), atol=1e-5)
