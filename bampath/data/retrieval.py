"""Retrieval documents for training: something to find, far away from where it is asked for.

A document is a list of pieces of text, in a wording of its own, with filler between them. Each is a pure function of
(options, seed, index, length): numpy and tokenizers stay outside, the caller says how many tokens a piece of text has.

The default wording is that of the passkey test in the BAM evaluation (its four sentences are facts of the protocol):
task, noise…, "The pass key is 12345. Remember it. …", noise…, "What is the pass key? The pass key is" and " 12345".
Documents of varied length teach retrieval that extends beyond the training length; of one length they teach a place.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from bampath.data.order import DOCUMENT, LENGTH, Draws, hash64

Kind = Literal["passkey", "brief", "labelled", "copy", "mixed"]
Count = Callable[[str], int]

NAMES = (
    *("river", "engine", "garden", "captain", "window", "doctor", "market", "bridge", "winter", "lantern", "harbor"),
    *("mountain", "teacher", "orchard", "village", "mirror", "soldier", "library", "meadow", "kitchen", "planet"),
    *("sister", "castle", "desert", "island", "needle", "painter", "railway", "shepherd", "tailor", "violin", "wagon"),
)


@dataclass(frozen=True)
class Wording:
    """The sentences of one kind of document; `{key}` and `{name}` are filled in per needle."""

    task: str
    filler: str
    needle: str
    question: str
    answer: str = " {key}"


_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WORDINGS: dict[str, Wording] = {
    "passkey": Wording(
        task="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there.",
        filler=_NOISE,
        needle="The pass key is {key}. Remember it. {key} is the pass key.",
        question="What is the pass key? The pass key is",
    ),
    "brief": Wording(task="", filler=_NOISE, needle="The pass key is {key}.", question="The pass key is"),
    "labelled": Wording(
        task="",
        filler=_NOISE,
        needle="The pass key of the {name} is {key}.",
        question="What is the pass key of the {name}? The pass key of the {name} is",
    ),
}
KINDS = (*WORDINGS, "copy")
COPY = ("Repeat:", " Again:")


@dataclass(frozen=True)
class RetrievalOptions:
    """What is mixed into training, and how the documents look. `share=0` turns the mix off.

    share: fraction of rows that end in a retrieval document; it is read to three digits.
    kind: "passkey" (the protocol's wording), "brief" (the same without task and repetition, for short contexts),
        "labelled" (several named keys, one is asked for), "copy" (random digits, then the same again), or "mixed"
        (one of the four per document).
    min_length, max_length: tokens of a document; max_length=0 means the whole row. Lengths are drawn "uniform" or
        "log" (log-uniform), never below what the sentences need without filler.
    digits: of a key; needles: named keys of a "labelled" document.
    filler: "noise" (the protocol's sentences), "text" (real text of the corpus) or "mixed" (one of them per document).
    depth: where the (first) needle stands: "uniform", "start" or "end" of the filler.
    front: what stands before the document in its row: "text" of the corpus or "pad" (nothing).
    isolated: whether the document is a document of its own (nothing before it is visible, positions start at 0) or goes
        on where the text before it stops.
    answer_weight, text_weight: loss weights of the answer's tokens and of the document's other tokens.
    """

    share: float = 0.0
    kind: Kind = "passkey"
    min_length: int = 64
    max_length: int = 0
    length_law: Literal["uniform", "log"] = "uniform"
    digits: int = 5
    needles: int = 4
    filler: Literal["noise", "text", "mixed"] = "noise"
    depth: Literal["uniform", "start", "end"] = "uniform"
    front: Literal["text", "pad"] = "text"
    isolated: bool = True
    answer_weight: float = 1.0
    text_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"retrieval.share={self.share} must be between 0 and 1")
        if 0 < self.share < 0.001:
            raise ValueError(f"retrieval.share={self.share} is read to three digits; use 0 or at least 0.001")
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"retrieval.{name}={getattr(self, name)!r} is not one of {', '.join(values)}")
        if self.min_length < 1 or self.max_length < 0:
            raise ValueError(
                f"retrieval.min_length={self.min_length} must be at least 1 and max_length={self.max_length} at least 0"
            )
        if self.max_length and self.max_length < self.min_length:
            raise ValueError(f"retrieval.max_length={self.max_length} is below min_length={self.min_length}")
        if not 1 <= self.digits <= 18:
            raise ValueError(f"retrieval.digits={self.digits} must be between 1 and 18")
        if not 1 <= self.needles <= len(NAMES):
            raise ValueError(f"retrieval.needles={self.needles} must be between 1 and {len(NAMES)}")
        if self.answer_weight < 0 or self.text_weight < 0:
            raise ValueError(
                f"retrieval.answer_weight={self.answer_weight} and text_weight={self.text_weight} must not be negative"
            )


_CHOICES = {
    "kind": (*KINDS, "mixed"),
    "length_law": ("uniform", "log"),
    "filler": ("noise", "text", "mixed"),
    "depth": ("uniform", "start", "end"),
    "front": ("text", "pad"),
}


@dataclass(frozen=True)
class Piece:
    """Either `text`, to be tokenised alone, or `corpus_tokens` tokens of real text. `answer` marks what is asked."""

    text: str = ""
    corpus_tokens: int = 0
    answer: bool = False


@dataclass(frozen=True)
class Document:
    """The pieces in order, the key that is asked for, and the fraction of the filler that stands before its needle."""

    pieces: tuple[Piece, ...]
    key: str
    depth: float
    kind: str


def draw_length(options: RetrievalOptions, row: int, seed: int, index: int) -> int:
    """Length in tokens of document `index`, between min_length and max_length (or `row`, the tokens of a row)."""
    high = min(options.max_length or row, row)
    low = min(options.min_length, high)
    draws = Draws(hash64(seed, index, LENGTH))
    if options.length_law == "uniform":
        return draws.between(low, high)
    at = draws.below(1 << 30) / (1 << 30)
    return min(high, int(math.exp(math.log(low) + at * (math.log(high + 1) - math.log(low)))))


def document(options: RetrievalOptions, seed: int, index: int, length: int, count: Count) -> Document:
    """The retrieval document number `index`, at most `length` tokens long where its fixed sentences allow it.

    count: tokens of a piece of text that is tokenised alone and without special tokens. Pure: equal arguments give
    equal documents, on every machine and version.
    """
    draws = Draws(hash64(seed, index, DOCUMENT))
    kind = options.kind if options.kind != "mixed" else KINDS[draws.below(len(KINDS))]
    if kind == "copy":
        return _copy(draws, length, count)
    wording = WORDINGS[kind]
    names = _choose(NAMES, options.needles if kind == "labelled" else 1, draws)
    keys = [random_digits(options.digits, draws) for _ in names]
    asked = draws.below(len(names))
    needles = [wording.needle.format(key=key, name=name) for key, name in zip(keys, names, strict=True)]
    question = wording.question.format(name=names[asked])
    answer = Piece(wording.answer.format(key=keys[asked]), answer=True)
    fixed = sum(map(count, [wording.task, *needles, question, answer.text]))
    text = options.filler == "text" or (options.filler == "mixed" and draws.below(2) == 1)
    unit = 1 if text else count(wording.filler)
    slots = max(0, (length - fixed) // unit)
    places = sorted(_depth(options.depth, slots, draws) for _ in needles)
    fillers = [b - a for a, b in zip([0, *places], [*places, slots], strict=True)]
    pieces = [Piece(wording.task)]
    for needle, before in zip(needles, fillers, strict=False):
        pieces += [*_fill(before, text, wording), Piece(needle)]
    pieces += [*_fill(fillers[-1], text, wording), Piece(question), answer]
    kept = tuple(piece for piece in pieces if piece.text or piece.corpus_tokens)
    return Document(kept, keys[asked], places[asked] / slots if slots else 0.0, kind)


def shortest(options: RetrievalOptions, count: Count) -> int:
    """Tokens that a document without any filler needs, the most of 64 samples: a row must hold it."""
    samples = [document(replace(options, filler="noise"), 0, index, 0, count) for index in range(64)]
    return max(sum(count(piece.text) for piece in sample.pieces) for sample in samples)


def random_digits(digits: int, draws: Draws) -> str:
    """A uniform number of exactly `digits` digits, as text."""
    return str(draws.between(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1))


def _copy(draws: Draws, length: int, count: Count) -> Document:
    head, tail = COPY
    words = [f" {digit}" for digit in range(10)]
    sizes = [count(word) for word in words]
    room = length - count(head) - count(tail)
    chosen: list[int] = []
    while room >= 0 or not chosen:
        for digit in map(int, draws.digits(15)):
            room -= 2 * sizes[digit]
            if room < 0 and chosen:
                break
            chosen.append(digit)
    body = [words[digit] for digit in chosen]
    pieces = [Piece(head), *map(Piece, body), Piece(tail), *(Piece(word, answer=True) for word in body)]
    return Document(tuple(pieces), "".join(body), 0.0, "copy")


def _fill(slots: int, text: bool, wording: Wording) -> Iterable[Piece]:
    if text:
        return [Piece(corpus_tokens=slots)]
    return [Piece(wording.filler)] * slots


def _depth(rule: str, slots: int, draws: Draws) -> int:
    return {"uniform": draws.below(slots + 1), "start": 0, "end": slots}[rule]


def _choose(names: tuple[str, ...], how_many: int, draws: Draws) -> list[str]:
    left = list(names)
    return [left.pop(draws.below(len(left))) for _ in range(how_many)]
