"""One cell of the training comparison: a small model under a scheme, then read under several.

The text lies on the device; a batch is cut out of it at places drawn once for all cells, and many steps are one call.
Every scheme here has the same parameters, so a model trained under one can be read under another.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath.config import Config, get
from bampath.evaluation.reader import token_losses
from bampath.model import head_kernel
from bampath.step import TrainState, build_model, declare, init_state, make_train_step, optimizer_of

Array = jax.Array
Row = dict[str, Any]
BLOCK = 50  # steps of one call
CELLS = ("alibi", "lsh(samples=10)", "lsh(samples=20)", "lsh(samples=1,law=fixed)", "nope")
# How each model is read beside its own scheme.
CROSS = {
    "alibi": ("lsh(samples=10)", "lsh(samples=20)", "alibi+window(size=1024)"),
    "lsh(samples=10)": ("alibi", "lsh(samples=20)"),
    "lsh(samples=20)": ("alibi", "lsh(samples=10)"),
    "lsh(samples=1,law=fixed)": ("alibi",),
    "nope": (),
}
DRAWS = 3  # fresh grids that a model is read with
WINDOW = 512  # positions whose losses are averaged


@dataclass(frozen=True)
class Plan:
    """One budget for all cells; steps: a multiple of BLOCK; rows: of held-out text, twice the training length long."""

    length: int = 2048
    batch: int = 16
    steps: int = 500
    rows: int = 96
    read_at_once: int = 16
    layers: int = 4
    dim: int = 512
    heads: int = 8
    vocab: int = 50_304  # GPT-2's 50,257, and places that are never used
    lr: float = 2e-3
    dtype: str = "bfloat16"
    seed: int = 0

    def config(self, scheme: str) -> Config:
        changes = {
            "model.vocab_size": self.vocab,
            "model.dim": self.dim,
            "model.layers": self.layers,
            "model.heads": self.heads,
            "model.mlp_dim": 4 * self.dim,
            "model.train_length": self.length,
            "model.init": "normal",
            "model.qk_norm": "true",
            "model.dtype": self.dtype,
            "position": scheme,
            "data.sequence_length": self.length,
            "data.batch_size": self.batch,
            "optim.name": "adamw",
            "optim.lr": self.lr,
            "optim.warmup_steps": self.steps // 10,
            "train.steps": self.steps,
            "train.seed": self.seed,
            "train.loss_chunk": 16_384,
        }
        return get("tiny", *(f"{key}={value}" for key, value in changes.items()))


def places(plan: Plan, tokens: int) -> np.ndarray:
    """Where the rows of every step begin, int32 [steps, B]: the same for all cells."""
    shape = (plan.steps, plan.batch)
    return np.random.default_rng(plan.seed).integers(0, tokens - plan.length - 1, shape).astype(np.int32)


def held_out_rows(plan: Plan, tokens: np.ndarray) -> np.ndarray:
    """Rows int32 [rows, 2 T + 1] at equal distances. ValueError if the text is too short."""
    width = 2 * plan.length + 1
    if len(tokens) < plan.rows * width:
        raise ValueError(f"{plan.rows} rows of {width} tokens need {plan.rows * width}, the text has {len(tokens)}")
    starts = np.linspace(0, len(tokens) - width, plan.rows).astype(int)
    return np.stack([tokens[start : start + width] for start in starts]).astype(np.int32)


def train_program(plan: Plan, scheme: str, tokens: int) -> Any:
    """(state, text, places [BLOCK, B]) -> (state, losses [BLOCK]), compiled."""
    config = plan.config(scheme)
    model = build_model(config)
    declared = declare(model)
    optimizer = optimizer_of(config, declared)
    step = make_train_step(config, model, declared, optimizer)

    def several(state: TrainState, text: Array, where: Array) -> tuple[TrainState, Array]:
        def one(state: TrainState, starts: Array) -> tuple[TrainState, Array]:
            cut = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(text, start, plan.length + 1))
            rows = cut(starts).astype(jnp.int32)
            batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
            state, report = step(state, {**batch, "weights": jnp.ones(batch["tokens"].shape, jnp.float32)})
            return state, report.loss.total / report.loss.weight

        return jax.lax.scan(one, state, where)

    state = jax.eval_shape(lambda: init_state(config, model, optimizer))
    text = jax.ShapeDtypeStruct((tokens,), jnp.uint16)
    where = jax.ShapeDtypeStruct((BLOCK, plan.batch), jnp.int32)
    return jax.jit(several, donate_argnums=0).lower(state, text, where).compile()


def read_program(plan: Plan, scheme: str) -> Any:
    """(params, rows [n, 2 T + 1], key) -> losses [n, 2 T], compiled; LSH draws fresh grids with the key."""
    model = build_model(reading_config(plan, scheme))

    def losses(params: Any, rows: Array, key: Array) -> Array:
        rngs = {"sample": jax.random.wrap_key_data(key)} if draws(scheme) > 1 else {}
        hidden: Any = model.apply({"params": params}, rows[:, :-1], method="features", rngs=rngs)
        return token_losses(hidden, head_kernel(params), rows[:, 1:])

    params = declare(model).shapes
    rows = jax.ShapeDtypeStruct((plan.read_at_once, 2 * plan.length + 1), jnp.int32)
    return jax.jit(losses).lower(params, rows, jax.ShapeDtypeStruct((2,), jnp.uint32)).compile()


def reading_config(plan: Plan, scheme: str) -> Config:
    """The configuration that reads; the training length stays what it was."""
    config = plan.config(scheme)
    return replace(config, data=replace(config.data, sequence_length=2 * plan.length))


def draws(scheme: str) -> int:
    return DRAWS if scheme.startswith("lsh(") and "law=fixed" not in scheme else 1


@dataclass
class Programs:
    """What is compiled: training of every cell that is left, reading under every scheme that they need."""

    train: dict[str, Any]
    read: dict[str, Any]


def compile_all(plan: Plan, schemes: Sequence[str], tokens: int, threads: int) -> Programs:
    readers = list(dict.fromkeys(name for scheme in schemes for name in (scheme, *CROSS[scheme])))
    with ThreadPoolExecutor(threads) as pool:
        train = {scheme: pool.submit(train_program, plan, scheme, tokens) for scheme in schemes}
        read = {scheme: pool.submit(read_program, plan, scheme) for scheme in readers}
        return Programs({n: f.result() for n, f in train.items()}, {n: f.result() for n, f in read.items()})


def run_cell(plan: Plan, scheme: str, programs: Programs, text: Array, held_out: np.ndarray) -> list[Row]:
    """Train, then read: rows of the curve, and of the losses in windows of positions under every scheme."""
    config = plan.config(scheme)
    model = build_model(config)
    state = init_state(config, model, optimizer_of(config, declare(model)))
    where = places(plan, len(text)).reshape(-1, BLOCK, plan.batch)
    jax.block_until_ready(state)
    begin, curve = time.perf_counter(), []
    for block in where:
        state, losses = programs.train[scheme](state, text, block)
        curve.append(losses)
    found = np.concatenate([np.asarray(losses) for losses in curve])
    seconds = time.perf_counter() - begin
    if not bool(state.sound):
        raise FloatingPointError(f"{scheme}: a loss, gradient or update was not finite")
    facts: Row = {"case": scheme, "benchmark": "training", "steps": plan.steps, "seconds": round(seconds, 2)}
    facts |= {"tokens": plan.steps * plan.batch * plan.length, "loss": float(found[-BLOCK:].mean())}
    facts |= {"curve": [round(float(x), 4) for x in found.reshape(-1, BLOCK // 5).mean(1)]}
    rows = [facts]
    for reader in (scheme, *CROSS[scheme]):
        rows += read(plan, scheme, reader, programs.read[reader], state.params, held_out)
    return rows


def read(plan: Plan, scheme: str, reader: str, program: Any, params: Any, held_out: np.ndarray) -> list[Row]:
    """A row per draw of the grids: mean loss per window of positions, and its standard error over rows of text."""
    found = []
    for draw in range(draws(reader)):
        key = jax.random.key_data(jax.random.key(1000 + draw))
        parts = [program(params, part, key) for part in held_out.reshape(-1, plan.read_at_once, held_out.shape[1])]
        losses = np.concatenate([np.asarray(x, np.float64) for x in parts])
        windows = losses.reshape(len(losses), -1, WINDOW if losses.shape[1] > WINDOW else losses.shape[1]).mean(2)
        row: Row = {"case": scheme, "benchmark": "perplexity", "read": reader, "draw": draw, "rows": len(losses)}
        row |= {"window": losses.shape[1] // windows.shape[1], "loss": windows.mean(0).tolist()}
        found.append(row | {"error": (windows.std(0, ddof=1) / np.sqrt(len(losses))).tolist()})
    return found
