"""How PaTH carries queries and keys along the row: the algebra of spans, in linear time and plain JAX.

A span is a run of consecutive tokens, summarised by what the rest of the row needs to know about it (`Span`). Two
neighbouring spans join into one (`_join`), and joining is associative, so a row can be cut anywhere and joined in any
order. `block_span` summarises a short block at once with the UT transform of PaTH (arXiv 2505.16381, section 3.2; in
matrix form in Yang et al., arXiv 2406.06484): one triangular solve and three products. `span` joins such blocks pairwise.

A transition H_t = I − beta_t w_t w_tᵀ may be singular (beta = 1), so nothing here ever undoes one. Everything runs in
float32 (float64 for float64 inputs) at the highest matmul precision, whatever the type of q and k: an inverse in 16 bits
diverges for repeated tokens with beta near 2.

Shape names: … leading axes (batch, key heads), G query heads per key head, L tokens of a span, D head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
BASE = 16  # triangular blocks up to this size are inverted row by row


class Span(NamedTuple):
    """A run of L tokens first..last.

    scores [..., G, L, L]: q_iᵀ H_i … H_{j+1} k_j for j ≤ i, finite without meaning for j > i.
    q [..., G, L, D]: queries at the left edge, row i is q_iᵀ H_i … H_first.
    k [..., L, D]: keys at the right edge, row j is (H_last … H_{j+1} k_j)ᵀ.
    m [..., D, D] = H_first … H_last: moves a row of keys over the span, k m; a row of queries goes the other way, q mᵀ.
    """

    scores: Array
    q: Array
    k: Array
    m: Array


def matmul(x: Array, y: Array) -> Array:
    """x y in full float32."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def transpose(x: Array) -> Array:
    """Swap the last two axes."""
    return jnp.swapaxes(x, -1, -2)


# ---- (I + L)⁻¹ ----


def _substitute(lower: Array) -> Array:
    """(I + lower)⁻¹ by forward substitution, all matrices of the batch at once (they are moved to the last axis)."""
    size = lower.shape[-1]
    rows = jnp.moveaxis(lower.reshape(-1, size, size), 0, -1)
    eye = jnp.eye(size, dtype=lower.dtype)

    def row(i: Array, x: Array) -> Array:  # rows from i on are still zero
        return x.at[i].set(eye[i][:, None] - (rows[i][:, None, :] * x).sum(0))

    return jnp.moveaxis(lax.fori_loop(0, size, row, jnp.zeros_like(rows)), -1, 0).reshape(lower.shape)


def unit_lower_inverse(lower: Array) -> Array:
    """(I + lower)⁻¹ of strictly lower triangular [..., n, n], n ≤ BASE or even at every halving down to BASE.

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]], recursively. Not lax.linalg.triangular_solve: on CPU that calls a
    threaded BLAS from inside XLA's thread pool, which can deadlock.
    """
    size = lower.shape[-1]
    if size <= BASE:
        return _substitute(lower)
    half = size // 2
    inverses = unit_lower_inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]], -3))
    a, b = inverses[..., 0, :, :], inverses[..., 1, :, :]
    c = -matmul(b, matmul(lower[..., half:, :half], a))
    top = jnp.concatenate([a, jnp.zeros_like(a)], -1)
    return jnp.concatenate([top, jnp.concatenate([c, b], -1)], -2)


@jax.custom_vjp
def unit_lower_solve(lower: Array, rhs: Array) -> Array:
    """y of (I + lower) y = rhs; lower [..., n, n] strictly lower triangular, rhs [..., n, m]."""
    return matmul(unit_lower_inverse(lower), rhs)


def _solve_fwd(lower: Array, rhs: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = unit_lower_inverse(lower)
    y = matmul(inverse, rhs)
    return y, (inverse, y)


def _solve_bwd(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    inverse, y = saved
    drhs = matmul(transpose(inverse), dy)
    return -matmul(drhs, transpose(y)), drhs  # the caller's mask keeps the strictly lower part of the first


unit_lower_solve.defvjp(_solve_fwd, _solve_bwd)


# ---- Blocks and joins ----


def block_span(q: Array, k: Array, w: Array, beta: Array) -> Span:
    """One span per block: q [..., G, L, D], k, w [..., L, D], beta [..., L], all float32 (or all float64).

    With W, K, Q the rows of the block, L = stril(diag(beta) W Wᵀ), F = stril(W Kᵀ), E = tril(Q Wᵀ):
        Y = (I + L)⁻¹ diag(beta) [W | F]
        [q at the left edge | scores] = [Q | Q Kᵀ] − E Y
        [m ; k at the right edge] = [I ; K] − Yᵀ W
    """
    *lead, groups, length, dim = q.shape
    rows = jnp.concatenate([w[..., None, :, :], q], -3).reshape(*lead, (groups + 1) * length, dim)
    products = matmul(rows, transpose(jnp.concatenate([w, k], -2))).reshape(*lead, groups + 1, length, 2 * length)
    index = jnp.arange(length)
    below = jnp.expand_dims(index[:, None] > index[None, :], range(len(lead)))
    upto = jnp.expand_dims(index[:, None] >= index[None, :], range(len(lead) + 1))
    ww = jnp.where(below, products[..., 0, :, :length], 0)
    wk = jnp.where(below, products[..., 0, :, length:], 0)
    qw = jnp.where(upto, products[..., 1:, :, :length], 0).reshape(*lead, groups * length, length)
    qk = products[..., 1:, :, length:].reshape(*lead, groups * length, length)

    scaled = beta[..., None]
    y = unit_lower_solve(scaled * ww, scaled * jnp.concatenate([w, wk], -1))
    moved = jnp.concatenate([q.reshape(*lead, groups * length, dim), qk], -1) - matmul(qw, y)
    eye = jnp.broadcast_to(jnp.eye(dim, dtype=k.dtype), (*lead, dim, dim))
    edge = jnp.concatenate([eye, k], -2) - matmul(transpose(y), w)
    scores = moved[..., dim:].reshape(*lead, groups, length, length)
    return Span(scores, moved[..., :dim].reshape(q.shape), edge[..., dim:, :], edge[..., :dim, :])


def _pairs(x: Array, axis: int) -> tuple[Array, Array]:
    """The even and the odd entries along `axis` (negative)."""
    axis += x.ndim
    x = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    return lax.index_in_dim(x, 0, axis + 1, keepdims=False), lax.index_in_dim(x, 1, axis + 1, keepdims=False)


def _stack_scores(left: Array, corner: Array, right: Array) -> Array:
    """[[left, 0], [corner, right]]."""
    top = jnp.concatenate([left, jnp.zeros_like(left)], -1)
    return jnp.concatenate([top, jnp.concatenate([corner, right], -1)], -2)


def _join(spans: Span) -> Span:
    """Join neighbours: the spans lie along the axis before the ones that `Span` names; half as many come back."""
    (left, right), (q_left, q_right) = _pairs(spans.scores, -4), _pairs(spans.q, -4)
    (k_left, k_right), (m_left, m_right) = _pairs(spans.k, -3), _pairs(spans.m, -3)
    *lead, groups, length, dim = q_right.shape
    meet = jnp.concatenate([transpose(k_left), transpose(m_left)], -1)
    met = matmul(q_right.reshape(*lead, groups * length, dim), meet).reshape(*lead, groups, length, length + dim)
    carried = matmul(jnp.concatenate([k_left, m_left], -2), m_right)
    return Span(
        _stack_scores(left, met[..., :length], right),
        jnp.concatenate([q_left, met[..., length:]], -2),
        jnp.concatenate([carried[..., :length, :], k_right], -2),
        carried[..., length:, :],
    )


def _last_scores(spans: Span) -> Array:
    """The scores of the join of two spans, without the rest."""
    (left, right), (_, q_right), (k_left, _) = _pairs(spans.scores, -4), _pairs(spans.q, -4), _pairs(spans.k, -3)
    *lead, groups, length, dim = q_right.shape
    corner = matmul(q_right.reshape(*lead, groups * length, dim), transpose(k_left))
    return _stack_scores(left, corner.reshape(*lead, groups, length, length), right)[..., 0, :, :, :]


def _blocks(q: Array, k: Array, w: Array, beta: Array, block: int) -> Span:
    """Spans of blocks of `block` tokens, along a new axis before the ones that `Span` names."""
    *lead, groups, length, dim = q.shape
    count = length // block
    cut = lambda x: x.reshape(*lead, count, block, *x.shape[len(lead) + 1 :])
    q = jnp.moveaxis(q.reshape(*lead, groups, count, block, dim), -3, -4)
    return block_span(q, cut(k), cut(w), cut(beta))


def span(q: Array, k: Array, w: Array, beta: Array, block: int) -> Span:
    """The span of L = block · 2ⁿ tokens: q [..., G, L, D], k, w [..., L, D], beta [..., L].

    Work per head 2 L² D for the scores and O(L D (D log₂(L / block) + block)) for the rest.
    """
    spans = _blocks(q, k, w, beta, block)
    while spans.m.shape[-3] > 1:
        spans = _join(spans)
    return Span(*(lax.index_in_dim(x, 0, axis, keepdims=False) for x, axis in zip(spans, _SPAN_AXIS, strict=True)))


_SPAN_AXIS = (-4, -4, -3, -3)


def span_scores(q: Array, k: Array, w: Array, beta: Array, block: int) -> Array:
    """Only the scores [..., G, L, L] of `span`."""
    spans = _blocks(q, k, w, beta, block)
    if spans.m.shape[-3] == 1:
        return spans.scores[..., 0, :, :, :]
    while spans.m.shape[-3] > 2:
        spans = _join(spans)
    return _last_scores(spans)
