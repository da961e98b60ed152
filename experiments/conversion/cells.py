"""One cell: a case, converted stage by stage and measured after each. A finished cell is never done twice."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from bampath.checkpoint import describe, latest
from bampath.convert.distill import Plan, distill, plan, stages_of
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
from experiments.studies import read_kept

Row = dict[str, Any]
Say = Callable[[str], None]
Ready = Callable[[], object]
Part = Literal["all", "train", "measure"]


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


def points(bench: Bench, case: Case) -> list[tuple[str, Path]]:
    """What is measured of a case, in order: the name of the moment, and the run."""
    if not case.trained:
        return [("untrained", bench.teacher)]
    stages = stages_of(config_of(describe(bench.teacher)), bench.words(case))
    start = () if case.plain else ("start",)  # what is only continued starts as the teacher
    return [(name, bench.folder(case) / "run" / name) for name in (*start, *(stage.name for stage in stages))]


def rows_so_far(bench: Bench, case: Case) -> tuple[list[Row], bool]:
    """The rows of a cell, and whether it is done. ValueError if what is there was asked something else."""
    folder, rows, done = bench.folder(case), list[Row](), True
    if not (folder / "cell.json").exists():
        return [], False
    if read_kept(folder / "cell.json") != bench.identity(case):
        raise ValueError(f"{folder} is a cell with other options; choose another --out")
    for name, _ in points(bench, case):
        for kind in ("trained", "measured") if name.startswith("stage") else ("measured",):
            path = folder / f"{kind}-{name}.json"
            rows += read_kept(path) if path.exists() else []
            done = done and path.exists()
    return rows, done


def check(bench: Bench, case: Case) -> Plan | None:
    """The plan of a case, checked; None for one that is only measured."""
    return plan(bench.teacher, bench.words(case)) if case.trained else None


def run_cell(
    bench: Bench, case: Case, say: Say, ready: Ready = lambda: None, part: Part = "all", until: float | None = None
) -> None:
    """Convert and measure, or go on where that stopped; the weights are removed afterwards unless they are to stay.

    ready: called when there are more rows. part: "train" leaves the measuring to another process, "measure" is that
    process; it waits for what is still to be trained until the monotonic time `until`, by default not at all.
    """
    folder, found = bench.folder(case), check(bench, case)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "cell.json", bench.identity(case))
    if found is not None and part != "measure":
        _convert(bench, case, found, say, ready, part == "all")
    elif part != "train":
        for name, run in points(bench, case):
            if not _wait(folder, name, run, until):
                break
            measured(bench, case, name, run, say)
            ready()
    if rows_so_far(bench, case)[1] and not bench.keep:
        shutil.rmtree(folder / "run", ignore_errors=True)


def _convert(bench: Bench, case: Case, found: Plan, say: Say, ready: Ready, measure: bool) -> None:
    folder, begun = bench.folder(case), [time.monotonic()]
    wanted = dict(points(bench, case))

    def after(name: str, run: Path) -> None:
        took, kept = time.monotonic() - begun[0], folder / f"trained-{name}.json"
        if name != "start" and not kept.exists():
            write_json(kept, [training_row(case, name, run, took)])
            say(f"{case.name}: {name} trained, {took:.0f} s")
        if measure and name in wanted:
            measured(bench, case, name, run, say)
        ready()
        begun[0] = time.monotonic()

    with (folder / "training.log").open("a", encoding="utf-8") as log:
        distill(found, folder / "run", resume=(folder / "run").exists(), after=after, say=lambda _: None, log=log)


def _wait(folder: Path, name: str, run: Path, until: float | None) -> bool:
    """Whether a point can be measured, or has been, after waiting for it."""

    def there() -> bool:
        if name.startswith("stage"):
            return (folder / f"trained-{name}.json").exists()
        return (folder / f"measured-{name}.json").exists() or latest(run, lambda _: None) is not None

    while not there():
        if until is None or time.monotonic() > until:
            return False
        time.sleep(1)
    return True


def measured(bench: Bench, case: Case, after: str, run: Path, say: Say) -> None:
    """Perplexity and passkeys of a model, in a file of their own."""
    kept = bench.folder(case) / f"measured-{after}.json"
    if kept.exists():
        return
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
