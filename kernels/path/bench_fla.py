"""What FLA's PaTH (flash-linear-attention) takes and how exact it is, for `bench.py`: a part like those of bench_parts.

python -m kernels.path.bench_fla PART FOLDER      PART: fla:B,T,H,D:CASE or fla:checks
"""

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def prepare(torch: Any, attend: Any, leaves: dict[str, Any], do: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, forward and backward); FLA wants w, beta and gates in float32, and scales the gates."""
    names = {"gates": "g"}
    first = lambda out: out[0] if isinstance(out, tuple) else out
    run = lambda: first(attend(**{names.get(n, n): x for n, x in leaves.items()}))

    def forward() -> Any:
        with torch.no_grad():
            return run()

    def both() -> Any:
        o = run()
        return o, torch.autograd.grad(o, list(leaves.values()), do)

    return forward, both


def random_leaves(torch: Any, shape: tuple[int, ...], case: str) -> tuple[dict[str, Any], Any]:
    batch, length, heads, dim = shape
    torch.manual_seed(0)
    make = lambda *size, dtype=torch.bfloat16: torch.randn(*size, device="cuda", dtype=dtype)
    leaves = {n: make(batch, length, heads, dim).requires_grad_() for n in "qkv"}
    w = make(batch, length, heads, dim, dtype=torch.float32)
    leaves["w"] = (w / w.norm(dim=-1, keepdim=True)).requires_grad_()
    leaves["beta"] = torch.empty(batch, length, heads, device="cuda").uniform_(1.5, 2).requires_grad_()
    gates = torch.empty(batch, length, heads, device="cuda").uniform_(0.95, 1).log().requires_grad_()
    return leaves | ({"g": gates} if case == "path-fox" else {}), make(batch, length, heads, dim)


TRIED = 4  # of the configurations that FLA's preparing kernels (running sums, W Wᵀ, its inverse) choose from themselves


def thin_out(autotuner: Any) -> None:
    """Let Triton's Autotuner try every n-th configuration, so that at most TRIED are compiled per kernel: all of them
    take FLA minutes. The kernels that take nearly all of its time (`fla.ops.path_attn`) have one configuration."""
    init = autotuner.__init__

    @functools.wraps(init)
    def thinned(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **options: Any) -> None:
        init(self, fn, arg_names, configs[:: -(-len(configs) // TRIED)], *args, **options)

    autotuner.__init__ = thinned


def timed(torch: Any, run: Callable[[], Any]) -> dict[str, Any]:
    times = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 4 * 1e3)
    times = sorted(times[1:])
    memory = torch.cuda.max_memory_allocated() - before
    return {"ms": times[2], "ms_min": times[0], "ms_max": times[-1], "peak_bytes": memory}


def speed_rows(torch: Any, attend: Any, shape: tuple[int, ...], case: str) -> Callable[[], Any]:
    """Warms up; the result takes the times."""
    runs = prepare(torch, attend, *random_leaves(torch, shape, case))
    for run in runs:
        run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()

    def measure() -> Any:
        for name, run in zip(("fwd", "fwd_bwd"), runs, strict=True):
            yield {"case": case, "pass": name} | dict(zip("BTHD", shape, strict=True)) | timed(torch, run)

    return measure


def check_rows(torch: Any, attend: Any, folder: Path) -> Callable[[], Any]:
    """Warms up; the result compares with the same float64 arrays as our own checks, where FLA serves the case."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from kernels.path import bench_cases as cases
    from kernels.path.bench_parts import cotangent, file_of, relative_rms, sized, wait_for

    runs = []
    for case in cases.CHECKS:
        if case.everything or case.dtype != "bfloat16":
            continue
        tensor = lambda x: torch.tensor(np.asarray(x, np.float32), device="cuda")
        arrays = {n: tensor(x) for n, x in cases.draw(case).items()}
        leaves = {n: (x.bfloat16() if n in "qkv" else x).requires_grad_() for n, x in arrays.items()}
        run = prepare(torch, attend, leaves, tensor(cotangent(case)).bfloat16())[1]
        run()
        runs.append((case, list(leaves), run))
    torch.cuda.synchronize()

    def measure() -> Any:
        for case, names, run in runs:
            o, grads = run()
            want = wait_for(file_of(folder, case))
            got = {"o": o} | {f"d{n}": x for n, x in zip(names, grads, strict=True)}
            error = {n: relative_rms(x.detach().double().cpu().numpy(), want[n]) for n, x in got.items()}
            yield {"case": case.name, "pass": "check", "dtype": case.dtype, "error": error} | sized(case.shape)

    return measure


def main() -> None:
    part, folder = sys.argv[1].removeprefix("fla:"), Path(sys.argv[2])
    began = time.perf_counter()
    measure: Callable[[], Any] = lambda: ()
    try:
        torch = importlib.import_module("torch")
        thin_out(importlib.import_module("triton.runtime.autotuner").Autotuner)
        attend = importlib.import_module("fla.ops.path_attn").parallel_path_attn
        if part == "checks":
            measure = check_rows(torch, attend, folder)
        else:
            sizes, _, case = part.partition(":")
            measure = speed_rows(torch, attend, tuple(map(int, sizes.split(","))), case)
    except Exception as problem:
        words = f"{part}: {type(problem).__name__}: {problem}"[:300]
        print(json.dumps({"impl": "fla", "skipped": words}), flush=True)
    print(json.dumps({"part": sys.argv[1], "prepared_s": round(time.perf_counter() - began, 1)}), flush=True)
    print("READY", flush=True)
    sys.stdin.readline()
    for row in measure():
        print(json.dumps({"impl": "fla"} | row), flush=True)


if __name__ == "__main__":
    main()
