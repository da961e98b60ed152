"""Variable tracking: which names hold a value, through a chain of assignments hidden in noise."""

import random
import string
from itertools import pairwise

from bampath.evaluation.materials import NOISE
from bampath.evaluation.questions import Question, depth_of

TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assigned the value {query}, they are: "
)
HOPS = 4
SHOT_TOKENS = 500


def make(size: int, draw: random.Random, shot: int) -> Question:
    """A prompt with `size` noise items behind a solved example with `shot` of them (names of three letters)."""
    example, names, _ = _problem(shot, draw, 3)
    prompt, variables, chain = _problem(size, draw, 5)
    whole = f"{example} {' '.join(names)}\n\n{prompt}"
    return Question(whole, tuple(variables), depth_of(whole, chain[0]))


def example(size: int, draw: random.Random) -> str:
    """The solved example by itself, to find how many noise items SHOT_TOKENS tokens hold."""
    prompt, names, _ = _problem(size, draw, 3)
    return f"{prompt} {' '.join(names)}\n"


def _problem(size: int, draw: random.Random, letters: int) -> tuple[str, list[str], list[str]]:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(draw.choices(string.ascii_uppercase, k=letters))
        names += [name] * (name not in names)
    value = draw.randint(10_000, 99_998)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {after} = VAR {before} " for before, after in pairwise(names)]
    items = [NOISE] * size
    for later, (place, line) in enumerate(zip(sorted(draw.sample(range(size), len(chain))), chain, strict=True)):
        items.insert(place + later, line)
    context = "\n".join(items).replace(". \n", ".\n")
    return TEMPLATE.format(context=context, query=value, count=len(names)), names, chain
