"""The batches of a whole run, made once by all cores and read from a memory map by every scheme.

Each batch is what bampath.data's loader gives at its step, so all schemes see the same rows in the same order, and
training never waits for text.
"""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from bampath.data import DataConfig, TokenCorpus, tokenizer_of
from bampath.data.loader import BatchSource, identity
from bampath.data.packing import Batch

# How the arrays of a batch are kept. Loss weights are 0, 1 and the answer's, whole numbers; segments are few per row.
KEPT = {"tokens": np.uint16, "targets": np.uint16, "weights": np.uint8, "segment_ids": np.int16}
USED = {"tokens": np.int32, "targets": np.int32, "weights": np.float32, "segment_ids": np.int32}
PART = 50  # steps that one job makes


def save_corpus(corpus: TokenCorpus, folder: Path) -> Path:
    """Keep a corpus so that other processes can map it."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", np.asarray(corpus.tokens[:]))
    np.save(folder / "offsets.npy", corpus.offsets)
    (folder / "info.json").write_text(json.dumps([corpus.fingerprint, corpus.info]), encoding="utf-8")
    return folder


def open_corpus(folder: Path) -> TokenCorpus:
    """What `save_corpus` kept."""
    fingerprint, info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    tokens = np.load(folder / "tokens.npy", mmap_mode="r").view(np.ndarray)
    return TokenCorpus(tokens, np.load(folder / "offsets.npy"), fingerprint, info)


def make_rows(config: DataConfig, corpus: Path, steps: int, out: Path, processes: int | None = None) -> Path:
    """The batches of steps 0 … steps - 1 as arrays [steps, B, T] in out/*.npy; nothing is done if they are there.

    corpus: a folder of `save_corpus`. ValueError for loss weights that are not whole numbers up to 255, and if `out`
    holds the batches of another configuration.
    """
    weights = (config.retrieval.answer_weight, config.retrieval.text_weight)
    if any(weight != int(weight) or weight > 255 for weight in weights):
        raise ValueError(f"retrieval.answer_weight and text_weight are {weights}: rows keep whole numbers up to 255")
    facts = {**identity(BatchSource(config, open_corpus(corpus), tokenizer_of(config))), "steps": steps}
    if (out / "facts.json").exists():
        if json.loads((out / "facts.json").read_text(encoding="utf-8")) != json.loads(json.dumps(facts)):
            raise ValueError(f"{out} holds the batches of another configuration; choose another --out")
        return out
    work = out.with_name(f"{out.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shape = (steps, config.batch_size, config.sequence_length)
    for name, kind in KEPT.items():
        np.lib.format.open_memmap(work / f"{name}.npy", "w+", kind, shape)
    jobs = [(config, corpus, work, first, min(first + PART, steps)) for first in range(0, steps, PART)]
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(_make_part, jobs))
    (work / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    work.rename(out)
    return out


def _make_part(job: tuple[DataConfig, Path, Path, int, int]) -> None:
    config, corpus, out, first, stop = job
    source = BatchSource(config, open_corpus(corpus), tokenizer_of(config))
    arrays = {name: np.load(out / f"{name}.npy", mmap_mode="r+") for name in KEPT}
    for step in range(first, stop):
        batch = source[step]
        for name, array in arrays.items():
            array[step] = batch[name]


def read_rows(folder: Path, first: int, stop: int, each: int) -> Iterator[tuple[int, Batch]]:
    """(steps done after it, {name: [each, B, T]}) for the steps from `first` on, the last block may be shorter."""
    arrays: dict[str, Any] = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in KEPT}
    for start in range(first, stop, each):
        end = min(start + each, stop)
        yield end, {name: np.asarray(array[start:end], USED[name]) for name, array in arrays.items()}
