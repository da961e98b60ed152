"""LongBench-E (Bai et al., arXiv 2308.14508) on local files: `python -m bampath.evaluation.longbench_e CHECKPOINT`.

Thirteen English tasks whose samples spread evenly over lengths; prompts, answer lengths and scorers are those of
THUDM/LongBench (MIT). Prompts that are too long lose their middle.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from bampath.data import Tokenizer
from bampath.evaluation import longbench_scores as scores
from bampath.evaluation.answers import ask, row, speed
from bampath.evaluation.questions import DoesNotFit, Question
from bampath.evaluation.session import Session, command

NAME = "longbench_e"
LENGTHS = "16384"
SAMPLES = 0  # all
BUCKETS = ((0, 4000, "0-4k"), (4000, 8000, "4-8k"), (8000, 1 << 60, "8k+"))  # by words, as the files state them


@dataclass(frozen=True)
class Task:
    """Prompt template, new tokens, scorer; first_line: only the answer's first line counts."""

    template: str
    new_tokens: int
    scorer: Callable[[str, str, Sequence[str]], float]
    first_line: bool = False


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other "
    "words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only "
    "give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_BRIEFLY = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
TASKS = {
    "qasper": Task(
        f"You are given a scientific article and a question. Answer the question {_BRIEFLY}\n\nArticle: "
        f"{{context}}\n\n Answer the question based on the above article {_BRIEFLY}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        scores.question_answering,
    ),
    "multifieldqa_en": Task(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        scores.question_answering,
    ),
    "hotpotqa": Task(_PASSAGES, 32, scores.question_answering),
    "2wikimqa": Task(_PASSAGES, 32, scores.question_answering),
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        scores.summary,
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, "
        "write a one-page summary of all the news.\n\nSummary:",
        512,
        scores.summary,
    ),
    "trec": Task(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        scores.classification,
        first_line=True,
    ),
    "triviaqa": Task(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        scores.question_answering,
        first_line=True,
    ),
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        scores.summary,
        first_line=True,
    ),
    "passage_count": Task(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count "
        "of unique paragraphs after removing duplicates. The output format should only contain the number, such as "
        "1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        scores.count,
    ),
    "passage_retrieval_en": Task(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number "
        'of the paragraph that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.'
        "\n\nThe answer is: ",
        32,
        scores.retrieval,
    ),
    "lcc": Task("Please complete the code given below. \n{context}Next line of code:\n", 64, scores.code),
    "repobench-p": Task(
        "Please complete the code given below. \n{context}{input}Next line of code:\n", 64, scores.code
    ),
}


def read(folder: Path, task: str) -> list[dict[str, Any]]:
    """Records of FOLDER/TASK_e.jsonl (or TASK.jsonl): input, context, answers, length, all_classes.

    FileNotFoundError without one; ValueError, with the line, for a record that lacks a field.
    """
    path = next((p for p in (folder / f"{task}_e.jsonl", folder / f"{task}.jsonl") if p.exists()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {task}_e.jsonl")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = json.loads(line)
        lacking = [name for name in ("input", "context", "answers", "length") if name not in record]
        if lacking:
            raise ValueError(f"{path}, line {number} has no field {lacking[0]!r}")
        records.append(record)
    return records


def fit(text: str, tokenizer: Tokenizer, limit: int) -> tuple[str, bool]:
    """The text, without its middle if it has more than `limit` tokens, and whether it was cut.

    DoesNotFit for a limit below 2.
    """
    tokens = tokenizer.encode(text)
    if limit < 2:
        raise DoesNotFit(f"the length leaves {limit} tokens for the prompt; use a longer one")
    kept, room = text, limit
    while len(tokens) > limit:  # joined halves may be tokenised into a few more
        half = room // 2
        kept = tokenizer.decode(tokens[:half]) + tokenizer.decode(tokens[len(tokens) - half :])
        over = len(tokenizer.encode(kept)) - limit
        if over <= 0:
            return kept, True
        room -= over
    return kept, False


def make(
    task: str, records: Iterable[dict[str, Any]], tokenizer: Tokenizer, length: int, reserve: int = 0
) -> list[Question]:
    """One Question per record; prompt and new tokens have at most length - reserve tokens together."""
    own, found = TASKS[task], []
    for record in records:
        text = own.template.format(context=record["context"], input=record["input"])
        prompt, cut = fit(text, tokenizer, length - own.new_tokens - reserve)
        facts = {"words": record["length"], "classes": record.get("all_classes") or [], "cut": cut, "task": task}
        found.append(Question(prompt, tuple(record["answers"]), None, tuple(facts.items())))
    return found


def score(answer: str, question: Question) -> float:
    """The best score against any answer."""
    facts = dict(question.facts)
    own = TASKS[facts["task"]]
    text = answer.lstrip("\n").split("\n")[0] if own.first_line else answer
    return scores.best(own.scorer, text, question.references, facts["classes"])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--longbench-e", metavar="FOLDER", help="LongBench's files: qasper_e.jsonl and so on")
    parser.add_argument("--longbench-e-tasks", nargs="+", choices=tuple(TASKS), metavar="TASK")


def missing(args: argparse.Namespace) -> str | None:
    return None if args.longbench_e else "needs --longbench-e FOLDER, a local copy of LongBench's files"


def run(session: Session, args: argparse.Namespace) -> None:
    for task in args.longbench_e_tasks or TASKS:
        records = read(Path(args.longbench_e), task)[: session.samples or None]
        for length in session.lengths:
            with session.unless_unfit(f"{NAME} {task}", length):
                _add(session, task, length, make(task, records, session.tokenizer, length, session.reserve))


def _add(session: Session, task: str, length: int, questions: Sequence[Question]) -> None:
    """Rows of all samples and of each bucket of lengths that has some."""
    own = TASKS[task]
    answered, seconds = ask(
        session.answerer, session.tokenizer, questions, own.new_tokens, score, budget=length, bos=session.bos
    )
    cut = sum(dict(a.question.facts)["cut"] for a in answered)
    for low, high, name in BUCKETS:
        part = [a for a in answered if low <= dict(a.question.facts)["words"] < high]
        if part:
            session.add(row(part, benchmark=NAME, task=f"{task} {name}", length=length, cut=cut))
    session.add(row(answered, benchmark=NAME, task=task, length=length, cut=cut, **speed(answered, seconds)))


_SELF: Any = sys.modules[__name__]


def main(argv: Sequence[str] | None = None) -> None:
    command(_SELF, __doc__, argv)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
