"""PaTH's directions on GPUs: short convolution, SiLU and L2 norm in one Pallas-Triton kernel per pass.

What they replace is a few operations on arrays that take long to read, so these kernels are about reading: the forward
pass reads w once and writes the directions, the backward pass reads w and their gradient once and writes dw. It keeps
w only. With m the convolution of w and x its SiLU, per token and head of D numbers:

    m_t = Σ_j c_{W−1−j} w_{t−j}    u = x n,    n = 1 / √(Σ x² + eps)
    dx = n (du − x n² Σ du x)    dm = SiLU'(m) dx
    dw_s = Σ_j c_{W−1−j} dm_{s+j}    dc_{W−1−j} = Σ_t dm_t w_{t−j}

for those j < W for which t − j is in t's document. A program of the forward pass has a tile of neighbouring tokens and
loads it once per tap: from the second on out of the cache. Backward, neighbours would have to be made anew for every
tap. So there each row of a program's tile walks along a stretch of tokens and keeps in registers what the next tokens
need: the last W − 1 of w, and the sums for dw that are not complete. Everything has one owner and a fixed order.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.triton import launch

Array = jax.Array
Refs = dict[str, Any]
F32 = jnp.float32
HEADS = range(8, 257, 8)  # with others rows would not start where a thread can load 16 bytes at once
OUTSIDE = -2  # the document of what is before and after a row
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Cut:
    """How the work is cut: warps of a program, numbers of an array that a thread holds; and for the backward pass the
    tokens of a stretch, at most (0: see `Walk.of`), those that a turn of its loop takes, and how far ahead it loads."""

    warps: int
    numbers: int
    stretch: int = 0
    turn: int = 1
    ahead: int = 1

    def rows(self, dim: int) -> int:
        """Of a tile that holds `dim` columns."""
        return max(1, 32 * self.warps * self.numbers // pl.next_power_of_2(dim))

    def fitting(self, width: int) -> "Cut":
        """As many numbers as registers hold when a thread keeps four of each per tap."""
        return replace(self, numbers=min(self.numbers, 1 << max(0, (32 // width).bit_length() - 1)))


FORWARD, BACKWARD = Cut(warps=4, numbers=16), Cut(warps=2, numbers=8, turn=2, ahead=2)
SHORTEST, LONGEST = 32, 128  # tokens of a stretch: more than that are read twice, or leave too few programs
AT_ONCE = 132 * 12  # warps that an H200 holds: 168 registers per thread allow 12 on each of its multiprocessors


@dataclass(frozen=True)
class Options:
    """The static part of a call. silu: after the convolution; eps: added under the root."""

    silu: bool
    eps: float
    forward: Cut = FORWARD
    backward: Cut = BACKWARD
    interpret: bool = False


@dataclass(frozen=True)
class Walk:
    """The backward pass over rows of one length: tokens of a stretch, stretches of a row of tokens, rows of a tile."""

    tokens: int
    stretches: int
    rows: int

    @classmethod
    def of(cls, cut: Cut, shape: tuple[int, ...], width: int) -> "Walk":
        """Stretches of which the last ones, too, fill the GPU: the fewest tokens that its warps take in turn."""
        batch, length, heads, dim = shape

        def walk(stretches: int) -> Walk:
            tokens = cut.turn * pl.cdiv(pl.cdiv(length, stretches), cut.turn)
            return cls(tokens, pl.cdiv(length, tokens), cut.rows(dim))

        def in_turn(walk: Walk) -> int:
            return pl.cdiv(heads * walk.programs(batch) * cut.warps, AT_ONCE) * (walk.tokens + width - 1)

        shortest, longest = (cut.stretch, cut.stretch) if cut.stretch else (SHORTEST, LONGEST)
        counts = range(pl.cdiv(length, longest), pl.cdiv(length, shortest) + 1)
        return min(map(walk, counts), key=in_turn)

    def programs(self, batch: int) -> int:
        """Per head."""
        return pl.cdiv(batch * self.stretches, self.rows)


def refusal(w: Array, taps: Array | None) -> str | None:
    """None, or why these kernels cannot serve the arrays."""
    if taps is None:
        return "no convolution"
    if w.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"w must be bfloat16, float16 or float32, got {w.dtype}"
    if taps.dtype == jnp.float64:
        return "float64"
    if w.shape[3] not in HEADS:
        return f"head_dim must be a multiple of {HEADS.step}, at most {HEADS[-1]}, got {w.shape[3]}"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def units(options: Options, w: Array, taps: Array, document: Array) -> Array:
    """The directions of w [B, T, Hkv, D], float32: unit vectors, or 0 where x is 0.

    taps [width, Hkv, D]: the last one is the token's own. document [B, T] int32, 0 or more: tokens of one number are a
    document, −1 is padding.
    """
    return _forward(options, w, taps, document)[0]


def _forward(options: Options, w: Array, taps: Array, document: Array) -> Any:
    batch, length, heads, dim = w.shape
    cut = options.forward
    made = launch(
        partial(_forward_body, options),
        "path_directions",
        (heads, pl.cdiv(length, cut.rows(dim)), batch),
        {"w": w, "taps": taps, "document": document},
        {"units": jax.ShapeDtypeStruct(w.shape, F32)},
        warps=cut.warps,
        stages=1,
        interpret=options.interpret,
    )
    return made["units"], (w, taps, document)


def _backward(options: Options, kept: Any, d: Array) -> Any:
    w, taps, document = kept
    cut = options.backward.fitting(taps.shape[0])
    walk = Walk.of(cut, w.shape, taps.shape[0])
    programs = walk.programs(w.shape[0])
    made = launch(
        partial(_backward_body, options, walk),
        "path_directions_backward",
        (w.shape[2], programs),
        {"w": w, "taps": taps, "document": document, "d": d},
        {
            "dw": jax.ShapeDtypeStruct(w.shape, w.dtype),
            "dtaps": jax.ShapeDtypeStruct((programs, *taps.shape), F32),
        },
        warps=cut.warps,
        stages=1,
        interpret=options.interpret,
    )
    return made["dw"], made["dtaps"].sum(0).astype(taps.dtype), None


units.defvjp(_forward, _backward)


# ---- Arithmetic ----


def _asm(code: str, *args: Array) -> Array:
    like = jax.ShapeDtypeStruct(args[0].shape, F32)
    constraints = ",".join(["=f", *("f" for _ in args)])
    return plgpu.elementwise_inline_asm(code, args=args, constraints=constraints, pack=1, result_shape_dtypes=[like])[0]


@dataclass(frozen=True)
class Arithmetic:
    """What Triton makes longer than it has to be: it neither joins products with sums, nor does it take the fast
    exponential and reciprocal (2 and 1 units in the last place), and then there is more to compute than to read."""

    interpret: bool

    def fma(self, a: Array, b: Array, c: Array) -> Array:
        """a b + c."""
        if self.interpret:
            return a * b + c
        return _asm("fma.rn.f32 $0, $1, $2, $3;", *jnp.broadcast_arrays(a, b, c))

    def sigmoid(self, x: Array) -> Array:
        if self.interpret:
            return jax.nn.sigmoid(x)
        return _asm("rcp.approx.ftz.f32 $0, $1;", 1 + _asm("ex2.approx.ftz.f32 $0, $1;", x * F32(-LOG2E)))

    def activation(self, options: Options, mixed: Array) -> tuple[Array, Array | None]:
        """(x, slope of the activation, or None where it is 1)."""
        if not options.silu:
            return mixed, None
        share = self.sigmoid(mixed)
        x = mixed * share
        return x, self.fma(x, 1 - share, share)

    def gradient(self, options: Options, mixed: Array, d: Array) -> Array:
        """Gradient in the mixed values from that in the directions."""
        x, slope = self.activation(options, mixed)
        over = _over_norm(options, x)
        along = jnp.sum(x * d, axis=1)[:, None] * over * over
        dx = over * self.fma(x, -along, d)
        return dx if slope is None else dx * slope


def _over_norm(options: Options, x: Array) -> Array:
    """A column."""
    return lax.rsqrt(jnp.sum(x * x, axis=1) + F32(options.eps))[:, None]


# ---- Tiles ----

# A tile has a power of two of columns. Those beyond head_dim are loaded as 0 and stay 0, so that no sum along a row
# notices them, and are not stored.


def _column(size: int) -> Array:
    """0 … size − 1, one number per row of a tile."""
    return lax.broadcasted_iota(jnp.int32, (size, 1), 0)


def _line(dim: int) -> Array:
    """0, 1, …, one number per column of a tile that holds `dim`."""
    return lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(dim)), 1)


def _mask(some: Array, dim: int) -> Array:
    """The first `dim` numbers of a tile's rows, of those among `some`, a column."""
    wide = pl.next_power_of_2(dim)
    if dim < wide:
        some = some & (_line(dim) < dim)
    return jnp.broadcast_to(some, (some.shape[0], wide))


def _place(ref: Any, batch: Array, token: Array, head: Array) -> Any:
    """A tile of ref [B, T, Hkv, D]; token: column."""
    return ref.at[batch, token, head, _line(ref.shape[3])]


def _load(ref: Any, batch: Array, token: Array, head: Array, some: Array) -> Array:
    """The tile in its dtype, 0 in rows that are not among `some`, a column."""
    mask = _mask(some, ref.shape[3])
    return plgpu.load(_place(ref, batch, token, head), mask=mask, other=0.0)


def _store(ref: Any, batch: Array, token: Array, head: Array, some: Array, tile: Array) -> None:
    mask = _mask(some, ref.shape[3])
    plgpu.store(_place(ref, batch, token, head), tile.astype(ref.dtype), mask=mask)


def _read(ref: Any, *at: Any) -> Array:
    """The D numbers of ref […, D] at `at`, as many as a tile has columns."""
    dim, wide = ref.shape[-1], pl.next_power_of_2(ref.shape[-1])
    if dim == wide:
        return ref[(*at, slice(None))]
    line = lax.iota(jnp.int32, wide)
    return plgpu.load(ref.at[(*at, line)], mask=line < dim, other=0.0)


def _write(ref: Any, numbers: Array, *at: Any) -> None:
    """The inverse of `_read`."""
    if ref.shape[-1] == numbers.shape[0]:
        ref[(*at, slice(None))] = numbers
    else:
        line = lax.iota(jnp.int32, numbers.shape[0])
        plgpu.store(ref.at[(*at, line)], numbers, mask=line < ref.shape[-1])


def _within(ref: Any, batch: Array, token: Array) -> Array:
    """Where tokens are of an array [B, T, …]."""
    return (batch < ref.shape[0]) & (token >= 0) & (token < ref.shape[1])


def _documents(ref: Any, batch: Array, token: Array) -> Array:
    return plgpu.load(ref.at[batch, token], mask=_within(ref, batch, token), other=OUTSIDE)


def _taps(ref: Any, head: Array) -> list[Array]:
    """Per number of tokens back, a row of a tile, float32."""
    return [_read(ref, n, head).astype(F32)[None, :] for n in reversed(range(ref.shape[0]))]


# ---- Kernels ----


def _forward_body(options: Options, names: tuple[str, ...], *refs: Any) -> None:
    x: Refs = dict(zip(names, refs, strict=True))
    head, tile, batch = (pl.program_id(n) for n in range(3))
    rows, do = options.forward.rows(x["w"].shape[3]), Arithmetic(options.interpret)
    token = tile * rows + _column(rows)
    own, mixed = _documents(x["document"], batch, token), F32(0)
    for back, tap in enumerate(_taps(x["taps"], head)):
        then = token - back
        same = _within(x["w"], batch, then) & (own == _documents(x["document"], batch, then))
        mixed = do.fma(_load(x["w"], batch, then, head, same).astype(F32), tap, mixed)
    found, _ = do.activation(options, mixed)
    inside = _within(x["units"], batch, token)
    _store(x["units"], batch, token, head, inside, found * _over_norm(options, found))


class Step(NamedTuple):
    """What the backward pass reads of a token of each stretch."""

    w: Array
    d: Array
    document: Array


class Memory(NamedTuple):
    """What a walk keeps: tokens that were loaded ahead, (w, document) of the tokens before, latest first, their dw as
    far as it is known, and dtaps per number of tokens back."""

    ahead: list[Step]
    past: list[tuple[Array, Array]]
    dw: list[Array]
    dtaps: list[Array]


@dataclass(frozen=True)
class Walker:
    """A program of the backward pass: stretch r of its tile is in batch row batch[r] and starts at token start[r]."""

    options: Options
    refs: Refs
    head: Array
    batch: Array
    start: Array

    @property
    def kept(self) -> int:
        """Tokens that another one looks back to."""
        return int(self.refs["taps"].shape[0]) - 1

    def read(self, name: str, n: Any) -> Array:
        ref, token = self.refs[name], self.start + n
        if name == "document":
            return _documents(ref, self.batch, token)
        return _load(ref, self.batch, token, self.head, _within(ref, self.batch, token))

    def step(self, n: Any) -> Step:
        return Step(*(self.read(name, n) for name in Step._fields))

    def begin(self) -> Memory:
        zeros = jnp.zeros((self.start.shape[0], pl.next_power_of_2(self.refs["w"].shape[3])), F32)
        past = [(self.read("w", -n).astype(F32), self.read("document", -n)) for n in range(1, self.kept + 1)]
        ahead = [self.step(n) for n in range(self.options.backward.ahead)]
        return Memory(ahead, past, [zeros] * self.kept, [zeros] * (self.kept + 1))

    def go(self, n: Any, taps: list[Array], memory: Memory, own: bool) -> Memory:
        """Past token n of the stretches, or, not their `own`, one past their end, which dw of theirs still needs."""
        do = Arithmetic(self.options.interpret)
        here, *ahead = [*memory.ahead, self.step(n + self.options.backward.ahead)]
        same = [here.document == document for _, document in memory.past]
        w = here.w.astype(F32)
        seen = [w, *(jnp.where(s, then, F32(0)) for s, (then, _) in zip(same, memory.past, strict=True))]
        mixed = seen[0] * taps[0]
        for then, tap in zip(seen[1:], taps[1:], strict=True):
            mixed = do.fma(then, tap, mixed)
        d = do.gradient(self.options, mixed, here.d)
        dw = [d * taps[0]]
        for s, tap, partial_dw in zip(same, taps[1:], memory.dw, strict=True):
            dw.append(jnp.where(s, do.fma(d, tap, partial_dw), partial_dw))
        dtaps = memory.dtaps
        if own:
            dtaps = [do.fma(then, d, total) for then, total in zip(seen, dtaps, strict=True)]
        self.finish(n - self.kept, dw.pop())
        return Memory(ahead, [(w, here.document), *memory.past][: self.kept], dw, dtaps)

    def finish(self, n: Any, dw: Array) -> None:
        ref, token = self.refs["dw"], self.start + n
        _store(ref, self.batch, token, self.head, (n >= 0) & _within(ref, self.batch, token), dw)


def _backward_body(options: Options, walk: Walk, names: tuple[str, ...], *refs: Any) -> None:
    x: Refs = dict(zip(names, refs, strict=True))
    head, row = pl.program_id(0), pl.program_id(1) * walk.rows + _column(walk.rows)
    batch, start = lax.div(row, jnp.int32(walk.stretches)), lax.rem(row, jnp.int32(walk.stretches)) * walk.tokens
    walker, taps, turn = Walker(options, x, head, batch, start), _taps(x["taps"], head), options.backward.turn

    def tokens(i: Array, memory: Memory) -> Memory:
        for n in range(turn):
            memory = walker.go(i * turn + n, taps, memory, own=True)
        return memory

    memory = lax.fori_loop(0, walk.tokens // turn, tokens, walker.begin())
    for n in range(walk.tokens, walk.tokens + walker.kept):
        memory = walker.go(jnp.int32(n), taps, memory, own=False)
    for n, total in enumerate(reversed(memory.dtaps)):
        _write(x["dtaps"], jnp.sum(total, axis=0), pl.program_id(1), n, head)
