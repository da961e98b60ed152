"""How fast evaluations read and answer: `python -m bampath.evaluation.speed --config bam-120m --lengths 4096,32768`.

No checkpoint is needed: parameters are random, prompts are random tokens. Per length: a forward of the training code
over whole rows; prefill of the same rows through the cache, --chunk tokens at a time; scored prompts (what passkey
does, --depths of them); and answers of --new-tokens greedy tokens (what RULER does, --samples of them). --far asks for
scored prompts at lengths that are read through the cache in pieces, one prompt each. Everything is compiled, run once
and checked before anything is timed; the median of --repeats is shown, all times are in the JSON of --out, which grows,
with a table beside it.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath import config as configs
from bampath.command import fail_gracefully
from bampath.evaluation.answers import ModelAnswerer
from bampath.evaluation.command import check_options, parse_lengths
from bampath.evaluation.reader import CHUNK, ModelReader
from bampath.evaluation.report import table
from bampath.evaluation.results import environment, write_results
from bampath.evaluation.speed_checks import checks
from bampath.generate import prefill, stream_features
from bampath.model import LM, init_cache
from bampath.params import unbox

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much of each case is run, see the command's options. batch_tokens: tokens that are read together."""

    samples: int = 100
    depths: int = 20
    new_tokens: int = 128
    chunk: int = CHUNK
    batch_tokens: int = 262_144
    repeats: int = 3

    def together(self, length: int, amount: int) -> int:
        """Rows at a time: the most that fit and divide `amount`, so that all batches have one shape."""
        fit = max(1, self.batch_tokens // length)
        return max(n for n in range(1, min(fit, amount) + 1) if amount % n == 0)


@dataclass(frozen=True)
class Case:
    """What is timed: run() handles `amount` of `unit`; warm() compiles the same programs; repeats: times to run."""

    name: str
    length: int
    batch: int
    unit: str
    amount: int
    warm: Callable[[], Any]
    run: Callable[[], Any]
    repeats: int


def cases(model: LM, params: Any, length: int, sizes: Sizes) -> list[Case]:
    """Forward, prefill, scored prompts and answers at one length in tokens."""
    rows = sizes.together(length, max(1, sizes.batch_tokens // length))
    tokens = _tokens(model, max(rows, sizes.samples, sizes.depths), length)
    read, mask = tokens[:rows], np.ones((rows, length), bool)
    forward = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens, method="features"))
    step = lambda: forward(params, read)

    def through_the_cache() -> Any:
        return prefill(model, params, read, mask, init_cache(model.config, rows, length), min(sizes.chunk, length))[0]

    group = sizes.together(length, sizes.samples)
    prompts = [row[: length - sizes.new_tokens].tolist() for row in tokens[: sizes.samples]]
    answerer = ModelAnswerer(model, params, chunk=sizes.chunk, batch_tokens=group * length)
    return [
        Case("forward", length, rows, "tokens_per_second", rows * length, step, step, sizes.repeats),
        Case(
            *("prefill", length, rows, "tokens_per_second", rows * length),
            *(through_the_cache, through_the_cache, sizes.repeats),
        ),
        scored(model, params, length, sizes.depths, sizes),
        Case(
            *(f"answers of {sizes.new_tokens} tokens", length, group, "samples_per_second", sizes.samples),
            lambda: answerer.answer(prompts[:group], 2, None),
            lambda: answerer.answer(prompts, sizes.new_tokens, None),
            1,
        ),
    ]


def scored(model: LM, params: Any, length: int, samples: int, sizes: Sizes, begin: bool = False) -> Case:
    """Prompts whose last token is asked for, as passkey does: in one forward, or through the cache beyond `chunk`.

    begin: only the first two pieces are read to compile the rest, where a whole row would take long.
    """
    batch = sizes.together(length, samples)
    tokens, places = _tokens(model, samples, length), np.full((batch, 1), length - 1, np.int32)
    reader = ModelReader(model, params, sizes.chunk)
    some = lambda count: [reader.logits_at(tokens[i : i + batch], places) for i in range(0, count, batch)]

    def two_pieces() -> Any:
        return [hidden for _, hidden in islice(stream_features(model, params, tokens, sizes.chunk), 2)]

    return Case(
        *("scored prompts", length, batch, "samples_per_second", samples),
        two_pieces if begin else lambda: some(batch),
        lambda: some(samples),
        1,
    )


def _tokens(model: LM, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, model.config.vocab_size, (rows, length)).astype(np.int32)


def timed(planned: Sequence[Case], sizes: Sizes, seconds: float = float("inf")) -> Iterator[Row]:
    """Rows {case, length, batch, chunk, tokens_ or samples_per_second, seconds: one per run, peak_gib} as they come.

    seconds: no case begins after this time.
    """
    begin = time.monotonic()
    for case in planned:
        if time.monotonic() - begin > seconds:
            print(f"{case.length:>9,}  {case.name:<24} left out: {seconds:g} s are over", flush=True)
            continue
        took = []
        for _ in range(case.repeats):
            start = time.perf_counter()
            jax.block_until_ready(case.run())
            took.append(time.perf_counter() - start)
        facts = {"case": case.name, "length": case.length, "batch": case.batch, "chunk": min(sizes.chunk, case.length)}
        yield {**facts, case.unit: case.amount / statistics.median(took), "seconds": took, "peak_gib": _peak()}


def prepare(planned: Sequence[Case], check: Callable[[], list[Row]]) -> list[Row]:
    """Compile and run all once, and `check`, some side by side; returns what `check` does."""

    def warm(length: int) -> None:
        for case in planned:
            if case.length == length:
                jax.block_until_ready(case.warm())
        print(f"prepared {length:,}", flush=True)

    with ThreadPoolExecutor(3) as pool:  # each needs the memory of a batch
        checked = pool.submit(check)
        list(pool.map(warm, sorted({case.length for case in planned})))
        return checked.result()


def _peak() -> float | None:
    """GiB of device memory at the fullest moment of the process so far; None where the device does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return round(stats["peak_bytes_in_use"] / 2**30, 2) if "peak_bytes_in_use" in stats else None


def line(row: Row, forward: float | None) -> str:
    """One row for a terminal; forward: tokens per second of the same length's training forward."""
    memory = "" if row["peak_gib"] is None else f"  up to {row['peak_gib']:.1f} GiB"
    if "samples_per_second" in row:
        amount = f"{row['samples_per_second']:14,.3f} samples/s  ({len(row['seconds'])}x {row['seconds'][0]:.2f} s)"
    else:
        share = "" if forward is None else f"  ({row['tokens_per_second'] / forward:.0%} of forward)"
        amount = f"{row['tokens_per_second']:14,.0f} tokens/s{share}"
    return f"{row['length']:>9,}  {row['case']:<24} {amount}{memory}"


def page(results: Row) -> str:
    """The numbers of a results file as a Markdown table, one line per length."""
    rows, env = results["rows"], results["env"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    body = []
    for length in dict.fromkeys(row["length"] for row in rows):
        own = {row["case"]: row for row in rows if row["length"] == length}
        body.append([f"{length:,}", *(_cell(own[case], own.get("forward")) if case in own else "" for case in cases)])
    checked = "; ".join(f"{check['check']}: {check['error']:.1e}" for check in results["checks"])
    asked = " ".join([results["config"], *results["overrides"]])
    head = f"`{asked}`, {env['device']}, JAX {env['jax']}, {env['date']}."
    return f"{head}\n\n{table(['tokens', *cases], body)}\n\nErrors before anything was timed: {checked}."


def _cell(row: Row, forward: Row | None) -> str:
    if "samples_per_second" in row:
        return f"{row['samples_per_second']:.3g} samples/s"
    share = row["tokens_per_second"] / forward["tokens_per_second"] if forward is not None else 1.0
    return f"{row['tokens_per_second']:,.0f} tokens/s" + ("" if row["case"] == "forward" else f" ({share:.0%})")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bampath.evaluation.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration")
    p.add_argument("--config", default="bam-120m", help="named configuration (default %(default)s)")
    p.add_argument("--lengths", default="4096,32768", help="tokens, or none for --far alone (default %(default)s)")
    p.add_argument("--far", help="lengths at which one prompt is scored, read in pieces of --chunk")
    p.add_argument("--samples", type=int, default=100, help="prompts that are answered (default 100)")
    p.add_argument("--depths", type=int, default=20, help="prompts that are scored (default 20)")
    p.add_argument("--new-tokens", type=int, default=128, help="tokens of an answer (default 128)")
    p.add_argument("--chunk", type=int, default=CHUNK, help="tokens read at a time (default %(default)s)")
    p.add_argument("--batch-tokens", type=int, default=262_144, help="tokens read together (default %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="times that forward and prefill are timed (default 3)")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time of timing")
    p.add_argument("--out", help="write results as JSON to this file")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_options(args, "samples", "depths", "new_tokens", "batch_tokens", "repeats")
    if not args.seconds > 0:
        raise ValueError(f"--seconds {args.seconds:g} must be positive")
    config = configs.get(args.config, *args.overrides)
    lengths = [] if args.lengths == "none" else parse_lengths(args.lengths, config.model.train_length)
    far = parse_lengths(args.far, config.model.train_length) if args.far else []
    if not lengths and not far:
        raise ValueError("--lengths none leaves nothing to time: name lengths with --far")
    if min(lengths, default=args.new_tokens + 1) <= args.new_tokens:
        raise ValueError(f"--lengths {args.lengths} must be longer than --new-tokens {args.new_tokens}")
    if min(far, default=args.chunk + 1) <= args.chunk:
        raise ValueError(f"--far {args.far} must be longer than --chunk {args.chunk}: shorter ones belong in --lengths")
    sizes = Sizes(args.samples, args.depths, args.new_tokens, args.chunk, args.batch_tokens, args.repeats)
    model = LM(config.model)
    params = jax.jit(lambda key: unbox(model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]))(jax.random.key(0))
    env, rows = environment(), list[Row]()
    facts = {"config": args.config, "overrides": args.overrides, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    print(f"{env['device']}, JAX {env['jax']}, {args.config} {' '.join(args.overrides)}, {config.model.position}")
    planned = [case for length in lengths for case in cases(model, params, length, sizes)]
    planned += [scored(model, params, length, 1, sizes, length > min(far)) for length in far]
    checked = prepare(planned, lambda: checks(model, params, min([*lengths, 2048])))
    for check in checked:
        print(f"  {check['check']:<44} error {check['error']:.1e}, bound {check['bound']:.0e}", flush=True)
    print("timing", flush=True)
    forward = dict[int, float]()
    for row in timed(planned, sizes, args.seconds):
        rows.append(row)
        if row["case"] == "forward":
            forward[row["length"]] = row["tokens_per_second"]
        print(line(row, forward.get(row["length"])), flush=True)
        if args.out:
            write_results(Path(args.out), env, rows, **facts, checks=checked)
            text = page({"env": env, **facts, "checks": checked, "rows": rows})
            Path(args.out).with_suffix(".md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
