"""Times FLA's PaTH (flash-linear-attention) for `bench.py`, in a process of its own: JSON rows on stdout.

Warms up all shapes, prints "ready", and takes its times after a line on stdin, when nothing else runs on the GPU.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

CASES = ("path", "path-fox")


def prepare(torch: Any, attend: Any, shape: tuple[int, ...], case: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, forward and backward) on random inputs; FLA wants w, beta and gates in float32."""
    batch, length, heads, dim = shape
    torch.manual_seed(0)
    make = lambda *size, dtype=torch.bfloat16: torch.randn(*size, device="cuda", dtype=dtype)
    q, k, v = (make(batch, length, heads, dim).requires_grad_() for _ in range(3))
    w = make(batch, length, heads, dim, dtype=torch.float32)
    w = (w / w.norm(dim=-1, keepdim=True)).requires_grad_()
    beta = torch.empty(batch, length, heads, device="cuda").uniform_(1.5, 2).requires_grad_()
    gates = torch.empty(batch, length, heads, device="cuda").uniform_(0.95, 1).log().requires_grad_()
    leaves = [q, k, v, w, beta] + ([gates] if case == "path-fox" else [])
    do = make(batch, length, heads, dim)
    first = lambda out: out[0] if isinstance(out, tuple) else out
    run = lambda: first(attend(q=q, k=k, v=v, w=w, beta=beta, g=gates if case == "path-fox" else None))

    def forward() -> Any:
        with torch.no_grad():
            return run()

    return forward, lambda: torch.autograd.grad(run(), leaves, do)


def main() -> None:
    shapes = [tuple(map(int, text.split(","))) for text in sys.argv[1:]]
    rows: list[dict[str, Any]] = []
    try:
        torch = importlib.import_module("torch")
        attend = importlib.import_module("fla.ops.path_attn").parallel_path_attn
    except Exception as problem:
        print(json.dumps({"impl": "fla", "skipped": f"{type(problem).__name__}: {problem}"[:200]}), flush=True)
        print("ready", flush=True)
        return
    for shape in shapes:
        for case in CASES:
            try:
                for run in prepare(torch, attend, shape, case):
                    run()
            except Exception as problem:
                rows.append({"case": case, "shape": shape, "skipped": f"{type(problem).__name__}: {problem}"[:200]})
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print("ready", flush=True)
    sys.stdin.readline()
    failed = {(row["case"], row["shape"]) for row in rows}
    for shape in shapes:
        for case in CASES:
            if (case, shape) not in failed:
                for name, run in zip(("fwd", "fwd_bwd"), prepare(torch, attend, shape, case), strict=True):
                    rows.append({"case": case, "shape": shape, "pass": name} | timed(torch, run))
                torch.cuda.empty_cache()
    for row in rows:
        print(json.dumps({"impl": "fla"} | row), flush=True)


def timed(torch: Any, run: Callable[[], Any]) -> dict[str, Any]:
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 4 * 1e3)
    times = sorted(times[1:])
    memory = torch.cuda.max_memory_allocated()
    return {"ms": times[2], "ms_min": times[0], "ms_max": times[-1], "peak_bytes": memory}


if __name__ == "__main__":
    main()
