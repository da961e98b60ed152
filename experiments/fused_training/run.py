"""Does training with the fused attention give the losses that the plain path gives?

    python -m experiments.fused_training.run [--out FILE] [--steps 100]

Trains the same small models from the same parameters on the same batches twice, with `attention_impl=None` (what the
library picks for the machine) and with `xla`, and compares the losses step by step. Exit status 1 if a difference
exceeds TOLERANCE. The text is this repository's own documents and sources, as bytes. Matrix products run at JAX's
default precision, TF32 for float32 on NVIDIA GPUs, in both runs; only the fused kernels' own products are exact.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath import config as configs
from bampath.config import Config
from bampath.evaluation.results import environment
from bampath.step import Batch, build_model, declare, init_state, make_train_step, optimizer_of

HERE = Path(__file__).parent
SCHEMES = ("bam+ssmax", "fox")
DTYPES = ("bfloat16", "float32")
IMPLEMENTATIONS = ("none", "xla")
TOLERANCE = 2e-2  # nats, largest difference of a step's loss
MODEL = (
    *("model.dim=256", "model.layers=2", "model.heads=4", "model.head_dim=64", "model.mlp_dim=512"),
    *("data.sequence_length=512", "data.batch_size=16", "model.train_length=512"),
)


def text() -> np.ndarray:
    """Documents and sources of the repository, one after the other: uint8 [bytes]."""
    root = HERE.parents[1]
    paths = [p for folder in ("bampath", "kernels", "docs") for p in sorted((root / folder).rglob("*")) if p.is_file()]
    kept = [p.read_bytes() for p in paths if p.suffix in (".py", ".md")]
    return np.frombuffer(b"\n".join(kept), np.uint8)


def batches(config: Config, steps: int) -> list[Batch]:
    """Random windows of the text, the same for every run."""
    data, (rows, length) = text(), (config.data.batch_size, config.data.sequence_length)
    random = np.random.default_rng(0)
    windows = random.integers(0, len(data) - length - 1, (steps, rows))
    taken = data[windows[:, :, None] + np.arange(length + 1)].astype(np.int32)
    ones = np.ones((rows, length), np.float32)
    found = ({"tokens": w[:, :-1], "targets": w[:, 1:], "weights": ones} for w in taken)
    return [jax.tree.map(jnp.asarray, batch) for batch in found]


def configure(scheme: str, dtype: str, implementation: str, steps: int) -> Config:
    own = (f"position={scheme}", f"model.dtype={dtype}", f"model.attention_impl={implementation}")
    return configs.get("tiny", *MODEL, *own, f"train.steps={steps}", "data.document_mask=false")


def losses(config: Config, steps: int) -> list[float]:
    """The loss of every step, in nats per byte."""
    model = build_model(config)
    declared = declare(model)
    optimizer = optimizer_of(config, declared)
    state = init_state(config, model, optimizer)
    step = make_train_step(config, model, declared, optimizer)
    found = []
    for batch in batches(config, steps):
        state, report = step(state, batch)
        found.append(report.loss.value())
    return [float(loss) for loss in found]


def compare(steps: int) -> list[dict[str, Any]]:
    """One row per scheme and dtype: losses of both implementations and how far they are apart."""
    cells = list(product(SCHEMES, DTYPES, IMPLEMENTATIONS))
    with ThreadPoolExecutor(len(cells)) as pool:
        found = pool.map(lambda c: losses(configure(c[0], c[1], c[2], steps), steps), cells)
        runs = dict(zip(cells, found, strict=True))
    rows = []
    for scheme, dtype in product(SCHEMES, DTYPES):
        fused, plain = (np.array(runs[scheme, dtype, name]) for name in IMPLEMENTATIONS)
        precise = np.array(runs[scheme, "float32", "xla"])
        apart = float(np.abs(fused - plain).max())
        rows.append(
            {
                "case": scheme,
                "dtype": dtype,
                "pass": "training",
                "steps": steps,
                "first_loss": float(plain[0]),
                "last_loss": {"fused": float(fused[-1]), "xla": float(plain[-1])},
                "largest_difference": apart,
                "xla_against_xla_float32": float(np.abs(plain - precise).max()),
                "tolerance": TOLERANCE,
                "passed": bool(apart <= TOLERANCE and np.isfinite(fused).all()),
                "losses": {"fused": fused.round(5).tolist(), "xla": plain.round(5).tolist()},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="where the results go")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if args.out == HERE / "results.json" and jax.default_backend() != "gpu":
        parser.error(f"the results beside this file are a GPU's, and here is a {jax.default_backend()}: give --out")
    rows = compare(args.steps)
    args.out.write_text(json.dumps({"env": environment(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print({name: value for name, value in row.items() if name != "losses"})
    raise SystemExit(0 if all(row["passed"] for row in rows) else 1)


if __name__ == "__main__":
    main()
