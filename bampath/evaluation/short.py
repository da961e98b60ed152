"""Short-context tasks by lm-evaluation-harness: `python -m bampath.evaluation.short CHECKPOINT --tasks piqa arc_easy`.

Tasks and scores are the harness's own (package lm_eval, an optional extra); `bampath.evaluation.harness` lets it ask a
checkpoint. Without network, --data piqa=validation:piqa.jsonl runs a task of the harness on a local file (with
--offline, so that nothing is looked for on the hub), and --include-path names a folder of task files of your own.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from bampath.evaluation.session import Session, command

NAME = "short"
LENGTHS = "1x"  # rows have the length of their text
SAMPLES = 0  # all
# What the papers report, with the metric that they take (PaTH, table 2; FoX, table 1).
PAPER = ("wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help=f"of the harness (default: {' '.join(PAPER)})")
    parser.add_argument("--data", nargs="+", default=[], metavar="TASK=SPLIT:FILE", help="tasks on local JSON lines")
    parser.add_argument("--include-path", metavar="FOLDER", help="task files beside the harness's own")
    parser.add_argument(
        "--metadata", default="{}", metavar="JSON", help='for tasks that ask: {"max_seq_lengths": [4096]}'
    )
    parser.add_argument("--num-fewshot", type=int, help="solved examples per question (default: the task's)")
    parser.add_argument("--max-length", type=int, default=0, help="cut contexts to so many tokens (default: never)")
    parser.add_argument("--offline", action="store_true", help="never ask the hub")


def missing(args: argparse.Namespace) -> str | None:
    if importlib.util.find_spec("lm_eval") is None:
        return "needs lm-evaluation-harness: pip install 'lm_eval>=0.4.13,<0.5'"
    return None


def run(session: Session, args: argparse.Namespace) -> None:
    metadata = metadata_of(args.metadata)
    if args.offline:  # before the harness and what it uses are imported
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            os.environ[name] = "1"
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from bampath.evaluation.harness import HarnessModel

    model = HarnessModel(
        session.reader,
        session.answerer,
        session.tokenizer,
        bos=session.bos,
        window=session.train_length,
        max_length=args.max_length,
        batch_tokens=session.batch_tokens,
    )
    found = simple_evaluate(
        model=model,
        tasks=tasks_of(args.tasks, args.data),
        num_fewshot=args.num_fewshot,
        limit=session.samples or None,
        task_manager=TaskManager(include_path=args.include_path, metadata=metadata),
        bootstrap_iters=1000,
        random_seed=session.seed,
    )
    session.add(*rows_of(found, model.counts))


def tasks_of(names: Sequence[str] | None, data: Sequence[str]) -> list[Any]:
    """What `simple_evaluate` is given: names, and one group of tasks with local files (only in a group does the harness
    merge changes with its own definition)."""
    local = [local_task(entry) for entry in data]
    listed = list(names or (() if local else PAPER))
    return listed + ([{"group": "local", "task": local}] if local else [])


def metadata_of(text: str) -> dict[str, Any]:
    """The JSON object that tasks such as the harness's ruler read their lengths and tokenizer from."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--metadata {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--metadata {text!r} is not a JSON object")
    return found


def local_task(entry: str) -> dict[str, Any]:
    """The changes of TASK=SPLIT:FILE: the task reads one split from a file of JSON lines and has no other."""
    task, equals, rest = entry.partition("=")
    split, colon, file = rest.partition(":")
    if not (task and equals and colon and split in ("validation", "test")):
        raise ValueError(f"--data {entry!r} is not TASK=validation:FILE or TASK=test:FILE")
    if not Path(file).exists():
        raise FileNotFoundError(f"--data {entry!r}: there is no file {file}")
    absent = {"training_split": None, "fewshot_split": None, "validation_split": None, "test_split": None}
    source = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {split: file}}}
    return {"task": task, **absent, **source, f"{split}_split": split}


def rows_of(found: dict[str, Any], counts: dict[str, int]) -> list[dict[str, Any]]:
    """One row per task and metric of the harness's results."""
    rows = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            row = {"benchmark": NAME, "task": task, "metric": metric, "filter": filtered, "value": float(value)}
            row |= {"stderr": float(error) if isinstance(error, int | float) else None}
            row |= {"samples": found.get("n-samples", {}).get(task, {}).get("effective"), **counts}
            row |= {"fewshot": found.get("n-shot", {}).get(task), "version": found.get("versions", {}).get(task)}
            rows.append(row)
    return rows


_SELF: Any = sys.modules[__name__]


def main(argv: Sequence[str] | None = None) -> None:
    command(_SELF, __doc__, argv)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
