"""The thirteen tasks: their names and settings, and how their prompts are cut to a length."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from bampath.data import Tokenizer
from bampath.evaluation.answers import Score, contains_all, contains_any
from bampath.evaluation.materials import Prose, WordLists
from bampath.evaluation.questions import Question, count, draws, largest, within
from bampath.evaluation.ruler import counting, documents, haystack, tracking
from bampath.evaluation.ruler.haystack import Niah

LENGTHS = "4096,8192,16384,32768,65536,131072"

NIAH = {
    "niah_single_1": Niah("noise", "words", "numbers"),
    "niah_single_2": Niah("essay", "words", "numbers"),
    "niah_single_3": Niah("essay", "words", "uuids"),
    "niah_multikey_1": Niah("essay", "words", "numbers", keys=4),
    "niah_multikey_2": Niah("needle", "words", "numbers"),
    "niah_multikey_3": Niah("needle", "uuids", "uuids"),
    "niah_multivalue": Niah("essay", "words", "numbers", values=4),
    "niah_multiquery": Niah("essay", "words", "numbers", queries=4),
}
NEW_TOKENS = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
TASKS = tuple(NEW_TOKENS)


@dataclass(frozen=True)
class Material:
    """What prompts are made of. squad, hotpot: the files of qa_1 and qa_2, None where there is no local copy."""

    words: WordLists
    essay: Prose
    squad: documents.Library | None = None
    hotpot: documents.Library | None = None

    @cached_property
    def essay_words(self) -> list[str]:
        return self.essay.words()

    @cached_property
    def single_words(self) -> list[str]:
        return self.words.all()

    def labels(self, task: str) -> dict[str, str]:
        """The material that the task uses: numbers on another one do not compare."""
        library = {"qa_1": self.squad, "qa_2": self.hotpot}.get(task)
        essay = task in NIAH and NIAH[task].haystack == "essay"
        return {
            **({"essay": self.essay.label} if essay else {}),
            **({"words": self.words.label} if task in NIAH or task == "cwe" else {}),
            **({"documents": library.label} if library else {}),
        }


def score_of(task: str) -> Score:
    """RULER's scorer of a task: any reference for QA, the share of all of them otherwise."""
    return contains_any if task.startswith("qa") else contains_all


def make(
    task: str, length: int, samples: int, tokenizer: Tokenizer, material: Material, *, seed: int = 42, reserve: int = 0
) -> list[Question]:
    """The prompts of one task and length, each a pure function of (task, length, index, seed, tokenizer, material).

    A prompt and the task's new tokens have at most length - reserve tokens together (reserve: a BOS, for example). The
    size is found on the first sample and taken back where another would not fit. DoesNotFit for a length that is
    too short, ValueError if the material is missing.
    """
    build, least = _builder(task, length, tokenizer, material, seed)
    budget, what = length - NEW_TOKENS[task] - reserve, f"{task} at {length} tokens"
    tokens = partial(count, tokenizer)
    size = largest(lambda n: tokens(build(0, n).prompt) <= budget, least, what)
    return [within(partial(build, i), tokens, budget, size, least, what) for i in range(samples)]


def _builder(
    task: str, length: int, tokenizer: Tokenizer, material: Material, seed: int
) -> tuple[Callable[[int, int], Question], int]:
    """(what makes the sample of an index with a haystack of a size, the smallest size)."""
    if task not in NEW_TOKENS:
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    stream: Callable[[int], Any] = lambda index: draws(seed, task, length, index)
    if task in NIAH:
        niah = NIAH[task]
        return lambda i, n: haystack.make(niah, n, stream(i), material.words, material.essay_words), niah.least
    if task == "vt":
        fits = lambda n: count(tokenizer, tracking.example(n, stream(0))) <= tracking.SHOT_TOKENS
        least = tracking.HOPS + 1
        shot = largest(fits, least, "vt's example") if fits(least) else least
        return lambda i, n: tracking.make(n, stream(i), shot), least
    if task == "cwe":
        times, single = counting.repeats(length), material.single_words
        return lambda i, n: counting.common_words(n, stream(i), material.words, single, times), counting.COMMON + 1
    if task == "fwe":
        return lambda i, n: counting.frequent_words(n, stream(i), length), counting.LEAST_FREQUENT
    library = material.squad if task == "qa_1" else material.hotpot
    if library is None:
        raise ValueError(f"{task} needs a local copy of {'SQuAD v2.0' if task == 'qa_1' else 'HotpotQA'}")
    return lambda i, n: documents.make(library, i, n, stream(i)), 1
