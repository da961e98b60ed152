"""How fast evaluations read and answer: `python -m bampath.evaluation.speed --config bam-120m --lengths 4096,32768`.

No checkpoint is needed: parameters are random, prompts are random tokens. Per length: a forward of the training code
over whole rows; prefill of the same rows through the cache, --chunk tokens at a time; scored prompts (what passkey
does, --samples of them); and answers of --new-tokens greedy tokens (what RULER does). Each is compiled first, then
timed --repeats times; the median is shown, all times are in the JSON.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath import config as configs
from bampath.command import fail_gracefully
from bampath.evaluation.answers import ModelAnswerer
from bampath.evaluation.command import parse_lengths
from bampath.evaluation.reader import CHUNK, ModelReader
from bampath.evaluation.results import environment, write_results
from bampath.generate import prefill
from bampath.model import LM, init_cache
from bampath.params import unbox

Row = dict[str, Any]


def measure(
    model: LM, params: Any, length: int, *, samples: int, new_tokens: int, chunk: int, batch_tokens: int, repeats: int
) -> list[Row]:
    """Rows {case, length, batch, tokens_ or samples_per_second, seconds: [repeats]} of one length in tokens."""
    batch = max(1, batch_tokens // length)
    draws = np.random.default_rng(0)
    tokens = draws.integers(0, model.config.vocab_size, (max(batch, samples), length)).astype(np.int32)
    rows, mask = tokens[:batch], np.ones((batch, length), bool)
    forward = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens, method="features"))
    reader = ModelReader(model, params, max(chunk, length))
    answerer = ModelAnswerer(model, params, chunk=chunk, batch_tokens=batch_tokens)
    places = np.full((batch, 1), length - 1, np.int32)

    def read() -> Any:
        cache = init_cache(model.config, batch, length)
        return prefill(model, params, rows, mask, cache, chunk)[0]

    def score() -> Any:
        return [reader.logits_at(tokens[i : i + batch], places) for i in range(0, samples - samples % batch, batch)]

    prompts = [row[: length - new_tokens].tolist() for row in tokens[:samples]]
    scored = samples - samples % batch
    facts = {"length": length, "batch": batch, "chunk": chunk}
    cases: list[tuple[str, str, int, Callable[[], Any]]] = [
        ("forward", "tokens_per_second", batch * length, lambda: forward(params, rows)),
        ("prefill", "tokens_per_second", batch * length, read),
        ("scored prompts", "samples_per_second", scored, score),
        (
            f"answers of {new_tokens} tokens",
            "samples_per_second",
            samples,
            lambda: answerer.answer(prompts, new_tokens, None),
        ),
    ]
    found = []
    for case, unit, amount, call in cases:
        if amount:
            seconds = _times(call, repeats)
            found.append({"case": case, **facts, unit: amount / statistics.median(seconds), "seconds": seconds})
    return found


def _times(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call but the first, which compiles."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds


def line(row: Row, forward: float) -> str:
    """One row for a terminal; forward: tokens per second of the same length's training forward."""
    if "samples_per_second" in row:
        return f"{row['length']:>9,}  {row['case']:<24} {row['samples_per_second']:14,.2f} samples/s"
    share = row["tokens_per_second"] / forward
    return (
        f"{row['length']:>9,}  {row['case']:<24} {row['tokens_per_second']:14,.0f} tokens/s  ({share:.0%} of forward)"
    )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bampath.evaluation.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration")
    p.add_argument("--config", default="bam-120m", help="named configuration (default %(default)s)")
    p.add_argument("--lengths", default="4096,32768", help="tokens (default %(default)s)")
    p.add_argument("--samples", type=int, default=20, help="prompts that are scored and answered (default 20)")
    p.add_argument("--new-tokens", type=int, default=128, help="tokens of an answer (default 128)")
    p.add_argument("--chunk", type=int, default=CHUNK, help="tokens read at a time (default %(default)s)")
    p.add_argument("--batch-tokens", type=int, default=32_768, help="tokens read together (default %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="times that each is timed (default 3)")
    p.add_argument("--out", help="write results as JSON to this file")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for name in ("samples", "new_tokens", "chunk", "batch_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    config = configs.get(args.config, *args.overrides)
    model = LM(config.model)
    params = jax.jit(lambda key: unbox(model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]))(jax.random.key(0))
    lengths = parse_lengths(args.lengths, config.model.train_length)
    if min(lengths) <= args.new_tokens:
        raise ValueError(f"--lengths {args.lengths} must be longer than --new-tokens {args.new_tokens}")
    env, rows = environment(), list[Row]()
    print(f"{env['device']}, JAX {env['jax']}, {args.config} {' '.join(args.overrides)}, {config.model.position}")
    for length in lengths:
        found = measure(
            model,
            params,
            length,
            samples=args.samples,
            new_tokens=args.new_tokens,
            chunk=min(args.chunk, length),
            batch_tokens=args.batch_tokens,
            repeats=args.repeats,
        )
        for row in found:
            print(line(row, found[0]["tokens_per_second"]), flush=True)
        rows += found
        if args.out:
            write_results(Path(args.out), env, rows, config=args.config, overrides=args.overrides)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
