"""Prefill in chunks, decode token by token, sample: `python -m bampath.generate CHECKPOINT --prompt "…"`."""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath.cache import Cache, Order
from bampath.command import fail_gracefully
from bampath.data import StreamDecoder, Tokenizer
from bampath.load import Loaded, load
from bampath.model import LM, check_length, init_cache, model_config

Array = jax.Array


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 keep every token.

    The filters apply in the order temperature, top-k, top-p; top-p keeps the smallest set of most likely tokens whose
    probability reaches top_p (always at least one).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")


def filter_logits(logits: Array, sampling: Sampling) -> Array:
    """Logits [B, V] float32 after temperature, top-k and top-p; tokens that are cut get -inf. Needs temperature > 0.

    The likeliest token's is 0.
    """
    # From the largest down: a small temperature would make several of them infinite, and 1e-46 is 0 in float32.
    least = float(jnp.finfo(jnp.float32).tiny)
    logits = (logits - logits.max(axis=-1, keepdims=True)) / max(sampling.temperature, least)
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        threshold = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return logits


def pick(logits: Array, key: Array, sampling: Sampling) -> Array:
    """The next token of each row [B] int32 from logits [B, V]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, filter_logits(logits, sampling), axis=-1).astype(jnp.int32)


def _call(model: LM, params: Any, method: str, *args: Any) -> Any:
    return model.apply({"params": params}, *args, method=method)


@partial(jax.jit, static_argnums=(0, 5, 6), donate_argnums=3)
def extend(
    model: LM, params: Any, tokens: Array, cache: Cache, mask: Array, order: Order = "any", padded: bool = True
) -> tuple[Array, Cache]:
    """Jitted `LM.extend`: hidden states [B, T, dim] of new tokens and the cache with them (the old one is donated)."""
    return _call(model, params, "extend", tokens, cache, mask, order, padded)


def _read(
    model: LM, params: Any, tokens: np.ndarray, mask: np.ndarray, cache: Cache, chunk: int
) -> Iterator[tuple[int, Array, Cache]]:
    """Prompts [B, T] into the cache, `chunk` tokens at a time: yields (start, hidden [B, <=chunk, dim], cache)."""
    used = int(cache.used)
    if used + tokens.shape[1] > cache.capacity:
        raise ValueError(
            f"{tokens.shape[1]} tokens do not fit into a cache of {cache.capacity} slots, {used} of which are taken"
        )
    runs = np.diff(mask.astype(np.int8), axis=1, prepend=0) == 1
    known = bool(runs.sum(axis=1).max() <= 1) and used == 0  # each prompt is one run, and stands alone
    for start in range(0, tokens.shape[1], chunk):
        new, real = tokens[:, start : start + chunk], mask[:, start : start + chunk]
        order: Order = "any" if not known else "continue" if start else "begin"
        padded = order != "begin" or not real.all()
        hidden, cache = extend(model, params, jnp.asarray(new), cache, jnp.asarray(real), order, padded)
        yield start, hidden, cache


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _step(
    model: LM, sampling: Sampling, ids: int, params: Any, tokens: Array, cache: Cache, alive: Array, key: Array
) -> tuple[Array, Array, Cache]:
    hidden, cache = _call(model, params, "extend", tokens[:, None], cache, alive[:, None])
    return *_draw(model, sampling, ids, params, hidden[:, 0], key), cache


@partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(model: LM, sampling: Sampling, ids: int, params: Any, hidden: Array, key: Array) -> tuple[Array, Array]:
    """The next token (below `ids`) of each row [B] from its last hidden state; whether its logits are finite [B]."""
    logits = _call(model, params, "logits", hidden)[:, :ids]
    return pick(logits, key, sampling), jnp.isfinite(logits).all(axis=-1)


def stream_features(
    model: LM, params: Any, tokens: np.ndarray, chunk: int, mask: np.ndarray | None = None
) -> Iterator[tuple[int, Array]]:
    """Hidden states of long rows in pieces: yields (start, hidden [B, <=chunk, dim]) from left to right.

    tokens [B, T] int32; mask [B, T] marks real tokens (default: all). Memory is that of one chunk and of the cache, so
    T may be as long as the cache fits. Equal to `LM.features` on the whole row.
    """
    batch, length = tokens.shape
    _check_chunk(chunk)
    check_length(model.config, length)
    chunk = min(chunk, length)
    padded = -(-length // chunk) * chunk
    mask = np.ones(tokens.shape, bool) if mask is None else mask
    tokens = np.pad(tokens, ((0, 0), (0, padded - length)))
    mask = np.pad(mask, ((0, 0), (0, padded - length)))
    for start, hidden, _ in _read(model, params, tokens, mask, init_cache(model.config, batch, padded), chunk):
        yield start, hidden[:, : length - start]


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")


def _check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """ValueError for a token that is no row of the embedding, which indexing would take for another one or for NaN."""
    for row, prompt in enumerate(map(np.asarray, prompts)):
        if prompt.size and prompt.dtype.kind not in "iu":
            raise ValueError(f"prompt {row} holds {prompt.dtype}, but token ids are integers")
        known = (prompt >= 0) & (prompt < vocab_size)
        if not known.all():
            raise ValueError(f"prompt {row} holds {prompt[np.argmin(known)]}, but token ids end at {vocab_size - 1}")


def prefill(
    model: LM, params: Any, tokens: np.ndarray, mask: np.ndarray, cache: Cache, chunk: int
) -> tuple[Array, Cache]:
    """Read prompts [B, T] into the cache, `chunk` tokens at a time -> (hidden of each row's last token, cache)."""
    _check_chunk(chunk)
    batch, length = tokens.shape
    last = length - 1 - np.argmax(mask[:, ::-1], axis=1)
    final: Array | None = None
    after = cache
    for start, hidden, after in _read(model, params, tokens, mask, cache, chunk):  # noqa: B007 (it is given back)
        here = (last >= start) & (last < start + hidden.shape[1])
        rows = hidden[np.arange(batch), np.clip(last - start, 0, hidden.shape[1] - 1)]
        final = rows if final is None else jnp.where(jnp.asarray(here)[:, None], rows, final)
    assert final is not None
    return final, after


def pad_prompts(prompts: Sequence[Sequence[int]], side: str, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Ragged prompts -> tokens [B, T] int32 (0 where padded) and mask [B, T]; `side` is "left" or "right".

    T is the longest prompt's length, rounded up to a multiple of `multiple`.
    """
    if multiple < 1:
        raise ValueError(f"multiple={multiple} must be at least 1")
    if side not in ("left", "right"):
        raise ValueError(f'pad_side={side!r} must be "left" or "right"')
    if not prompts or min(map(len, prompts)) == 0:
        raise ValueError("every prompt needs at least one token (an empty text has none: start with a BOS token)")
    width = -(-max(map(len, prompts)) // multiple) * multiple
    tokens, mask = np.zeros((len(prompts), width), np.int32), np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        tokens[row, place], mask[row, place] = prompt, True
    return tokens, mask


def generate(
    model: LM,
    params: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    seed: int = 0,
    stop_id: int | None = None,
    stop: Callable[[list[int]], bool] | None = None,
    pad_side: str = "left",
    chunk: int = 512,
    multiple: int = 1,
    vocab_size: int | None = None,
    on_tokens: Callable[[np.ndarray], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt by at most `max_new_tokens` tokens, up to and without `stop_id`.

    prompts: ragged lists of token ids; the result of each row is that of its solo run, whatever stands beside it.
    stop sees the new tokens of a row after each of them and ends the row by saying True (its tokens stay).
    multiple: prompts and cache are padded to a multiple of it, so that different batches share compiled programs.
    vocab_size: the tokenizer's, where the model has more embeddings than that: only ids below it are drawn.
    on_tokens gets each step's tokens [B] as they come, -1 for rows that have ended. FloatingPointError if the logits
    of a row are not finite: no token could be drawn from them.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    _check_chunk(chunk)
    known = model_config(model.config).vocab_size
    ids = known if vocab_size is None else vocab_size
    if not 0 < ids <= known:
        raise ValueError(f"vocab_size={ids} must be between 1 and the model's {known}")
    _check_ids(prompts, known)
    tokens, mask = pad_prompts(prompts, pad_side, multiple)
    check_length(model.config, max(map(len, prompts)) + max_new_tokens)
    capacity = -(-(tokens.shape[1] + max_new_tokens) // multiple) * multiple
    cache = init_cache(model.config, len(prompts), capacity)
    hidden, cache = prefill(model, params, tokens, mask, cache, chunk)
    keys = jax.random.split(jax.random.key(seed), max_new_tokens)
    drawn = _draw(model, sampling, ids, params, hidden, keys[0])
    results: list[list[int]] = [[] for _ in prompts]
    alive = np.ones(len(prompts), bool)
    for step in range(max_new_tokens):
        if step:
            *drawn, cache = _step(model, sampling, ids, params, drawn[0], cache, jnp.asarray(alive), keys[step])
        new, finite = map(np.asarray, drawn)
        if not finite[alive].all():
            raise FloatingPointError(_not_finite(params, int(np.argmin(finite | ~alive)), step))
        alive &= new != stop_id if stop_id is not None else True
        for row in np.flatnonzero(alive):
            results[row].append(int(new[row]))
        shown = np.where(alive, new, -1)
        if stop is not None:
            for row in np.flatnonzero(alive):
                alive[row] = not stop(results[row])
        if on_tokens is not None:
            on_tokens(shown)
        if not alive.any():
            break
    return results


def _not_finite(params: Any, row: int, step: int) -> str:
    """What to say of logits that are not finite."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    bad = next(("/".join(str(k.key) for k in path) for path, leaf in leaves if not np.isfinite(leaf).all()), None)
    cause = f"the parameter {bad} is not finite" if bad else "all parameters are finite, so an activation overflowed"
    return f"the logits of row {row} at new token {step} are not finite: {cause}"


def encode_prompt(loaded: Loaded, text: str) -> list[int]:
    """Token ids of a prompt, with a BOS in front if the model's documents had one."""
    bos = [loaded.tokenizer.bos_id] if loaded.config.data.add_bos and loaded.tokenizer.bos_id is not None else []
    return [*bos, *loaded.tokenizer.encode(text)]


def _printer(tokenizer: Tokenizer, prompt: str) -> tuple[Callable[[np.ndarray], None], Callable[[], None]]:
    """(what prints a step's token of the only row as soon as its text is complete, what prints the rest).

    The prompt comes with the first of them, so that an error before it stands alone.
    """
    decoder, waiting = StreamDecoder(tokenizer), [prompt]

    def push(tokens: np.ndarray) -> None:
        if tokens[0] >= 0:
            print(waiting.pop() if waiting else "", decoder.push(int(tokens[0])), sep="", end="", flush=True)

    return push, lambda: print(waiting.pop() if waiting else "", decoder.flush(), sep="")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m bampath.generate", description="Continue texts with a checkpoint.")
    p.add_argument("checkpoint", help="a run's folder (its latest checkpoint) or a checkpoint's")
    p.add_argument("--prompt", action="append", required=True, help="text to continue; give it again for a batch")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default); the next three need more")
    p.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all (default)")
    p.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass; 1 keeps all")
    p.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    p.add_argument("--chunk", type=int, default=512, help="tokens of the prompt read at a time (default 512)")
    p.add_argument("--tokenizer", help="path of the tokenizer's file (default: the copy in the checkpoint)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype (default: the model's)")
    return p


def _refuse_greedy_options(args: argparse.Namespace) -> None:
    """ValueError for an option of drawing where nothing is drawn: the text would be the greedy one, unsaid."""
    for name in ("top_k", "top_p", "seed") if args.temperature == 0 else ():
        if getattr(args, name) != parser().get_default(name):
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)} has no effect with --temperature 0, which is "
                "greedy; give --temperature 1, say, or leave it out"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: print each prompt with its continuation."""
    args = parser().parse_args(argv)
    for name in ("max_new_tokens", "chunk"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    _refuse_greedy_options(args)
    loaded = load(args.checkpoint, args.tokenizer, **({"dtype": args.dtype} if args.dtype else {}))
    prompts = [encode_prompt(loaded, text) for text in args.prompt]
    single = len(prompts) == 1
    push, flush = _printer(loaded.tokenizer, args.prompt[0])
    results = generate(
        loaded.model,
        loaded.params,
        prompts,
        args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        stop_id=loaded.tokenizer.eos_id,
        chunk=args.chunk,
        vocab_size=loaded.tokenizer.vocab_size,
        on_tokens=push if single else None,
    )
    if single:
        return flush()
    for text, ids in zip(args.prompt, results, strict=True):
        print(f"{text}{loaded.tokenizer.decode(ids)}\n")


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
