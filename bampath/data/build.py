"""Text to a data set of shards, in parallel; what was finished before a stop is kept. See `shards` for the files."""

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bampath.data.config import DataConfig
from bampath.data.corpus import PARTS, VERSION, digest, dtype_of, marks_of, tokenised, tokenizer_of
from bampath.data.prepared import MADE_WITH, SHARDS, mixture_of
from bampath.data.shards import DATASET_NAME, PLAN_NAME, ShardWriter, file_facts, read_json, write_json
from bampath.data.sources import open_source, read_unit, split_rule, units_of
from bampath.data.tokenizer import Tokenizer

CARD_NAME = "README.md"
logger = logging.getLogger(__name__)


def build(config: DataConfig, folder: Path, workers: int = 0, shard_bytes: int = 256 << 20) -> dict[str, Any]:
    """Tokenise `config.source` into `folder` with so many processes (0: one per core); returns what dataset.json holds.

    Text is cut into units of about `shard_bytes` bytes; finished units stay, so that a build that was stopped goes on.
    ValueError if the folder holds a data set of other text, tokenizer or options, or if the text has no documents;
    OSError if it cannot be written; ChildProcessError if a process was killed; errors of sources pass through.
    """
    if config.source.startswith(SHARDS) or mixture_of(config.source):
        raise ValueError(f"source={config.source!r} is tokens already; shards are made of text")
    if config.max_documents or config.validation_source:
        raise ValueError("max_documents and validation_source do not go with --shards: make a data set of each source")
    if workers < 0 or shard_bytes < 1:
        raise ValueError(f"workers={workers} must not be negative, and shard_bytes={shard_bytes} at least 1")
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, so it cannot be the folder of a data set; choose another folder")
    plan = make_plan(config, shard_bytes)
    _adopt(folder, plan)
    missing = [number for number in range(len(plan["units"])) if not unit_is_whole(folder, number)]
    logger.info("%s: %d units of %s, %d to make", folder, len(plan["units"]), plan["source"], len(missing))
    processes = min(workers or os.cpu_count() or 1, max(1, len(missing)))
    start, tokens = time.monotonic(), 0
    for done, made in enumerate(_made(config, folder, missing, processes), 1):
        tokens += sum(part["tokens"] for part in made["parts"].values())
        rate = tokens / (time.monotonic() - start)
        logger.info("unit %d: %d of %d, %s tokens/s", made["unit"], done, len(missing), f"{rate:,.0f}")
    return finish(folder, plan)


def make_plan(config: DataConfig, shard_bytes: int) -> dict[str, Any]:
    """Everything that decides what the shards hold. Errors of sources, tokenizers and split rules come from here."""
    tokenizer, source = tokenizer_of(config), open_source(config.source, config.read_options)
    split_rule(source, config.split, config.validation_fraction)
    marks_of(config, tokenizer)
    return {
        "version": VERSION,
        "source": source.name,
        "identity": source.identity,
        "licence": source.licence,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "dtype": dtype_of(tokenizer).str,
        "options": {name: getattr(config, name) for name in MADE_WITH},
        "units": [[list(piece) for piece in unit] for unit in units_of(source, shard_bytes)],
    }


def _adopt(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan into a new folder, or see that the folder has the same one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {folder} cannot be made ({error.strerror}); choose another folder") from None
    plan = json.loads(json.dumps(plan))
    there = read_json(folder / PLAN_NAME)
    if there is None:
        if any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no data set; choose another folder")
        write_json(folder / PLAN_NAME, plan)
    elif there != plan:
        lines = [
            f"  {name}: there {there.get(name)!r}, now {plan[name]!r}" for name in plan if there.get(name) != plan[name]
        ]
        shown = "\n".join(line if len(line) < 300 else f"{line[:300]}…" for line in lines)
        raise ValueError(f"{folder} holds another data set; choose another folder. Different are\n{shown}")


def unit_is_whole(folder: Path, number: int, check: bool = False) -> bool:
    """Whether a unit is finished and its files have their sizes (check: and their checksums)."""
    made = read_json(folder / f"unit-{number:05d}.json")
    if made is None:
        return False
    for part in made["parts"].values():
        for name, facts in part.get("files", {}).items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != facts["bytes"] or (check and file_facts(path) != facts):
                return False
    return True


def _made(config: DataConfig, folder: Path, units: list[int], processes: int) -> Iterator[dict[str, Any]]:
    """What each unit gave, as they are finished."""
    if processes == 1:
        yield from (make_unit(config, folder, number) for number in units)
        return
    with _quiet_tokenizers(), ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(make_unit, config, folder, number) for number in units]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise ChildProcessError(
                f"one of {processes} worker processes was killed, perhaps for want of memory (--workers takes fewer); "
                "what is finished stays, and the same command goes on from there"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """One thread per worker: the package would start as many as there are cores in each of them."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


@lru_cache(maxsize=2)
def _tokenizer(config: DataConfig) -> Tokenizer:
    return tokenizer_of(config)


def make_unit(config: DataConfig, folder: Path, number: int) -> dict[str, Any]:
    """Tokenise one unit of the folder's plan, under other names first, so that a killed worker leaves nothing whole."""
    plan = read_json(folder / PLAN_NAME)
    assert plan is not None
    source, tokenizer = open_source(config.source, config.read_options), _tokenizer(config)
    held_out = split_rule(source, config.split, config.validation_fraction)
    work = folder / f".unit-{number:05d}-{os.getpid()}"
    work.mkdir(exist_ok=True)
    for path in work.iterdir():
        path.unlink()
    unit = tuple((name, first, last) for name, first, last in plan["units"][number])
    writers: dict[str, ShardWriter] = {}
    facts: dict[str, dict[str, Any]] = {part: {"characters": 0, "first_names": []} for part in PARTS}
    skipped = 0
    for document, row in tokenised(
        read_unit(source, config.read_options, unit), tokenizer, marks_of(config, tokenizer)
    ):
        if not len(row):
            skipped += 1
            continue
        part = "validation" if held_out(document) else "train"
        if part not in writers:
            writers[part] = ShardWriter(work / f"{part}-{number:05d}.array_record", dtype_of(tokenizer))
        writers[part].add(row)
        facts[part]["characters"] += len(document.text)
        if len(facts[part]["first_names"]) < 8:
            facts[part]["first_names"].append(document.name)
    empty = {"documents": 0, "tokens": 0, "files": {}}
    parts = {part: (writers[part].finish() if part in writers else empty) | facts[part] for part in PARTS}
    for path in work.iterdir():
        path.rename(folder / path.name)
    work.rmdir()
    made = {"unit": number, "skipped": skipped, "parts": parts}
    write_json(folder / f"unit-{number:05d}.json", made)
    return made


def finish(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Write dataset.json and the card of a data set whose units are all there. ValueError if they hold nothing."""
    units = [read_json(folder / f"unit-{number:05d}.json") for number in range(len(plan["units"]))]
    _refuse_empty(folder, plan, [unit for unit in units if unit is not None])
    parts = {}
    for part in PARTS:
        own = [unit["parts"][part] for unit in units if unit is not None]
        shards = [made for made in own if made["documents"]]
        parts[part] = {
            **{name: sum(made[name] for made in own) for name in ("documents", "tokens", "characters")},
            "first_names": [name for made in own for name in made["first_names"]][:8],
            "fingerprint": digest(repr((plan["dtype"], [_content(shard) for shard in shards])).encode()),
            "shards": [{name: shard[name] for name in ("documents", "tokens", "digest", "files")} for shard in shards],
        }
    facts = {name: plan[name] for name in ("source", "licence", "tokenizer", "tokenizer_fingerprint")}
    facts |= {"split": plan["options"]["split"], "skipped": sum(unit["skipped"] for unit in units if unit is not None)}
    dataset = {"version": VERSION, "plan": plan, "facts": facts, "parts": parts}
    (folder / CARD_NAME).write_text(dataset_card(dataset, folder), "utf-8")
    write_json(folder / DATASET_NAME, dataset)
    for left in folder.glob(".unit-*"):
        for path in left.iterdir():
            path.unlink()
        left.rmdir()
    return dataset


def _refuse_empty(folder: Path, plan: dict[str, Any], units: list[dict[str, Any]]) -> None:
    """ValueError if no unit has a document, after taking back what was written, so that the folder can be used."""
    if any(part["documents"] for unit in units for part in unit["parts"].values()):
        return
    for path in (folder / PLAN_NAME, *(folder / f"unit-{unit['unit']:05d}.json" for unit in units)):
        path.unlink()
    with suppress(OSError):  # it holds something else
        folder.rmdir()
    skipped = sum(unit["skipped"] for unit in units)
    what = f"all {skipped} documents of source {plan['source']} are empty" if skipped else ""
    raise ValueError(what or f"source {plan['source']} has no documents")


def _content(shard: dict[str, Any]) -> tuple[str, str]:
    """Checksums of tokens and of document lengths: what a shard says, however it is stored."""
    lengths = next(facts["blake2b"] for name, facts in shard["files"].items() if name.endswith(".lengths"))
    return shard["digest"], lengths


def dataset_card(dataset: dict[str, Any], folder: Path) -> str:
    """The card of a data set, as Markdown: what it was made of and how, and what is in it."""
    plan, options = dataset["plan"], dataset["plan"]["options"]
    lines = [
        f"# {folder.name}",
        "",
        f"Tokens of `{plan['source']}`, made by `python -m bampath.data.prepare --shards`; read with "
        f"`data.source={SHARDS}PATH`, where PATH is this folder's.",
        "",
        "| | |",
        "|---|---|",
        f"| licence of the text | {plan['licence'] or 'not known'} |",
        f"| tokenizer | {plan['tokenizer']} (fingerprint {plan['tokenizer_fingerprint']}) |",
        f"| stored as | {np.dtype(plan['dtype']).name}, ArrayRecord |",
        f"| held out | split={options['split']}, validation_fraction={options['validation_fraction']}, by document |",
        f"| marks | add_bos={options['add_bos']}, add_eos={options['add_eos']} |",
        f"| text files | {len({piece[0] for unit in plan['units'] for piece in unit}):,} |",
        f"| documents left out because they are empty | {dataset['facts']['skipped']:,} |",
        "",
        "| part | documents | tokens | characters | characters per token | tokens per document: median, 90 %, most "
        "| shards | GB | fingerprint |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for part, facts in dataset["parts"].items():
        lines.append(f"| {' | '.join([part, *_counts(facts, folder)])} |")
    lines += ["", "Checksums of every file are in `dataset.json`; `--check` compares them.", ""]
    return "\n".join(lines)


def _counts(facts: dict[str, Any], folder: Path) -> list[str]:
    names = [name for shard in facts["shards"] for name in shard["files"] if name.endswith(".lengths")]
    lengths = np.concatenate([np.zeros(0, "<u4"), *(np.fromfile(folder / name, "<u4") for name in names)])
    size = sum(file["bytes"] for shard in facts["shards"] for file in shard["files"].values())
    quantiles = ", ".join(f"{int(n):,}" for n in np.quantile(lengths, [0.5, 0.9, 1])) if len(lengths) else "–"
    return [
        *(f"{facts[name]:,}" for name in ("documents", "tokens", "characters")),
        f"{facts['characters'] / max(1, facts['tokens']):.2f}",
        quantiles,
        str(len(facts["shards"])),
        f"{size / 1e9:.3f}",
        facts["fingerprint"],
    ]
