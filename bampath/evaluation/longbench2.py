"""LongBench v2 (Bai et al., arXiv 2412.15204) on a local file: `python -m bampath.evaluation.longbench2 CHECKPOINT`.

Four-way questions over 8k to 2M words. Mode "generate" is the published protocol (128 tokens, the letter is searched in
the answer); mode "likelihood", the default, is for base models: the prompt ends with "Answer:" and the likeliest of the
four letters counts. Prompts that are too long keep the first and the last half of the tokens that fit.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bampath.command import fail_gracefully
from bampath.data import Tokenizer
from bampath.evaluation.answers import Answered, ask, row
from bampath.evaluation.likelihood import Pair, likelihoods
from bampath.evaluation.longbench_e import fit
from bampath.evaluation.questions import Question
from bampath.evaluation.session import Session, command

NAME = "longbench2"
LENGTHS = "131072"
SAMPLES = 0  # all
NEW_TOKENS = 128
LETTERS = ("A", "B", "C", "D")
FIELDS = ("question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context", "difficulty", "length")
TEXT = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\n"
    "Choices:\n(A) {choice_A}\n(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\n"
)
ENDS = {
    "generate": 'Format your response as follows: "The correct answer is (insert answer here)".',
    "likelihood": "Answer:",
}


def read(path: Path) -> list[dict[str, str]]:
    """The records of a JSON list or of JSON lines. ValueError for one that lacks a field or has another answer."""
    text = path.read_text(encoding="utf-8")
    records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    for number, record in enumerate(records, 1):
        lacking = [name for name in FIELDS if name not in record]
        if lacking or record["answer"] not in LETTERS:
            wrong = f"no field {lacking[0]!r}" if lacking else f"the answer {record['answer']!r}"
            raise ValueError(f"{path}, record {number} has {wrong}")
    return records


def make(
    records: Sequence[dict[str, str]], mode: str, tokenizer: Tokenizer, length: int, reserve: int = 0
) -> list[Question]:
    """One Question per record, its prompt cut so that the answer still fits in `length` tokens."""
    new = NEW_TOKENS if mode == "generate" else 1
    found = []
    for record in records:
        fields = {name: record[name].strip() for name in FIELDS}
        prompt, cut = fit(TEXT.format(**fields) + ENDS[mode], tokenizer, length - new - reserve)
        facts = {"difficulty": record["difficulty"], "span": record["length"], "cut": cut}
        found.append(Question(prompt, (record["answer"],), None, tuple(facts.items())))
    return found


def extract(answer: str) -> str | None:
    """The letter of an answer as published: after "The correct answer is", in parentheses or without; else None."""
    bare = answer.replace("*", "")
    match = re.search(r"The correct answer is \(([A-D])\)", bare) or re.search(r"The correct answer is ([A-D])", bare)
    return match[1] if match else None


def score(answer: str, question: Question) -> float:
    """1 for the right letter, else 0."""
    return float(extract(answer) == question.references[0])


def by_likelihood(session: Session, questions: Sequence[Question]) -> list[Answered]:
    """The likeliest of " A" … " D" behind each prompt. ValueError if a tokenizer joins letter and space otherwise."""
    front = [session.tokenizer.bos_id] if session.bos and session.tokenizer.bos_id is not None else []
    letters = [tuple(session.tokenizer.encode(f" {letter}")) for letter in LETTERS]
    if len({len(ids) for ids in letters}) > 1:
        raise ValueError(f"the tokenizer {session.tokenizer.name} gives the letters A to D different numbers of tokens")
    prompts = [(*front, *session.tokenizer.encode(question.prompt)) for question in questions]
    pairs = [Pair(prompt, ids) for prompt in prompts for ids in letters]
    found = np.array([l.log_probability for l in likelihoods(session.reader, pairs, session.batch_tokens)])
    answers = [LETTERS[i] for i in found.reshape(-1, 4).argmax(axis=1)]
    return [
        Answered(question, len(prompt), answer, float(answer == question.references[0]))
        for question, prompt, answer in zip(questions, prompts, answers, strict=True)
    ]


def groups(answered: Sequence[Answered]) -> dict[str, list[Answered]]:
    """The published breakdown: Overall, Easy, Hard, Short, Medium, Long; groups without a sample are left out."""
    fact = lambda a, name: str(dict(a.question.facts)[name]).lower()
    found = {"Overall": list(answered)}
    for name, values in (("difficulty", ("easy", "hard")), ("span", ("short", "medium", "long"))):
        found |= {value.capitalize(): [a for a in answered if fact(a, name) == value] for value in values}
    return {name: part for name, part in found.items() if part}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--longbench2", metavar="FILE", help="LongBench v2's data as JSON or JSON lines")
    parser.add_argument("--longbench2-mode", choices=tuple(ENDS), default="likelihood", help="default likelihood")


def missing(args: argparse.Namespace) -> str | None:
    return None if args.longbench2 else "needs --longbench2 FILE, a local copy of its data"


def run(session: Session, args: argparse.Namespace) -> None:
    mode, path = args.longbench2_mode, Path(args.longbench2)
    records = read(path)[: session.samples or None]
    labels = {"mode": mode, "file": path.name}
    for length in session.lengths:
        with session.unless_unfit(NAME, length):
            found = groups(_answered(session, records, mode, length))
            session.add(*(row(a, benchmark=NAME, task=n, length=length, **labels) for n, a in found.items()))


def _answered(session: Session, records: Sequence[dict[str, str]], mode: str, length: int) -> list[Answered]:
    questions = make(records, mode, session.tokenizer, length, session.reserve)
    if mode == "likelihood":
        return by_likelihood(session, questions)
    return ask(session.answerer, session.tokenizer, questions, NEW_TOKENS, score, budget=length, bos=session.bos)[0]


_SELF: Any = sys.modules[__name__]


def main(argv: Sequence[str] | None = None) -> None:
    command(_SELF, __doc__, argv)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
