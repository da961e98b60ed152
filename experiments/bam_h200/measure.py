"""What a trained model is asked: passkeys, RULER's single needles, perplexity by position; its priors and attention."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath.analysis import read_heads
from bampath.config import Config
from bampath.data import WORDINGS, Tokenizer
from bampath.evaluation.passkey import PasskeyResult, PasskeyTask, Prompt, Prompts, answer
from bampath.evaluation.perplexity import loss_by_position
from bampath.evaluation.reader import ModelReader, Reader, _row_logits, _row_losses
from bampath.model import LM, model_config
from bampath.positions.module import PositionalEncoding
from experiments.bam_h200.config import Asked
from kernels.attention import reference
from kernels.attention.call import make_call

Array = jax.Array
Row = dict[str, Any]
Say = Callable[[str], None]
Needles = dict[str, dict[int, list[Prompt]]]  # task -> length -> prompts
WORDING = WORDINGS["passkey"]


PLACES = 40  # of a row whose logits are computed: more than the longest answer has tokens


class CompiledReader(ModelReader):
    """A `ModelReader` whose programs are compiled when it is made, one per width of rows.

    widths: of the rows whose logits are asked for; length: of those whose losses are; tokens: read together. params may
    be abstract at first; those of a seed are put in before it is asked. pool: where programs are compiled while this
    goes on. Other shapes are compiled when they come.
    """

    def __init__(
        self, model: LM, params: Any, chunk: int, widths: Sequence[int], length: int, tokens: int, pool: Executor
    ) -> None:
        super().__init__(model, params, chunk)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        self._logits, self._losses = dict[int, tuple[int, Future[Any]]](), dict[tuple[int, ...], Future[Any]]()
        for width in widths:
            batch = max(1, tokens // width)
            shapes = ints(batch, width), ints(batch, PLACES)
            self._logits[width] = (batch, pool.submit(_row_logits.lower(model, params, *shapes).compile))
        rows = ints(max(1, tokens // length), length)
        self._losses[rows.shape] = pool.submit(_row_losses.lower(model, params, rows, rows).compile)

    def logits_at(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        rows, count = places.shape
        batch, program = self._logits.get(tokens.shape[1], (0, None))
        if program is None or count > PLACES or rows > batch:
            return super().logits_at(tokens, places)
        padding = ((0, batch - rows), (0, 0))
        wanted = np.pad(np.pad(places, ((0, 0), (0, PLACES - count)), mode="edge"), padding).astype(np.int32)
        return np.asarray(program.result()(self.params, np.pad(tokens, padding), wanted)[:rows, :count])

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        program = self._losses.get(tokens.shape)
        if program is None:
            return super().losses(tokens, targets)
        return np.asarray(program.result()(self.params, tokens, targets))


def ask(
    reader: Reader, tokenizer: Tokenizer, asked: Asked, needles: Needles, text: np.ndarray, window: int, tokens: int
) -> list[Row]:
    """Rows of all benchmarks that go through `reader`. text: rows of held-out text [R, L + 1]; window: positions whose
    loss is averaged; tokens: read together."""
    rows = passkey(reader, tokenizer, asked, tokens)
    for task, by_length in needles.items():
        for group in asked.niah:
            prompts = {length: by_length[length] for length in group if length in by_length}
            rows += [{**row, "benchmark": "niah", "task": task} for row in _together(reader, prompts, tokens)]
    return [*rows, *loss_by_position(reader, text, window, batch_tokens=tokens).rows()]


def passkey(reader: Reader, tokenizer: Tokenizer, asked: Asked, tokens: int) -> list[Row]:
    """Rows of the passkey test; lengths of a group are padded to one width and read together."""
    prompts, rows = Prompts(PasskeyTask(samples=asked.samples), tokenizer), list[Row]()
    for group in asked.passkey:
        rows += _together(reader, {length: prompts.make(length) for length in group}, tokens)
    return rows


def far(reader: Reader, tokenizer: Tokenizer, asked: Asked, tokens: int) -> list[Row]:
    """Rows of the passkey test at the far lengths, up to the first at which no key is found."""
    prompts, rows = Prompts(PasskeyTask(samples=asked.far_samples), tokenizer), list[Row]()
    for length in asked.far:
        rows += _together(reader, {length: prompts.make(length)}, tokens)
        if not rows[-1]["correct"]:
            break
    return rows


def _together(reader: Reader, prompts: dict[int, list[Prompt]], tokens: int) -> list[Row]:
    """A row per length, all prompts read in rows of one width."""
    samples = answer(reader, [prompt for own in prompts.values() for prompt in own], tokens)
    rows, start = [], 0
    for length, own in prompts.items():
        rows.append(PasskeyResult(length, tuple(samples[start : start + len(own)])).row())
        start += len(own)
    return rows


def heads(config: Config, params: Any, keys: int) -> list[Row]:
    """The learned prior of every head."""
    return [head.row() for head in read_heads(config.model, params, keys)]


class Attention:
    """Where the token before the key's first digit looks, for a key in the middle of the noise, at some lengths.

    Programs are compiled when it is made. Nothing for schemes whose keys change on the way (PaTH).
    """

    def __init__(self, model: LM, params: Any, tokenizer: Tokenizer, lengths: Sequence[int], pool: Executor) -> None:
        self._tokenizer, self._programs = tokenizer, dict[int, tuple[Prompt, Array, Future[Any]]]()
        for length in lengths:
            prompt = Prompts(PasskeyTask(samples=3), tokenizer).make(length)[1]
            tokens = jnp.asarray(prompt.tokens[None, : len(prompt.tokens) - prompt.scored])
            look = jax.jit(lambda params, tokens: last_attention(model, params, tokens))
            if jax.eval_shape(look, params, tokens) is not None:
                self._programs[length] = (prompt, tokens, pool.submit(look.lower(params, tokens).compile))

    def rows(self, params: Any, kept: int = 3) -> list[Row]:
        """A row per head and length: `needle`, the weight on the sentence that holds the key, and for the `kept` heads
        with most of it the weights of up to 512 spans of equally many keys, the largest in each."""
        found: list[Row] = []
        for length, (prompt, tokens, program) in self._programs.items():
            weights = np.asarray(program.result()(params, tokens), np.float64)
            start = len(self._tokenizer.encode(WORDING.task))
            start += prompt.slot * len(self._tokenizer.encode(WORDING.filler))
            end = start + len(self._tokenizer.encode(WORDING.needle.format(key=prompt.key)))
            mass = weights[:, :, start:end].sum(-1)
            best = set(np.argsort(-mass.reshape(-1))[:kept].tolist())
            place = {"length": length, "keys": weights.shape[2], "needle_start": start, "needle_end": end}
            for index, own in enumerate(mass.reshape(-1).tolist()):
                layer, head = divmod(index, mass.shape[1])
                row = {"benchmark": "attention", **place, "layer": layer, "head": head, "needle": own}
                found.append(row | ({"row": _spans(weights[layer, head])} if index in best else {}))
        return found


def last_attention(model: LM, params: Any, tokens: Array) -> Array | None:
    """Attention [layers, H, T] of the last token of a row [1, T]; None for schemes that carry keys or draw grids."""
    _, seen = model.apply(
        {"params": params},
        tokens,
        method="features",
        mutable=["intermediates"],
        capture_intermediates=lambda module, name: isinstance(module, PositionalEncoding) and name == "__call__",
    )
    found = []
    for layer in range(model_config(model.config).layers):
        ((slots, _),) = seen["intermediates"][f"layer_{layer}"]["attention"]["position"]["__call__"]
        if slots.householder is not None or slots.grids is not None:
            return None
        call = make_call(
            slots.q[:, -1:],
            slots.k,
            slots.k,
            prior=slots.prior,
            log_gates=slots.log_gates,
            sharpness=None if slots.sharpness is None else slots.sharpness[:, -1:],
            sharpen_prior=slots.sharpen_prior,
            segment_ids=None,
            positions=None,
            kv_positions=None,
            window=slots.window,
            causal=True,
            scale=None,
        )
        logits, visible = reference.logits(call)
        found.append(jax.nn.softmax(jnp.where(visible[:, None], logits, -jnp.inf), axis=-1)[0, :, 0])
    return jnp.stack(found)


def _spans(weights: np.ndarray, spans: int = 512) -> list[float]:
    width = -(-len(weights) // spans)
    return [float(f"{part.max():.4g}") for part in np.split(weights, range(width, len(weights), width))]
