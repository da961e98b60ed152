"""Spec strings, as far as their form goes: `3*rope+window(512), nope` -> multipliers, part names, option texts."""

import re
from dataclasses import dataclass

_TERM = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_REPEAT = re.compile(r"\s*(\d+)\s*\*(.*)", re.DOTALL)
GRAMMAR = (
    "a spec is parts joined by '+', each with options in parentheses, as in bam(init=laplace)+ssmax; layers that "
    "differ are separated by ',' and repeated over the depth, as in 3*rope+window(512),nope"
)


@dataclass(frozen=True)
class Term:
    """One part as written: its name, the value given without a name (or None), the named options in order."""

    name: str
    main: str | None
    options: tuple[tuple[str, str], ...]


def parse_pattern(spec: str) -> list[list[Term]]:
    """The terms of each layer of the pattern, multipliers expanded. ValueError if the form is wrong."""
    layers: list[list[Term]] = []
    for piece in _split(spec, ",", spec):
        repeat = _REPEAT.fullmatch(piece)
        count, composition = (int(repeat[1]), repeat[2]) if repeat else (1, piece)
        if not 1 <= count <= 1000:
            raise ValueError(f"{spec!r}: a layer count must be between 1 and 1000, not {count}")
        layers += [[_term(text, spec) for text in _split(composition, "+", spec)]] * count
    return layers


def _term(text: str, spec: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise ValueError(f"{spec!r}: cannot read {text.strip()!r}; {GRAMMAR}")
    if match[2] is not None and not match[2].strip():
        raise ValueError(f"{spec!r}: the parentheses of {match[1]}() are empty; write {match[1]}, or options in them")
    main, named = None, []
    pieces = _split(match[2], ",", spec) if match[2] is not None else []
    for index, piece in enumerate(pieces):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if equals and key and value:
            named.append((key, value))
        elif index == 0 and key and not equals:
            main = key
        else:
            raise ValueError(f"{spec!r}: cannot read option {piece.strip()!r} of {match[1]}; write name=value")
    return Term(match[1], main, tuple(named))


def _split(text: str, separator: str, spec: str) -> list[str]:
    """Split at separators outside parentheses; empty pieces and unbalanced parentheses are errors."""
    pieces, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0 or depth > 1:
            raise ValueError(f"{spec!r}: parentheses do not match; {GRAMMAR}")
        if character == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth:
        raise ValueError(f"{spec!r}: parentheses do not match; {GRAMMAR}")
    if any(not piece.strip() for piece in pieces):
        raise ValueError(f"{spec!r}: something is missing around {separator!r}; {GRAMMAR}")
    return pieces
