"""Answerers that need no model: one that reads the prompt as a person would, one that guesses; and their material."""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bampath.evaluation.materials import Names, Prose, WordLists
from bampath.evaluation.ruler.documents import Asked, Library
from bampath.evaluation.ruler.tasks import Material

NOUNS = ("apple", "bridge", "castle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket")
ADJECTIVES = ("brave", "calm", "dark", "eager", "famous", "gentle", "happy", "icy", "jolly", "kind")
VERBS = tuple(f"{a}{b}" for a in ("re", "un", "over", "out", "mis") for b in ("act", "do", "go", "run", "see", "say"))
PROSE = Prose(
    "test",
    tuple(
        " ".join(
            f"The {noun} of the {adjective} captain number {i} stood near the old mill and waited."
            for i, (noun, adjective) in enumerate(zip(NOUNS, ADJECTIVES, strict=True))
        )
        for _ in range(2)
    ),
)
WORDS = WordLists("test", NOUNS, ADJECTIVES, VERBS)
LIBRARY = Library(
    "test.json",
    tuple(f"In the town number {i} the mayor is called Mayor{i:02d}x." for i in range(40)),
    tuple(Asked(f"Who is the mayor of town number {i}?", (f"Mayor{i:02d}x", f"mr {i:02d}"), (i,)) for i in range(20)),
)
MATERIAL = Material(WORDS, PROSE, LIBRARY, LIBRARY)
PEOPLE = Names(
    "test",
    tuple(f"First{c}" for c in "abcdefghij"),
    np.full(10, 0.1),
    tuple(f"Last{c}{d}" for c in "abcdefghij" for d in "klmnopqrst"),
    np.full(100, 0.01),
)


class TextAnswerer:
    """Answers with `reply(prompt text)`; the tokens of a prompt are decoded, so what was cut off is not there."""

    def __init__(self, tokenizer, reply: Callable[[str], str]) -> None:
        self.tokenizer, self.reply = tokenizer, reply

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int, stop) -> list[list[int]]:
        return [self.tokenizer.encode(self.reply(self.tokenizer.decode(p)))[:new_tokens] for p in prompts]


def read_ruler(prompt: str) -> str:
    """The answer to any RULER prompt, from its text alone."""
    if "special magic" in prompt:
        asked = re.search(r"What (?:is|are all) the special magic \w+ for (.*?) mentioned", prompt)[1]
        found = []
        for key in asked.replace(", and ", ", ").split(", "):
            found += re.findall(rf"One of the special magic \w+ for {re.escape(key)} is: (\S+?)\.(?=\s)", prompt)
        return " " + ", ".join(found)
    if "variable assignment" in prompt:
        text = prompt[prompt.rindex("Memorize and track") :]
        holders = re.findall(rf"VAR (\w+) = {re.search(r'value (.*?) in the text', text)[1]}\n", text)
        for name in holders:
            holders += re.findall(rf"VAR (\w+) = VAR {name}\b", text)
        return " ".join(holders)
    if "numbered list of words" in prompt:
        text = prompt[prompt.rindex("Below is") : prompt.rindex("Question:")]
        common = Counter(re.findall(r"\d+\. (\S+)", text)).most_common(10)
        return " " + " ".join(f"{i}. {word}" for i, (word, _) in enumerate(common, 1))
    if "coded text" in prompt:
        text = prompt[prompt.index("coded words. ") + 13 : prompt.index("\nQuestion:")]
        common = [word for word, _ in Counter(text.split()).most_common() if word != "..."]
        return " " + " ".join(common[:3])
    town = re.search(r"Question: Who is the mayor of town number (\d+)\?", prompt)[1]
    return re.search(rf"town number {town} the mayor is called (\w+)\.", prompt)[1]


def read_places(prompt: str) -> str:
    """The answer to a prompt of bAbI's first task: where somebody went last."""
    context = prompt[prompt.index("<context>") :]
    person = re.search(r"Question: Where is (\w+)\?", context)[1]
    place = re.findall(rf"{person} (?:went|moved|travelled|journeyed)(?: back)? to the (\w+)", context)[-1]
    return f"\nAnswer: The most recent location of {person} is {place}. And more."


def read_phonebook(prompt: str) -> str:
    """The number behind the last name; the first line that has it."""
    name = prompt[prompt.rindex("\n") + 1 : -1]
    return " " + re.search(rf"^{name}: (\d+)$", prompt, re.MULTILINE)[1] + "\nSomebody Else: 7"


def guesser(choices: Sequence[str], seed: int = 0) -> Callable[[str], str]:
    """Answers with one of `choices` at random, whatever the prompt."""
    draw = random.Random(seed)
    return lambda prompt: draw.choice(choices)


def write_words(folder: Path) -> Path:
    """The word lists as files."""
    folder.mkdir(exist_ok=True)
    for name, words in (("noun", NOUNS), ("adjective", ADJECTIVES), ("verb", VERBS)):
        (folder / f"{name}list.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return folder


BABI = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Daniel went back to the hallway.
5 Sandra moved to the garden.
6 Where is Daniel? \thallway\t4
1 Sandra travelled to the office.
2 Sandra went to the kitchen.
3 Where is Sandra? \tkitchen\t2
1 John journeyed to the garden.
2 Mary went to the bedroom.
3 John moved to the office.
4 Where is John? \toffice\t3
"""


def write_babi(folder: Path) -> Path:
    """A file of bAbI's first task."""
    folder.mkdir(exist_ok=True)
    (folder / "qa1_single-supporting-fact_train.txt").write_text(BABI, encoding="utf-8")
    return folder


def write_names(folder: Path) -> Path:
    """Name lists in the census form."""
    folder.mkdir(exist_ok=True)
    (folder / "dist.female.first").write_text("MARY 2.5 2.5 1\nLINDA 1.5 4.0 2\n", encoding="utf-8")
    (folder / "dist.male.first").write_text("JAMES 3 3 1\nJOHN 1 4 2\n", encoding="utf-8")
    (folder / "dist.all.last").write_text("SMITH 1.0 1 1\nJONES 0.6 1.6 2\nBROWN 0.4 2 3\n", encoding="utf-8")
    return folder
