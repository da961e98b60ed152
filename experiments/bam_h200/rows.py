"""The batches of whole runs, made once by several processes and read from a memory map by every scheme.

Each batch is what bampath.data's loader gives at its step, so all schemes see the same rows in the same order, and
training never waits for text.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
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
EACH = 10  # jobs that are worth a process


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
    """The batches of steps 0 … steps - 1 as arrays [steps, B, T] in out/*.npy; see `make_all`."""
    make_all([(config, steps, out)], corpus, processes)
    return out


def make_all(
    wanted: Sequence[tuple[DataConfig, int, Path]],
    corpus: Path,
    processes: int | None = None,
    done: Callable[[Path], None] = lambda out: None,
) -> None:
    """The batches of several (configuration, steps, folder), by the same processes; folders that have theirs stay.

    corpus: a folder of `save_corpus`. processes: by default one for EACH parts, as many as there are cores: starting
    one takes as long as a few parts. done: called with each folder when it is complete. ValueError for loss weights
    that are not whole numbers up to 255, and if a folder holds the batches of another configuration.
    """
    left = [(*one, facts) for one in wanted if (facts := _missing(*one, corpus)) is not None]
    jobs = {out: _parts(config, steps, out, corpus) for config, steps, out, _ in left}
    count = processes or min(os.cpu_count() or 1, 1 + sum(map(len, jobs.values())) // EACH)
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        made = {out: [pool.submit(_make_part, job) for job in own] for out, own in jobs.items()}
        for *_, out, facts in left:
            for part in made[out]:
                part.result()
            (_partial(out) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
            _partial(out).rename(out)
            done(out)


def _missing(config: DataConfig, steps: int, out: Path, corpus: Path) -> dict[str, Any] | None:
    """What decides the batches of a folder; None if they are there."""
    weights = (config.retrieval.answer_weight, config.retrieval.text_weight)
    if any(weight != int(weight) or weight > 255 for weight in weights):
        raise ValueError(f"retrieval.answer_weight and text_weight are {weights}: rows keep whole numbers up to 255")
    facts = {**identity(_source(config, corpus)), "steps": steps}
    if not (out / "facts.json").exists():
        return facts
    if json.loads((out / "facts.json").read_text(encoding="utf-8")) != json.loads(json.dumps(facts)):
        raise ValueError(f"{out} holds the batches of another configuration; choose another --out")
    return None


def _parts(config: DataConfig, steps: int, out: Path, corpus: Path) -> list[tuple[DataConfig, Path, Path, int, int]]:
    """Empty arrays beside `out`, and the jobs that fill them."""
    work = _partial(out)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shape = (steps, config.batch_size, config.sequence_length)
    for name, kind in KEPT.items():
        np.lib.format.open_memmap(work / f"{name}.npy", "w+", kind, shape)
    return [(config, corpus, work, first, min(first + PART, steps)) for first in range(0, steps, PART)]


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


@lru_cache(4)
def _source(config: DataConfig, corpus: Path) -> BatchSource:
    """What a process makes batches from; opened once, not for every part."""
    return BatchSource(config, open_corpus(corpus), tokenizer_of(config))


def _make_part(job: tuple[DataConfig, Path, Path, int, int]) -> None:
    config, corpus, out, first, stop = job
    source = _source(config, corpus)
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
