"""Attention over rows whose tokens are spread over the devices of the context axis; runs inside `shard_map`.

A row of T tokens on n devices is 2 n chunks of h = T / 2n tokens; device i stores chunks 2i and 2i + 1. Keys are
gathered (with grouped heads they are few), queries change places: device i works on chunks i and 2n − 1 − i, which
together see as many keys as every other pair, so that causal work is even (Llama 3, arXiv 2407.21783, section 3.3.2).

For each chunk the keys are rolled until the chunk's own stand at the end of the row. That is the default order of the
kernels (queries are the last keys), so distances, windows and priors are right without explicit positions; what the
roll brought from the future to the front gets a negative segment id, and whole tiles of it are skipped.

Gates: the log gates are gathered, and each device forms the running sums of the whole row: T numbers per head, the same
bits as on one device. Sharpness is a number per query and travels with it.

PaTH: each chunk is summarised by its queries at its left edge, its keys at its right edge and its product m, D × D per
key head (`kernels.path.decode.summarise`). Attention inside a chunk is the path kernel's; to earlier chunks it is plain
attention of q at the left edge of chunk c to keys k_j m_{j+1} … m_{c−1}. The two are merged by their lse (PaTH, arXiv
2505.16381, section 3.5, passes the same matrices around a ring).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention import api as attention_api
from kernels.attention.call import Call, make_call
from kernels.attention.gates import document_sums, running_sums
from kernels.attention.union import union
from kernels.path import api as path_api
from kernels.path.call import blank
from kernels.path.decode import summarise

Array = jax.Array
Arrays = dict[str, Any]
AXIS = "context"
_SAVED = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")


# ---- Chunks: [B, L, …] of a device is [2 B, h, …], the first chunk of every row before the second ----


def _split(x: Array) -> Array:
    half = x.shape[1] // 2
    return jnp.concatenate([x[:, :half], x[:, half:]], axis=0)


def _join(x: Array) -> Array:
    first, second = jnp.split(x, 2, axis=0)
    return jnp.concatenate([first, second], axis=1)


def _routes(size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(from, to) devices of the even and of the odd chunks; each is a permutation."""
    routes = [(chunk // 2, min(chunk, 2 * size - 1 - chunk)) for chunk in range(2 * size)]
    return routes[0::2], routes[1::2]


def _mine(size: int) -> tuple[Array, Array]:
    """The even and the odd chunk that this device works on."""
    me = lax.axis_index(AXIS)
    even = jnp.where(me % 2 == 0, me, 2 * size - 1 - me)
    return even, 2 * size - 1 - even


def _to_work(x: Array, size: int) -> Array:
    """Chunks [2 B, h, …] from where they are stored to where they are worked on."""
    parts = zip(jnp.split(x, 2, axis=0), _routes(size), strict=True)
    return jnp.concatenate([lax.ppermute(part, AXIS, route) for part, route in parts], axis=0)


def _to_store(x: Array, size: int) -> Array:
    """The inverse of `_to_work`."""
    parts = zip(jnp.split(x, 2, axis=0), _routes(size), strict=True)
    back = [lax.ppermute(part, AXIS, [(b, a) for a, b in route]) for part, route in parts]
    return jnp.concatenate(back, axis=0)


def _row(x: Array) -> Array:
    """The whole row [B, T, …] of what is stored as [B, L, …]."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True)


def _ending(row: Array, chunk: Array, half: int) -> Array:
    """A row [B, T, …] rolled until `chunk` stands at its end."""
    return jnp.roll(row, row.shape[1] - (chunk + 1) * half, axis=1)


def _keys_for(mine: tuple[Array, Array], half: int, row: Array) -> Array:
    """Rows for the two chunks of this device, [2 B, T, …]."""
    return jnp.concatenate([_ending(row, chunk, half) for chunk in mine], axis=0)


def _key_ids(mine: tuple[Array, Array], half: int, ids: Array, own: bool) -> Array:
    """Segment ids [2 B, T] of those keys: −1 for what comes after the chunk, and for the chunk itself unless `own`."""
    length = ids.shape[1]
    index = jnp.arange(length)[None]

    def one(chunk: Array) -> Array:
        before = (index >= length - (chunk + 1) * half) & (index < (length if own else length - half))
        return jnp.where(before, _ending(ids, chunk, half), -1)

    return jnp.concatenate([one(chunk) for chunk in mine], axis=0)


def _gates_for(mine: tuple[Array, Array], half: int, sums: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
    """(q_hi, q_lo [2 B, h, H], k_hi, k_lo [2 B, T, H]) of running sums [B, T, H] over the row."""
    at = lambda x: jnp.concatenate([lax.dynamic_slice_in_dim(x, c * half, half, axis=1) for c in mine], axis=0)
    high, low = sums
    return at(high), at(low), _keys_for(mine, half, high), _keys_for(mine, half, low)


def _run(call: Call, implementation: str | None) -> tuple[Array, Array]:
    return import_module(attention_api.BACKENDS[attention_api.choose(call, implementation)]).attend(call)


def _recomputed(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Backward, the gathered rows are gathered once more instead of being kept; outputs of kernels are kept."""

    def wrapped(arrays: Arrays, **options: Any) -> Array:
        return jax.checkpoint(partial(attend, **options), policy=_SAVED)(arrays)

    return wrapped


# ---- Plain attention ----


@_recomputed
def attention(
    arrays: Arrays, *, size: int, implementation: str | None, sharpen_prior: bool, window: int | None
) -> Array:
    """`kernels.attention.api.attention` of one device's tokens [B, L, …] to the whole row -> o [B, L, H, Dv].

    arrays: q, k, v, and where there are any prior, log_gates, sharpness, segment_ids. size: devices of the axis.
    """
    q, k, v = (arrays[name] for name in "qkv")
    half, mine = q.shape[1] // 2, _mine(size)
    keys = partial(_keys_for, mine, half)
    work: Callable[[Any], Any] = lambda x: None if x is None else _to_work(_split(x), size)
    ids = arrays.get("segment_ids", jnp.zeros(q.shape[:2], jnp.int32))
    row_ids = _row(ids)
    call = make_call(
        work(q),
        keys(_row(k)),
        keys(_row(v)),
        prior=arrays.get("prior"),
        log_gates=None,
        sharpness=work(arrays.get("sharpness")),
        sharpen_prior=sharpen_prior,
        segment_ids=(work(ids), _key_ids(mine, half, row_ids, own=True)),
        positions=None,
        kv_positions=None,
        window=window,
        causal=True,
        scale=None,
    )
    if "log_gates" in arrays:
        call = replace(call, gates=_gates_for(mine, half, document_sums(_row(arrays["log_gates"]), row_ids)))
    o, _ = _run(call, implementation)
    return _join(_to_store(o, size))


# ---- PaTH ----


@_recomputed
def path_attention(
    arrays: Arrays, *, size: int, implementation: str | None, sharpen_prior: bool, scale_gates: bool
) -> Array:
    """`kernels.path.api.path_attention` of one device's tokens [B, L, …] to the whole row -> o [B, L, H, Dv].

    arrays: q, k, v, w, beta, and where there are any prior, log_gates, sharpness, segment_ids.
    """
    given = arrays.get("segment_ids")
    tokens = {name: x for name, x in arrays.items() if name not in ("prior", "segment_ids")}
    tokens = {name: blank(given, x, 1 if name == "sharpness" else 0) for name, x in tokens.items()}
    prior, ids = arrays.get("prior"), None if given is None else _split(given)
    chunks = {name: _split(x) for name, x in tokens.items()}
    o, lse = path_api.path_attention(
        *(chunks[name] for name in ("q", "k", "v", "w", "beta")),
        log_gates=chunks.get("log_gates"),
        sharpness=chunks.get("sharpness"),
        prior=prior,
        segment_ids=ids,
        sharpen_prior=sharpen_prior,
        scale_gates=scale_gates,
        implementation=implementation,
        return_lse=True,
    )
    call = _past_call(chunks, ids, prior, size, sharpen_prior, scale_gates)
    past_o, past_lse = (_to_store(x, size) for x in _run(call, implementation))
    return _join(union((o, lse), (past_o, past_lse))[0].astype(tokens["q"].dtype))


def _past_call(
    chunks: Arrays, ids: Array | None, prior: Any, size: int, sharpen_prior: bool, scale_gates: bool
) -> Call:
    """Attention of the two chunks of this device to all earlier chunks, whose keys are carried to its left edge."""
    q, v = chunks["q"], chunks["v"]
    batch, half, mine = q.shape[0] // 2, q.shape[1], _mine(size)
    here = summarise(q, chunks["k"], chunks["w"], chunks["beta"])
    k_row = _row(_join(here.k))
    products = lax.all_gather(here.m.reshape(2, batch, *here.m.shape[1:]), AXIS, axis=0, tiled=True)
    carried = [_ending(_carry(k_row, _until(products, c)).astype(q.dtype), c, half) for c in mine]
    ids = jnp.zeros(q.shape[:2], jnp.int32) if ids is None else ids
    sharpness = chunks.get("sharpness")
    call = make_call(
        _to_work(here.q.astype(q.dtype), size),
        jnp.concatenate(carried, axis=0),
        _keys_for(mine, half, _row(_join(v))),
        prior=prior,
        log_gates=None,
        sharpness=None if sharpness is None else _to_work(sharpness, size),
        sharpen_prior=sharpen_prior,
        segment_ids=(_to_work(ids, size), _key_ids(mine, half, _row(_join(ids)), own=False)),
        positions=None,
        kv_positions=None,
        window=None,
        causal=True,
        scale=None,
    )
    if "log_gates" not in chunks:
        return call
    steps = _row(_join(chunks["log_gates"])) * (call.scale if scale_gates else 1.0)
    return replace(call, gates=_gates_for(mine, half, running_sums(steps)))


def _until(products: Array, chunk: Array) -> Array:
    """For each chunk j < `chunk` the product m_{j+1} … m_{chunk−1} that moves its keys to the left edge of `chunk`.

    products [2 n, B, Hkv, D, D] -> the same shape; without meaning for j >= chunk.
    """
    eye = jnp.broadcast_to(jnp.eye(products.shape[-1], dtype=products.dtype), products.shape[1:])

    def step(moved: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        j, m = x
        return jnp.where(j < chunk, jnp.matmul(m, moved, precision=lax.Precision.HIGHEST), moved), moved

    return lax.scan(step, eye, (jnp.arange(products.shape[0]), products), reverse=True)[1]


def _carry(k_row: Array, moves: Array) -> Array:
    """Keys [B, T, Hkv, D], each chunk's times its move."""
    count = moves.shape[0]
    cut = k_row.reshape(k_row.shape[0], count, -1, *k_row.shape[2:])
    return jnp.einsum("bnshd,nbhde->bnshe", cut, moves, precision=lax.Precision.HIGHEST).reshape(k_row.shape)
