"""One cell: a case, converted stage by stage and measured after each. A finished cell is never done twice."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from bampath.checkpoint import describe
from bampath.convert.distill import Plan, distill, plan
from bampath.convert.distill.run import config_of
from bampath.data import DataConfig, load_corpus, tokenizer_of
from bampath.evaluation.passkey import PasskeyTask, evaluate
from bampath.evaluation.perplexity import loss_by_position, rows_of
from bampath.evaluation.reader import ModelReader
from bampath.evaluation.results import write_json
from bampath.load import Loaded, load
from bampath.metrics import read as read_metrics
from bampath.overrides import split_overrides
from experiments.conversion.config import Case, Study

Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """What all cells share: the study, where it is, the teacher's checkpoint, and the words of the text."""

    study: Study
    out: Path
    teacher: Path
    text: tuple[str, ...]
    keep: bool = False

    @property
    def context(self) -> int:
        """Tokens that the teacher was trained at."""
        return int(describe(self.teacher).config["model"]["train_length"])

    def folder(self, case: Case) -> Path:
        return self.out / "cells" / case.slug

    def words(self, case: Case) -> list[str]:
        """The words of a case's distillation. What is only continued trains at stage 3's rate from the beginning: the
        rates of stages 1 and 2 are for parameters that are new."""
        given = (*self.study.words, *case.words, *self.text, f"position={case.position}")
        words = dict(split_overrides(given, {}))
        if case.plain:
            words = {
                key: value for key, value in words.items() if not key.endswith((".rest", ".temperature", ".error"))
            }
            words |= {"stage1.kind": "text", "stage2.kind": "text"}
            words |= {f"{stage}.lr": words["stage3.lr"] for stage in ("stage1", "stage2")}
        return [f"{key}={value}" for key, value in words.items()]

    def identity(self, case: Case) -> dict[str, Any]:
        """What a finished cell must have been asked to be taken for this one."""
        asked = {"study": asdict(self.study), "case": asdict(case), "text": self.text, "teacher": str(self.teacher)}
        return cast(dict[str, Any], json.loads(json.dumps(asked)))


def rows_so_far(bench: Bench, case: Case) -> tuple[list[Row], bool]:
    """The rows of a cell, and whether it is done. ValueError if what is there was asked something else."""
    path = bench.folder(case) / "rows.json"
    if not path.exists():
        return [], False
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["identity"] != bench.identity(case):
        raise ValueError(f"{path.parent} is a cell with other options; choose another --out")
    return cast(list[Row], kept["rows"]), kept["done"]


def check(bench: Bench, case: Case) -> Plan | None:
    """The plan of a case, checked; None for one that is only measured."""
    return plan(bench.teacher, bench.words(case)) if case.trained else None


def run_cell(bench: Bench, case: Case, say: Say, ready: Callable[[], object] = lambda: None) -> None:
    """Convert and measure, or go on where that stopped; the weights are removed afterwards unless they are to stay.

    ready: called when the rows of one more stage are written.
    """
    folder, found = bench.folder(case), check(bench, case)
    folder.mkdir(parents=True, exist_ok=True)

    def keep(rows: list[Row], done: bool) -> None:
        write_json(folder / "rows.json", {"identity": bench.identity(case), "done": done, "rows": rows})
        ready()

    if found is None:
        keep(measured(bench, case, "untrained", bench.teacher, say), True)
    else:
        keep(_convert(bench, case, found, say, lambda rows: keep(rows, False)), True)
    if not bench.keep:
        shutil.rmtree(folder / "run", ignore_errors=True)


def _convert(bench: Bench, case: Case, found: Plan, say: Say, keep: Callable[[list[Row]], None]) -> list[Row]:
    folder, rows, begun = bench.folder(case), list[Row](), [time.monotonic()]

    def after(name: str, run: Path) -> None:
        took = time.monotonic() - begun[0]
        if name != "start":
            rows.append(training_row(case, name, run, took))
        if name != "start" or not case.plain:  # what is only continued starts as the teacher
            rows.extend(measured(bench, case, name, run, say))
            keep(rows)
        begun[0] = time.monotonic()

    with (folder / "training.log").open("a", encoding="utf-8") as log:
        distill(found, folder / "run", resume=(folder / "run").exists(), after=after, say=lambda _: None, log=log)
    return rows


def measured(bench: Bench, case: Case, after: str, run: Path, say: Say) -> list[Row]:
    """Perplexity and passkeys of a model, kept in a file of their own as soon as they are there."""
    kept = bench.folder(case) / f"measured-{after}.json"
    if kept.exists():
        return cast(list[Row], json.loads(kept.read_text(encoding="utf-8")))
    start, rows = time.monotonic(), list[Row]()
    words = dict(split_overrides(bench.study.words, {}))
    changes: dict[str, Any] = {"position": case.position}
    changes |= {key: words[f"model.{key}"] for key in ("dtype", "attention_impl") if f"model.{key}" in words}
    changes |= {"scan": True} if words.get("model.scan") == "true" else {}
    loaded = load(run, **changes)
    facts = {"case": case.name, "position": case.position, "after": after, "seed": 0}
    rows += _measure(bench, loaded, facts)
    seconds = round(time.monotonic() - start, 1)
    write_json(kept, [{**row, "measured_in": seconds} for row in rows])
    say(f"{case.name} after {after}: {summary(rows)}; {seconds:.0f} s")
    return cast(list[Row], json.loads(kept.read_text(encoding="utf-8")))


def _measure(bench: Bench, loaded: Loaded, facts: Row) -> list[Row]:
    study, context = bench.study, bench.context
    longest = max(study.multiples) * context
    reader = ModelReader(loaded.model, loaded.params, chunk=2 * longest)  # a prompt may be a few tokens longer
    losses = loss_by_position(reader, held_out_rows(bench), context, batch_tokens=study.batch_tokens)
    lengths = [times * context for times in study.multiples]
    keys = evaluate(
        reader, loaded.tokenizer, lengths, PasskeyTask(samples=study.samples), batch_tokens=study.batch_tokens
    )
    return [*losses.rows(**facts), *(found.row(**facts) for found in keys)]


@cache
def held_out_rows(bench: Bench) -> np.ndarray:
    """Rows of the held-out text, as long as the longest length that is asked for: beginnings of documents where some
    are that long, otherwise pieces of all documents in a row. ValueError if there is not even one."""
    longest = max(bench.study.multiples) * bench.context
    data = config_of(describe(bench.teacher)).data
    corpus = load_corpus(held_out_data(data, bench.text), "validation", tokenizer_of(data))
    enough = any(len(corpus.document(i)) > longest for i in range(corpus.documents))
    return rows_of(corpus, longest, "documents" if enough else "across", limit=bench.study.rows)


def prepare(bench: Bench) -> int:
    """Tokenise the text and the held-out text into the token cache; the number of tokens to train on."""
    data = config_of(describe(bench.teacher)).data
    held_out_rows(bench)
    return len(load_corpus(held_out_data(data, bench.text), "train", tokenizer_of(data)).tokens)


def held_out_data(data: DataConfig, words: Sequence[str]) -> DataConfig:
    """The data options of a teacher with the study's text."""
    changes: dict[str, Any] = {key.removeprefix("data."): text for key, text in split_overrides(words, {})}
    return replace(data, **changes, add_eos=False)


def training_row(case: Case, stage: str, run: Path, took: float) -> Row:
    """The curve of a stage, its tokens, and how fast it went; per layer the last errors where there are any."""
    records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    rates = sorted(r["tokens_per_second"] for r in records if "tokens_per_second" in r)
    last = records[-1]
    return {
        "benchmark": "training",
        "case": case.name,
        "position": case.position,
        "after": stage,
        "seed": 0,
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": round(last["elapsed"], 1),
        "seconds_with_loading": round(took, 1),
        "tokens_per_second": rates[len(rates) // 2] if rates else None,
        "curve": {"step": [r["step"] for r in records], "loss": [round(r["loss"], 6) for r in records]},
        "layers": [round(value, 6) for name, value in sorted(last.items()) if name.endswith("/relative")],
    }


def summary(rows: list[Row]) -> str:
    """One line for a person."""
    loss = [f"{row['perplexity']:.2f}" for row in rows if row["benchmark"] == "perplexity"]
    keys = [f"{row['correct']}/{row['samples']}" for row in rows if row["benchmark"] == "passkey"]
    return f"perplexity by window {' '.join(loss)}, passkeys {' '.join(keys)}"
