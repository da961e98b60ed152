"""RULER's three single-needle tasks as prompts with their answers behind them, scored as passkeys are.

RULER generates 128 tokens and looks for the answer in them. Here one forward over prompt and answer decides whether
greedy decoding would begin with the answer: every token of it must be the most likely one (the space before it is
given). That is stricter than RULER's rule, needs no decoding, and is the same for all schemes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bampath.data import TokenCorpus, Tokenizer
from bampath.evaluation.materials import Prose, word_lists
from bampath.evaluation.passkey import Prompt
from bampath.evaluation.ruler.tasks import Material, make

TASKS = ("niah_single_1", "niah_single_2", "niah_single_3")
ESSAY_DOCUMENTS = 4


def material_of(held_out: TokenCorpus, tokenizer: Tokenizer, words: Path | None) -> Material:
    """Needles are put into held-out text; words: folder of RULER's word lists (None: the package wonderwords)."""
    texts = [tokenizer.decode(held_out.document(i).tolist()) for i in range(min(ESSAY_DOCUMENTS, held_out.documents))]
    return Material(word_lists(None if words is None else str(words)), Prose(held_out.info["source"], tuple(texts)))


def write(tokenizer: Tokenizer, material: Material, lengths: Sequence[int], samples: int, out: Path) -> None:
    """Make the prompts of all tasks and lengths and keep them in the file `out` (.npz)."""
    places = [(task, length) for task in TASKS for length in lengths]
    made = [_prompts(task, length, samples, tokenizer, material) for task, length in places]
    flat = [prompt for own in made for prompt in own]
    np.savez(
        out,
        tasks=[task for task, _ in places for _ in range(samples)],
        lengths=[length for _, length in places for _ in range(samples)],
        keys=[prompt.key for prompt in flat],
        numbers=[[len(p.tokens), p.scored, p.prompt_tokens, p.slot, p.slots] for p in flat],
        tokens=np.concatenate([prompt.tokens for prompt in flat]),
    )


def read(path: Path) -> dict[str, dict[int, list[Prompt]]]:
    """{task: {length: prompts}} of a file of `write`."""
    kept, found = np.load(path), dict[str, dict[int, list[Prompt]]]()
    pieces = np.split(kept["tokens"], np.cumsum(kept["numbers"][:, 0])[:-1])
    for tokens, task, length, key, numbers in zip(
        pieces, kept["tasks"], kept["lengths"], kept["keys"], kept["numbers"], strict=True
    ):
        scored, before, slot, slots = numbers[1:].tolist()
        prompt = Prompt(tokens, scored, before, str(key), slot, slots)
        found.setdefault(str(task), {}).setdefault(int(length), []).append(prompt)
    return found


def _prompts(task: str, length: int, samples: int, tokenizer: Tokenizer, material: Material) -> list[Prompt]:
    questions = make(task, length, samples, tokenizer, material)
    return [_prompt(tokenizer, q.prompt, q.references[0], q.depth or 0.0) for q in questions]


def _prompt(tokenizer: Tokenizer, text: str, reference: str, depth: float) -> Prompt:
    """The prompt with its answer; `slot` of `slots` says the depth in per mille."""
    prompt, answer = tokenizer.encode(text), tokenizer.encode(f" {reference}")
    given = tokenizer.decode(answer[:1]) == " "
    tokens = np.asarray([*prompt, *answer], np.int32)
    return Prompt(tokens, len(answer) - given, len(prompt), reference, round(1000 * depth), 1000)
