"""Does the fast path compute what it should? Asked before anything is timed (`bampath.evaluation.speed`)."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bampath.generate import generate, pad_prompts, prefill
from bampath.model import LM, init_cache

Array = jax.Array
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}  # ‖a - b‖ / ‖b‖


def checks(model: LM, params: Any, length: int, new_tokens: int = 8) -> list[dict[str, Any]]:
    """Rows {check, error, bound} of random prompts of up to `length` tokens. FloatingPointError if one is too far off.

    Reference: the same parameters in one forward over each prompt alone, on the "xla" attention in float32.
    """
    config: Any = model.config
    exact, bound = LM(replace(config, dtype="float32", attention_impl="xla")), BOUNDS[config.dtype]
    draws = np.random.default_rng(3)
    prompts = [draws.integers(0, config.vocab_size, n).tolist() for n in (length, length - length // 3)]
    features = partial(_features, params=params, width=length + new_tokens)

    def read(side: Literal["left", "right"], chunk: int) -> Array:
        tokens, mask = pad_prompts(prompts, side)
        return prefill(model, params, tokens, mask, init_cache(config, 2, length), chunk)[0]

    part = max(1, length // 4)
    with ThreadPoolExecutor(5) as pool:  # each compiles programs of its own
        exactly = pool.submit(lambda: [features(exact, row=prompt) for prompt in prompts])
        forward = pool.submit(lambda: features(model, row=prompts[0]))
        left, right = pool.submit(read, "left", length), pool.submit(read, "right", part)
        answers = pool.submit(lambda: generate(model, params, prompts, new_tokens, chunk=length))
    whole = exactly.result()
    last = jnp.stack([hidden[-1] for hidden in whole])
    gap = 0.0
    for prompt, answer in zip(prompts, answers.result(), strict=True):
        gap = max(gap, _gap(exact, params, features(exact, row=prompt + answer[:-1])[-len(answer) :], answer))
    found = [
        ("one forward, against xla in float32", _error(forward.result(), whole[0]), bound),
        (f"prefill, left-padded, {length} at a time", _error(left.result(), last), bound),
        (f"prefill, right-padded, {part} at a time", _error(right.result(), last), bound),
        (f"{new_tokens} greedy tokens, gap to the likeliest", gap, 4 * bound),
    ]
    for name, error, allowed in found:
        if not error <= allowed:
            raise FloatingPointError(f"{name}: error {error:.2e}, more than {allowed:g}")
    return [{"check": name, "error": error, "bound": allowed} for name, error, allowed in found]


def _gap(exact: LM, params: Any, hidden_TD: Array, answer: list[int]) -> float:
    """How far below the largest logit the tokens of `answer` stand at most, in deviations of the logits."""
    logits: Any = exact.apply({"params": params}, hidden_TD, method="logits")
    gaps = logits.max(axis=-1) - logits[np.arange(len(answer)), np.asarray(answer)]
    return float((gaps / logits.std(axis=-1)).max())


@partial(jax.jit, static_argnums=0)
def _forward(model: LM, params: Any, tokens: Array) -> Any:
    return model.apply({"params": params}, tokens, method="features")


def _features(model: LM, *, params: Any, row: list[int], width: int) -> Array:
    """Hidden states [T, dim] float32 of one row; all rows are `width` long for the compiler."""
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(row)] = row
    return _forward(model, params, tokens)[0, : len(row)].astype(jnp.float32)


def _error(a: Array, b: Array) -> float:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
