"""How PaTH carries queries and keys along the row: the algebra of spans, in linear time and plain JAX.

A span is a run of consecutive tokens, summarised by what the rest of the row needs to know about it (`Span`). Two
neighbouring spans join into one (`_join`), and joining is associative, so a row can be cut anywhere and joined in any
order. `block_span` summarises a short block at once with the UT transform of PaTH (arXiv 2505.16381, section 3.2; in
matrix form in Yang et al., arXiv 2406.06484): one triangular inverse and a few products. `span` joins such blocks
pairwise.

A transition H_t = I − beta_t w_t w_tᵀ may be singular (beta = 1), so nothing here ever undoes one. Everything runs in
float32 (float64 for float64 inputs) at the highest matmul precision, whatever the type of q and k: an inverse in 16
bits diverges for repeated tokens with beta near 2.

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


def _stack(a: Array, c: Array, b: Array) -> Array:
    """[[a, 0], [c, b]], written in place: a concatenation would end up, branches and all, in the loops that read it."""
    size = a.shape[-1]
    out = lax.full_like(a, 0, shape=(*a.shape[:-2], 2 * size, 2 * size))
    for part, row, col in ((a, 0, 0), (c, size, 0), (b, size, size)):
        out = lax.dynamic_update_slice(out, part, (*[0] * (a.ndim - 2), row, col))
    return out


# ---- (I + L)⁻¹ ----


def _substitute(lower: Array) -> Array:
    """(I + lower)⁻¹ by forward substitution, all matrices of the batch at once (they are moved to the last axis)."""
    size = lower.shape[-1]
    rows = jnp.moveaxis(lower.reshape(-1, size, size), 0, -1)
    eye = jnp.eye(size, dtype=lower.dtype)

    def row(i: Array, x: Array) -> Array:  # rows from i on are still zero
        return x.at[i].set(eye[i][:, None] - (rows[i][:, None, :] * x).sum(0))

    return jnp.moveaxis(lax.fori_loop(0, size, row, jnp.zeros_like(rows)), -1, 0).reshape(lower.shape)


def _inverse(lower: Array) -> Array:
    size = lower.shape[-1]
    if size <= BASE:
        return _substitute(lower)
    half = size // 2
    inverses = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]], -3))
    a, b = inverses[..., 0, :, :], inverses[..., 1, :, :]
    return _stack(a, -matmul(b, matmul(lower[..., half:, :half], a)), b)


@jax.custom_vjp
def unit_lower_inverse(lower: Array) -> Array:
    """(I + lower)⁻¹ of strictly lower triangular [..., n, n], n ≤ BASE or even at every halving down to BASE.

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]], recursively. Not lax.linalg.triangular_solve: on CPU that
    calls a threaded BLAS from inside XLA's thread pool, which can deadlock.
    """
    return _inverse(lower)


def _inverse_fwd(lower: Array) -> tuple[Array, Array]:
    inverse = _inverse(lower)
    return inverse, inverse


def _inverse_bwd(inverse: Array, grad: Array) -> tuple[Array]:
    flipped = transpose(inverse)
    return (-matmul(flipped, matmul(grad, flipped)),)  # what lies outside the strict triangle belongs to no input


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)


# ---- Blocks and joins ----


def _lower(x: Array, offset: int = 0) -> Array:
    """x [..., n, n] with zeros above its diagonal number −offset."""
    row, col = jnp.arange(x.shape[-2])[:, None], jnp.arange(x.shape[-1])[None, :]
    return jnp.where(jnp.expand_dims(row >= col + offset, range(x.ndim - 2)), x, 0)


def block_span(q: Array, k: Array, w: Array, beta: Array) -> Span:
    """One span per block: q [..., G, L, D], k, w [..., L, D], beta [..., L], all float32 (or all float64).

    With Q, K, W the rows of the block and "tril" with its diagonal, "stril" without:
        T = (I + stril(diag(beta) W Wᵀ))⁻¹ diag(beta),   U = T W,   Z = T stril(W Kᵀ),   E = tril(Q Wᵀ)
        q at the left edge = Q − E U,  scores = Q Kᵀ − E Z,  k at the right edge = K − Zᵀ W,  m = I − Uᵀ W
    """
    *lead, groups, length, dim = q.shape
    flat = q.reshape(*lead, groups * length, dim)
    inverse = unit_lower_inverse(_lower(beta[..., None] * matmul(w, transpose(w)), 1)) * beta[..., None, :]
    u, z = matmul(inverse, w), matmul(inverse, _lower(matmul(w, transpose(k)), 1))
    qw = _lower(matmul(flat, transpose(w)).reshape(*lead, groups, length, length)).reshape(*flat.shape[:-1], length)
    scores = matmul(flat, transpose(k)) - matmul(qw, z)
    eye = jnp.expand_dims(jnp.eye(dim, dtype=k.dtype), range(len(lead)))
    return Span(
        scores.reshape(*lead, groups, length, length),
        (flat - matmul(qw, u)).reshape(q.shape),
        k - matmul(transpose(z), w),
        eye - matmul(transpose(u), w),
    )


def _pairs(x: Array, axis: int) -> tuple[Array, Array]:
    """The even and the odd entries along `axis` (negative)."""
    axis += x.ndim
    x = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    return lax.index_in_dim(x, 0, axis + 1, keepdims=False), lax.index_in_dim(x, 1, axis + 1, keepdims=False)


def _meet(q_right: Array, x: Array) -> Array:
    """q [..., G, L, D] times x [..., D, n] -> [..., G, L, n]."""
    *lead, groups, length, dim = q_right.shape
    return matmul(q_right.reshape(*lead, groups * length, dim), x).reshape(*lead, groups, length, x.shape[-1])


def _join(spans: Span) -> Span:
    """Join neighbours: the spans lie along the axis before the ones that `Span` names; half as many come back."""
    (q_left, q_right), (k_left, k_right) = _pairs(spans.q, -4), _pairs(spans.k, -3)
    m_left, m_right = _pairs(spans.m, -3)
    return Span(
        _join_scores(spans),
        jnp.concatenate([q_left, _meet(q_right, transpose(m_left))], -2),
        jnp.concatenate([matmul(k_left, m_right), k_right], -2),
        matmul(m_left, m_right),
    )


def _join_scores(spans: Span) -> Array:
    (left, right), (_, q_right), (k_left, _) = _pairs(spans.scores, -4), _pairs(spans.q, -4), _pairs(spans.k, -3)
    return _stack(left, _meet(q_right, transpose(k_left)), right)


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
    first = lambda x, axis: lax.index_in_dim(x, 0, axis, keepdims=False)
    return Span(first(spans.scores, -4), first(spans.q, -4), first(spans.k, -3), first(spans.m, -3))


def span_scores(q: Array, k: Array, w: Array, beta: Array, block: int) -> Array:
    """Only the scores [..., G, L, L] of `span`."""
    spans = _blocks(q, k, w, beta, block)
    while spans.m.shape[-3] > 2:
        spans = _join(spans)
    scores = spans.scores if spans.m.shape[-3] == 1 else _join_scores(spans)
    return lax.index_in_dim(scores, 0, -4, keepdims=False)
