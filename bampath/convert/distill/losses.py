"""What a student is compared with: the attention outputs of its teacher (stage 1), then its distributions (stage 2).

Stage 1 gives every layer of the student the hidden states of the teacher, so that layers learn side by side and none
sees the mistakes of the one below (RADLADS, arXiv 2505.03005, section 3; used for PaTH in arXiv 2505.16381,
section 4.3). Stage 2 is KL(teacher ‖ student) of the next token, as Hinton et al. write it (arXiv 1503.02531).
"""

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bampath.attention import Attention, RowTokens
from bampath.model import LM, Block, geometry_of, model_config, row_tokens, scan_period
from bampath.positions.registry import parse

Array = jax.Array
Error = Literal["mse", "norm"]


def attention_errors(
    student: LM, teacher: LM, params: Any, teacher_params: Any, batch: dict[str, Array], key: Array, error: Error
) -> tuple[Array, Array]:
    """(errors [L], powers [L]): per layer, summed over tokens with their weights, how far the student's attention is
    from the teacher's on the teacher's hidden states, and the mean square of the teacher's output.

    error: "mse", mean over the width of (t - s)²; "norm", its root. Batches as for training. With model.scan the
    student's layers run as one loop, otherwise one after the other; the numbers are the same.
    """
    row = row_tokens(batch["tokens"], batch.get("segment_ids"), None)
    rngs, weights = {"sample": key}, batch["weights"]
    compare = partial(_compare, weights=weights, error=error)
    if model_config(student.config).scan:
        return _looped(student, teacher, params, teacher_params, batch["tokens"], row, compare)
    _, seen = teacher.apply(
        {"params": teacher_params},
        batch["tokens"],
        batch.get("segment_ids"),
        method="features",
        capture_intermediates=_is_attention,
    )
    layers = [seen["intermediates"][f"layer_{i}"] for i in range(model_config(teacher.config).layers)]
    inputs, wanted = zip(*(_seen(layer) for layer in layers), strict=True)
    given = student.apply({"params": params}, inputs, row, method=_attend, rngs=rngs)
    found = [compare(t, s) for t, s in zip(wanted, given, strict=True)]
    return jnp.stack([errors for errors, _ in found]), jnp.stack([powers for _, powers in found])


def _is_attention(module: Any, method: str) -> bool:
    return method == "__call__" and module.name in ("attention_norm", "attention")


def _seen(layer: Any) -> tuple[Array, Array]:
    """What the attention of a layer read and what it gave, out of the captured intermediates."""
    return layer["attention_norm"]["__call__"][0], layer["attention"]["__call__"][0][0]


def _attend(student: LM, inputs: tuple[Array, ...], row: RowTokens) -> list[Array]:
    """Outputs of the student's attention layers, each on an input of its own."""
    dtype = model_config(student.config).dtype
    return [layer.attention(x.astype(dtype), row)[0] for layer, x in zip(student.layer, inputs, strict=True)]


def _looped(
    student: LM, teacher: LM, params: Any, teacher_params: Any, tokens: Array, row: RowTokens, compare: Any
) -> tuple[Array, Array]:
    """As the unrolled form, but one compiled turn per period of both patterns of layers."""
    c, t = model_config(student.config), model_config(teacher.config)
    period = math.lcm(scan_period(c), scan_period(t))
    scheme, theirs = parse(c.position), parse(t.position)
    ours = [Attention(c, scheme.at(i), geometry_of(c, i), parent=None) for i in range(period)]
    blocks = [Block(t, theirs, i, parent=None) for i in range(period)]

    def body(x: Array, turn: list[Any]) -> tuple[Array, Any]:
        found = []
        for block, attention, (theirs, own) in zip(blocks, ours, turn, strict=True):
            (x, _), seen = block.apply({"params": theirs}, x, row, capture_intermediates=_is_attention)
            read, wanted = _seen(seen["intermediates"])
            given, _ = attention.apply({"params": own}, read.astype(c.dtype), row)
            found.append(compare(wanted, given))
        return x, found

    pairs = [(teacher_params[f"layer_{i}"], params[f"layer_{i}"]["attention"]) for i in range(c.layers)]
    turns = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs[first::period]) for first in range(period)]
    x: Any = teacher.apply({"params": teacher_params}, tokens, row.positions, method="_embed")
    found = jax.lax.scan(body, x, turns)[1]
    errors, powers = (jnp.stack([pair[i] for pair in found], axis=1).reshape(-1) for i in (0, 1))
    return errors, powers


def _compare(wanted: Array, given: Array, weights: Array, error: Error) -> tuple[Array, Array]:
    wide = jnp.promote_types(given.dtype, jnp.float32)
    wanted, given = wanted.astype(wide), given.astype(wide)
    squares = jnp.mean((wanted - given) ** 2, axis=-1)
    if error == "norm":  # the root has no derivative at 0, where nothing is left to learn
        squares = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
    return jnp.sum(squares * weights), jnp.sum(jnp.mean(wanted**2, axis=-1) * weights)


def kl_divergence(
    hidden_BTD: Array,
    kernel_DV: Array,
    teacher_BTE: Array,
    teacher_kernel_EV: Array,
    weights_BT: Array,
    *,
    temperature: float = 1.0,
    chunk: int = 4096,
) -> tuple[Array, Array]:
    """(KL, agreement): weighted sums over tokens of τ² KL(softmax(t / τ) ‖ softmax(s / τ)), nats, and of 1 where both
    find the same token most likely.

    s = hidden @ kernel and t = teacher @ teacher_kernel exist for `chunk` tokens at a time; sums are float32 (float64
    for such input). τ² keeps the gradient's size as τ grows. Differentiable once, in hidden and kernel.
    """
    teacher, weights = _cut(chunk, teacher_BTE), _cut(chunk, weights_BT.astype(jnp.float32))
    return _kl(temperature, hidden_BTD, kernel_DV, teacher, teacher_kernel_EV, weights)


def _cut(chunk: int, array: Array) -> Array:
    """[B, T, …] -> [pieces, tokens, …], padded with zeros at the end."""
    flat = array.reshape(-1, *array.shape[2:])
    size = min(chunk, len(flat))
    padded = jnp.pad(flat, ((0, -len(flat) % size),) + ((0, 0),) * (flat.ndim - 1))
    return padded.reshape(-1, size, *flat.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kl(temperature: float, hidden: Array, kernel: Array, teacher: Array, theirs: Array, weights: Array) -> Any:
    return _kl_fwd(temperature, hidden, kernel, teacher, theirs, weights)[0]


def _kl_fwd(
    temperature: float, hidden: Array, kernel: Array, teacher: Array, theirs: Array, weights: Array
) -> tuple[tuple[Array, Array], Any]:
    """The gradient is made together with the loss, piece by piece: d/ds = τ (softmax(s / τ) - softmax(t / τ))."""
    wide, cast = jnp.promote_types(hidden.dtype, jnp.float32), kernel.astype(hidden.dtype)
    product = partial(jnp.einsum, preferred_element_type=wide)

    def add(carry: Any, piece: tuple[Array, ...]) -> tuple[Any, Array]:
        own, other, weight = piece
        scored = (weight != 0)[:, None]
        own, other = jnp.where(scored, own, 0), jnp.where(scored, other, 0)
        ours = product("nd,dv->nv", own, cast) / temperature
        wanted = product("ne,ev->nv", other, theirs.astype(other.dtype)).astype(wide) / temperature
        log_s, log_t = jax.nn.log_softmax(ours), jax.nn.log_softmax(wanted)
        p_t = jnp.exp(log_t)
        kl = temperature**2 * jnp.sum(p_t * (log_t - log_s), axis=-1)
        same = jnp.argmax(ours, axis=-1) == jnp.argmax(wanted, axis=-1)
        slope = (temperature * (jnp.exp(log_s) - p_t) * weight[:, None]).astype(own.dtype)
        total, agreed, d_kernel = carry
        d_kernel += product("nd,nv->dv", own, slope)
        d_own = product("nv,dv->nd", slope, cast).astype(own.dtype)
        return (total + jnp.sum(kl * weight), agreed + jnp.sum(same * weight), d_kernel), d_own

    start = (jnp.zeros((), wide), jnp.zeros((), wide), jnp.zeros(kernel.shape, wide))
    pieces = (_cut(weights.shape[1], hidden), teacher, weights)
    (total, agreed, d_kernel), d_own = jax.lax.scan(add, start, pieces)
    d_hidden = d_own.reshape(-1, hidden.shape[-1])[: math.prod(hidden.shape[:2])].reshape(hidden.shape)
    return (total, agreed), (d_hidden, d_kernel.astype(kernel.dtype))


def _kl_bwd(temperature: float, saved: Any, g: Any) -> tuple[Any, ...]:
    scaled = lambda a: (a.astype(g[0].dtype) * g[0]).astype(a.dtype)
    return scaled(saved[0]), scaled(saved[1]), None, None, None


_kl.defvjp(_kl_fwd, _kl_bwd)
