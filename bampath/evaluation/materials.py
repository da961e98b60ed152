"""What prompts are made of: prose, words and names, from local files or from installed packages. Nothing is fetched."""

import importlib.util
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from bampath.data.formats import ReadOptions
from bampath.data.sources import open_source

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Prose:
    """Documents of running text. label: what it is, for results: numbers on other prose do not compare."""

    label: str
    documents: tuple[str, ...]

    def words(self) -> list[str]:
        """All documents as one list of words."""
        return " ".join(self.documents).split()


@dataclass(frozen=True)
class WordLists:
    """English nouns, adjectives and verbs, sorted and without repetition."""

    label: str
    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]

    def compound(self, draw: random.Random) -> str:
        """An adjective-noun."""
        return f"{draw.choice(self.adjectives)}-{draw.choice(self.nouns)}"

    def all(self) -> list[str]:
        """Every word, sorted."""
        return sorted({*self.nouns, *self.adjectives, *self.verbs})


@dataclass(frozen=True)
class Names:
    """First and last names with the shares of people who bear them."""

    label: str
    first: tuple[str, ...]
    first_share: np.ndarray
    last: tuple[str, ...]
    last_share: np.ndarray


def prose(spec: str = "sotu") -> Prose:
    """The documents of a source as docs/data.md describes them: a path, a folder, a glob, or the default corpus."""
    source = open_source(spec, ReadOptions())
    documents = tuple(document.text for document in source.read())
    if not any(text.split() for text in documents):
        raise ValueError(f"{spec} holds no words")
    return Prose(source.name if spec == "sotu" else Path(spec).name, documents)


def word_lists(folder: str | None = None) -> WordLists:
    """nounlist.txt, adjectivelist.txt and verblist.txt (one word a line) of a folder, or of the package wonderwords.

    FileNotFoundError, saying what to install, if there is neither.
    """
    home = Path(folder) if folder else _package("wonderwords", "assets", "RULER's word lists are in", "--words FOLDER")
    lists = [_lines(home / f"{kind}list.txt") for kind in ("noun", "adjective", "verb")]
    return WordLists("wonderwords" if folder is None else home.name, *lists)


def names(folder: str | None = None) -> Names:
    """dist.female.first, dist.male.first and dist.all.last (US census files: NAME SHARE …) of a folder, or of the
    package names. FileNotFoundError, saying what to install, if there is neither."""
    home = Path(folder) if folder else _package("names", ".", "PhoneBook's names are in", "--names FOLDER")
    female, male, last = (_census(home / f"dist.{kind}") for kind in ("female.first", "male.first", "all.last"))
    first, share = (*female[0], *male[0]), np.concatenate([female[1], male[1]])
    return Names("names" if folder is None else home.name, first, share / share.sum(), last[0], last[1])


_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)])) (?![a-z])")


@lru_cache(maxsize=128)  # books are cut once for all prompts
def sentences(text: str) -> tuple[str, ...]:
    """Sentences of a text: cut after . ! or ?, and a quote mark or bracket behind it, if no lower-case word follows."""
    flat = " ".join(text.split())
    return tuple(piece for piece in _SENTENCE_END.split(flat) if piece)


def _package(name: str, inside: str, why: str, instead: str) -> Path:
    found = importlib.util.find_spec(name)  # found, not imported
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{why} the package {name}: pip install {name}, or give {instead}")
    return Path(found.origin).parent / inside


def _lines(path: Path) -> tuple[str, ...]:
    words = sorted({line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()})
    if not words:
        raise ValueError(f"{path} holds no words")
    return tuple(words)


def _census(path: Path) -> tuple[tuple[str, ...], np.ndarray]:
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        share = np.array([float(row[1]) for row in rows])
    except (IndexError, ValueError):
        raise ValueError(f"{path} must have lines of the form NAME SHARE …") from None
    return tuple(row[0].capitalize() for row in rows), share / share.sum()
