"""What is compared rather than timed: losses on a mesh against one GPU, and the trainer itself on a mesh."""

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bampath.config import Config, get
from bampath.sharding import mesh_of, place_batch
from bampath.step import abstract_state, build_model, declare, make_init, make_train_step, optimizer_of
from experiments.multi_gpu.cells import FUSED_PATH, Cell
from experiments.multi_gpu.step import abstract_batch
from experiments.multi_gpu.work import words

STEPS = 5
# Nats, largest difference of any step's loss. float32 has exact products; bfloat16 rounds sums that are cut otherwise.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
SMALL = (
    *("model.dim=256", "model.layers=2", "model.heads=4", "model.kv_heads=4", "model.head_dim=64", "model.mlp_dim=512"),
    *("model.vocab_size=512", "data.document_mask=false", "train.accumulate=1", "optim.name=adamw"),
)


def meshes(gpus: int) -> dict[str, tuple[str, ...]]:
    """Every way to spread over `gpus` that the study uses, and two mixed ones."""
    found: dict[str, tuple[str, ...]] = {axis: (f"mesh.{axis}={gpus}",) for axis in ("fsdp", "tensor", "context")}
    if gpus % 2 == 0 and gpus > 2:
        found["data × context"] = (f"mesh.data={gpus // 2}", "mesh.context=2")
        found["fsdp × tensor"] = (f"mesh.fsdp={gpus // 2}", "mesh.tensor=2")
    return found


def run(cell: Cell) -> dict[str, Any]:
    return losses(cell) if cell.what == "losses" else trainer(cell)


def losses(cell: Cell, rows: int = 4, length: int = 1024) -> dict[str, Any]:
    """{"rows": one per dtype and mesh}: the losses of STEPS steps beside those of one device.

    PaTH in bfloat16 only, which its fused kernels serve.
    """
    fused = cell.carries_keys and jax.default_backend() == "gpu"
    dtypes = ("bfloat16",) if fused else tuple(TOLERANCE)
    sizes = (f"data.batch_size={rows}", f"data.sequence_length={length}", *(FUSED_PATH if fused else ()))
    spread = {"one": (), **meshes(cell.gpus)}
    wanted = [(dtype, name) for dtype in dtypes for name in spread]
    config = lambda dtype, name: get(
        "tiny", *SMALL, *sizes, f"position={cell.scheme}", f"model.dtype={dtype}", *spread[name]
    )
    with ThreadPoolExecutor(len(wanted)) as pool:
        built = {key: pool.submit(_compiled, config(*key)) for key in wanted}
    found: list[dict[str, Any]] = []
    one: dict[str, list[float]] = {}
    for dtype, name in wanted:
        row: dict[str, Any] = {"case": cell.scheme, "pass": "losses", "mesh": name, "dtype": dtype, "gpus": cell.gpus}
        row |= {"B": rows, "T": length, "tolerance": TOLERANCE[dtype]}
        try:
            row["losses"], row["sound"] = _train(config(dtype, name), *built[dtype, name].result())
        except Exception as problem:
            found.append(row | {"failed": words(problem), "passed": False})
            continue
        if name == "one":
            one[dtype] = row["losses"]
            row["passed"] = row["sound"]
        elif dtype in one:
            apart = float(np.abs(np.array(row["losses"]) - np.array(one[dtype])).max())
            row |= {"apart": apart, "passed": row["sound"] and bool(apart <= TOLERANCE[dtype])}
        found.append(row)
    return {"rows": found}


def _compiled(config: Config) -> tuple[Any, Any]:
    precise = config.model.dtype == "float32"
    with jax.default_matmul_precision("highest") if precise else nullcontext():
        model = build_model(config)
        declared = declare(model)
        optimizer = optimizer_of(config, declared)
        state, batch = (
            abstract_state(config, model, optimizer, mesh_of(config)),
            abstract_batch(config, mesh_of(config)),
        )
        step = make_train_step(config, model, declared, optimizer).lower(state, batch).compile()
        return make_init(config, model, optimizer).lower().compile(), step


def _train(config: Config, init: Any, step: Any) -> tuple[list[float], bool]:
    """The losses, and whether every update was finite: a step that is not leaves the parameters as they were."""
    rows, length = config.data.batch_size, config.data.sequence_length
    random, state, found = np.random.default_rng(1), init(), []
    for _ in range(STEPS):
        tokens = random.integers(0, config.model.vocab_size, (rows, length + 1)).astype(np.int32)
        tokens[:, 1::2] = tokens[:, :-1:2] // 2  # every other token follows from the one before: something to learn
        targets = tokens[:, 1:]
        batch = {"tokens": tokens[:, :-1], "targets": targets, "weights": np.ones(targets.shape, np.float32)}
        state, report = step(state, place_batch(batch, mesh_of(config), rows))
        found.append(float(report.loss.value()))
    return found, bool(state.sound)


def trainer(cell: Cell) -> dict[str, Any]:
    """`experiments.train` on a mesh, beside itself on one device: exit statuses and last losses."""
    half = cell.gpus // 2
    spread = (f"mesh.fsdp={half}", "mesh.context=2") if cell.gpus % 2 == 0 else (f"mesh.fsdp={cell.gpus}",)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        runs = {"one": (), "mesh": spread}
        done = dict(zip(runs, pool.map(lambda name: _fit(Path(folder) / name, *runs[name]), runs), strict=True))
    row: dict[str, Any] = {"case": cell.scheme, "pass": "trainer", "mesh": " ".join(spread), "gpus": cell.gpus}
    row |= {"runs": done, "tolerance": TOLERANCE["bfloat16"]}
    if all("losses" in one for one in done.values()):
        apart = float(np.abs(np.array(done["one"]["losses"]) - np.array(done["mesh"]["losses"])).max())
        row["apart"] = apart
    lines = [one["failed"] for one in done.values() if "failed" in one]
    row |= {"failed": lines[0]} if lines else {}
    row["passed"] = all(one["status"] == 0 for one in done.values()) and row.get("apart", 1.0) <= row["tolerance"]
    return {"rows": [row]}


def _fit(folder: Path, *overrides: str) -> dict[str, Any]:
    pages = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
    text = folder.parent / f"{folder.name}.txt"
    text.write_text("\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
    command = [sys.executable, "-m", "experiments.train", "--config", "tiny", "--run-dir", str(folder)]
    command += ["model.dtype=bfloat16", f"data.source={text}", "data.documents=blocks", "train.steps=8"]
    command += [
        "data.sequence_length=512",
        "data.batch_size=8",
        "train.save_every=8",
        "train.log_every=1",
        "train.tensorboard=false",
        *overrides,
    ]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"status": done.returncode, "seconds": time.monotonic() - begin}
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr, flush=True)  # a traceback names this machine's folders
        return found | {
            "failed": next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        }
    from bampath import metrics

    return found | {"losses": [row["loss"] for row in metrics.read(folder / "metrics.jsonl") if "loss" in row]}
