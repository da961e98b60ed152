"""RULER's three single-needle tasks as prompts with their answers behind them, scored as passkeys are.

RULER generates 128 tokens and looks for the answer in them. Here one forward over prompt and answer decides whether
greedy decoding would begin with the answer: every token of it must be the most likely one (the space before it is
given). That is stricter than RULER's rule, needs no decoding, and is the same for all schemes.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bampath.data import TokenCorpus, Tokenizer
from bampath.evaluation.materials import Prose, word_lists
from bampath.evaluation.passkey import Prompt
from bampath.evaluation.results import write_json
from bampath.evaluation.ruler.tasks import Material, make

TASKS = ("niah_single_1", "niah_single_2", "niah_single_3")
ESSAY_DOCUMENTS = 4


def material_of(held_out: TokenCorpus, tokenizer: Tokenizer, words: Path | None) -> Material:
    """Needles are put into held-out text; words: folder of RULER's word lists (None: the package wonderwords)."""
    texts = [tokenizer.decode(held_out.document(i).tolist()) for i in range(min(ESSAY_DOCUMENTS, held_out.documents))]
    return Material(word_lists(None if words is None else str(words)), Prose(held_out.info["source"], tuple(texts)))


def write(tokenizer: Tokenizer, material: Material, lengths: Sequence[int], samples: int, out: Path) -> None:
    """Make the questions of all tasks and lengths and keep them in the file `out`, unless it is there."""
    if not out.exists():
        made = {
            task: {str(length): _questions(task, length, samples, tokenizer, material) for length in lengths}
            for task in TASKS
        }
        write_json(out, made)


def read(path: Path, tokenizer: Tokenizer) -> dict[str, dict[int, list[Prompt]]]:
    """{task: {length: prompts}} of a file of `write`."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {
        task: {int(length): [_prompt(tokenizer, *pair) for pair in pairs] for length, pairs in by_length.items()}
        for task, by_length in kept.items()
    }


def _questions(
    task: str, length: int, samples: int, tokenizer: Tokenizer, material: Material
) -> list[tuple[str, str, float]]:
    questions = make(task, length, samples, tokenizer, material)
    return [(question.prompt, question.references[0], question.depth or 0.0) for question in questions]


def _prompt(tokenizer: Tokenizer, text: str, reference: str, depth: float) -> Prompt:
    """The prompt with its answer; `slot` of `slots` says the depth in per mille."""
    prompt, answer = tokenizer.encode(text), tokenizer.encode(f" {reference}")
    given = tokenizer.decode(answer[:1]) == " "
    tokens = np.asarray([*prompt, *answer], np.int32)
    return Prompt(tokens, len(answer) - given, len(prompt), reference, round(1000 * depth), 1000)
