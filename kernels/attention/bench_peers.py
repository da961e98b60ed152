"""Times of other attention kernels for the tables of docs/kernels.md; started by bench.py, once per framework.

    python -m kernels.attention.bench_peers torch | fla | jax

Prepares every case (compiling, autotuning, warming up), prints READY, waits for a line on its input, so that nothing
is timed while the benchmark compiles, and prints one JSON row per line. What is not installed becomes a row that says
so.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

SHAPES = ((8, 4096, 16, 64), (4, 4096, 16, 128), (1, 32768, 16, 64), (1, 16384, 16, 128))
Shape = tuple[int, int, int, int]
Prepared = tuple[dict[str, Any], Callable[[], Any], int]  # row, one run, repeats


def timed(run: Callable[[], Any], wait: Callable[[Any], None], repeats: int) -> dict[str, float]:
    """Median, least and greatest ms of a run; each sample is a batch of about 20 ms. As `bench.measure`."""
    begin = time.perf_counter()
    wait(run())
    calls = max(1, min(20, int(0.02 / (time.perf_counter() - begin))))
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run()
        wait(out)
        samples.append((time.perf_counter() - begin) / calls * 1e3)
    samples.sort()
    return {"ms": samples[len(samples) // 2], "ms_min": samples[0], "ms_max": samples[-1]}


def row_of(impl: str, case: str, which: str, shape: Shape) -> dict[str, Any]:
    return {"case": case, "impl": impl, "pass": which, **dict(zip("BTHD", shape, strict=True)), "dtype": "bfloat16"}


# ---- torch ----


TorchCase = tuple[str, str, Callable[[], tuple[Any, list[Any]]], int]


def tensors(layout: tuple[int, ...]) -> list[Any]:
    import torch

    make = lambda: torch.randn(layout, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return [make() for _ in range(3)]


def fla_cases(shape: Shape) -> Iterator[TorchCase]:
    """As `torch_cases`, of flash-linear-attention."""
    import torch

    def build() -> tuple[Any, list[Any]]:
        ops = importlib.import_module("fla.ops.forgetting_attn")
        x = tensors(shape)
        gates = torch.nn.functional.logsigmoid(torch.randn(shape[:3], device="cuda") + 4)
        gates.requires_grad_(True)
        return lambda: ops.parallel_forgetting_attn(*x, gates), [*x, gates]

    yield "FLA forgetting attention", "fox", build, 5


def torch_cases(shape: Shape) -> Iterator[TorchCase]:
    """(peer, case, function that builds (forward, inputs), repeats) of the kernels for torch."""
    import torch

    batch, length, heads, dim = shape

    def sdpa(backend: str) -> Callable[[], tuple[Any, list[Any]]]:
        def build() -> tuple[Any, list[Any]]:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            x = tensors((batch, heads, length, dim))

            def run() -> Any:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)

            return run, x

        return build

    def flex(trained: bool) -> Callable[[], tuple[Any, list[Any]]]:
        def build() -> tuple[Any, list[Any]]:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            torch._dynamo.config.recompile_limit = 64  # past it, eight by default, the path is unfused, silently
            x = tensors((batch, heads, length, dim))
            causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
            slope = 2.0 ** -torch.linspace(1, 8, heads, device="cuda")
            scale = slope.clone().requires_grad_(trained)
            power = torch.full((heads,), 0.7, device="cuda", requires_grad=trained)
            if trained:
                modify = lambda s, b, h, i, j: s - torch.exp(power[h] * torch.log((i - j) * scale[h] + 1e-5))
            else:
                modify = lambda s, b, h, i, j: s - slope[h] * (i - j)
            compiled = torch.compile(flex_attention)
            run = lambda: compiled(*x, score_mod=modify, block_mask=causal)
            return run, [*x, scale, power] if trained else x

        return build

    yield "FlashAttention-2 (torch)", "plain", sdpa("FLASH_ATTENTION"), 5
    yield "cuDNN (torch)", "plain", sdpa("CUDNN_ATTENTION"), 5
    yield "FlexAttention", "alibi, fixed", flex(False), 5
    if length <= 4096:
        yield "FlexAttention", "ggd, trained", flex(True), 1


def prepare_torch(cases: Callable[[Shape], Iterator[TorchCase]], shape: Shape) -> Iterator[Prepared]:
    import torch

    for impl, case, build, repeats in cases(shape):
        rows = [row_of(impl, case, which, shape) for which in ("fwd", "fwd_bwd")]
        try:
            run, inputs = build()
            cotangent = torch.randn_like(run() if case != "fox" else _first(run()))

            def both(run: Any = run, inputs: Any = inputs, cotangent: Any = cotangent) -> Any:
                return torch.autograd.grad(_first(run()), inputs, cotangent)

            forward = lambda run=run: _without_gradients(run)
            for f in (forward, both):
                f()
            torch.cuda.synchronize()
            yield rows[0], forward, max(repeats, 3)
            yield rows[1], both, repeats
        except Exception as problem:
            yield rows[1] | {"skipped": why(problem)}, lambda: None, 0


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _without_gradients(run: Callable[[], Any]) -> Any:
    import torch

    with torch.no_grad():
        return run()


# ---- JAX ----


def prepare_jax(shape: Shape) -> Iterator[Prepared]:
    import jax

    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, shape, jax.numpy.bfloat16) for key in keys)

    def tokamax() -> Any:
        call = importlib.import_module("tokamax").dot_product_attention
        return lambda q, k, v: call(q, k, v, is_causal=True)

    def flash3() -> Any:
        call = importlib.import_module("flash_attn3_jax").flash_mha
        return lambda q, k, v: call(q, k, v, is_causal=True)

    for impl, build in (("tokamax", tokamax), ("FlashAttention-3 (flash-attn3-jax)", flash3)):
        rows = [row_of(impl, "plain", which, shape) for which in ("fwd", "fwd_bwd")]
        try:
            attend = build()

            def both(q: Any, k: Any, v: Any, do: Any, attend: Any = attend) -> Any:
                out, vjp = jax.vjp(attend, q, k, v)
                return out, vjp(do)

            forward, backward = jax.jit(attend), jax.jit(both)
            jax.block_until_ready((forward(q, k, v), backward(q, k, v, do)))
            yield rows[0], partial(forward, q, k, v), 5
            yield rows[1], partial(backward, q, k, v, do), 5
        except Exception as problem:
            yield rows[1] | {"skipped": why(problem)}, lambda: None, 0


def why(problem: Exception) -> str:
    if isinstance(problem, ModuleNotFoundError):
        return f"not installed ({problem.name})"
    return f"{type(problem).__name__}: {problem}".split("\n")[0][:200]


def main() -> None:
    framework = sys.argv[1]
    if framework in ("torch", "fla"):
        prepare: Any = partial(prepare_torch, fla_cases if framework == "fla" else torch_cases)
        wait: Callable[[Any], Any] = lambda _: importlib.import_module("torch").cuda.synchronize()
    else:
        prepare, wait = prepare_jax, importlib.import_module("jax").block_until_ready
    shapes = [tuple(map(int, text.split(","))) for text in sys.argv[2:]] or SHAPES
    try:
        ready = [case for shape in shapes for case in prepare(shape)]
    except ModuleNotFoundError as problem:
        absent = {"case": "plain", "impl": framework, "pass": "fwd", "dtype": "bfloat16", "skipped": why(problem)}
        ready = [(absent, dict, 0)]
    print("READY", flush=True)
    sys.stdin.readline()
    for row, run, repeats in ready:
        if repeats:
            try:
                row |= timed(run, wait, repeats)
            except Exception as problem:
                row |= {"skipped": why(problem)}
        if "ms" in row:
            factor = 1 if row["pass"] == "fwd" else 3.5
            row["tflops"] = 2 * row["B"] * row["H"] * row["T"] ** 2 * row["D"] * factor / row["ms"] / 1e9
        print(json.dumps(row), flush=True)
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
