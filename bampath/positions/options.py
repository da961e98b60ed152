"""Options of a part: its dataclass fields, read from text, checked against their annotations, written back.

Supported annotations: bool, int, float, `Literal["a", "b"]`, `tuple[float, ...]`, None, and unions of them. In a spec
they are written as `true`, `12`, `0.5`, `a`, `1:0.5:2`, `none`.
"""

import dataclasses
import math
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

Value = bool | int | float | str | tuple[float, ...] | None
NUMBERS = tuple[float, ...]


def option(default: Any = dataclasses.MISSING, *, doc: str, examples: tuple[str, ...] = ()) -> Any:
    """A field of a part. `doc` explains it; `examples` are spec fragments (`factor=4,scaling=linear`) that exercise a
    value which cannot be enumerated, so that the shared test matrix covers every option."""
    return dataclasses.field(default=default, metadata={"doc": doc, "examples": examples})


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union annotation, or the annotation itself; a Literal stays whole."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def choices(annotation: Any) -> tuple[Value, ...]:
    """Every value that an annotation enumerates: () when it enumerates none (a number)."""
    found: list[Value] = []
    for kind in alternatives(annotation):
        if kind is bool:
            found += [False, True]
        elif kind is type(None):
            found.append(None)
        elif get_origin(kind) is Literal:
            found += get_args(kind)
    return tuple(found)


def describe(annotation: Any) -> str:
    """What an option accepts, in words: `one of uniform, laplace`, `a number or none`."""
    names = [format_value(value) for value in choices(annotation)]
    kinds = alternatives(annotation)
    words = ["a number"] if float in kinds else ["an integer"] if int in kinds else []
    words += ["numbers joined by `:`"] if NUMBERS in kinds else []
    if names:
        words.append(names[0] if len(names) == 1 else "one of " + ", ".join(names))
    return " or ".join(words)


def parse_value(text: str, annotation: Any) -> Value:
    """The value that `text` denotes; ValueError (saying what is accepted) if it denotes none."""
    for value in choices(annotation):
        if text == format_value(value):
            return value
    for kind in (int, float):
        if kind in alternatives(annotation):
            try:
                return kind(text)
            except ValueError:
                pass
    if NUMBERS in alternatives(annotation):
        try:
            return tuple(float(number) for number in text.split(":"))
        except ValueError:
            pass
    raise ValueError(f"is {text!r} but must be {describe(annotation)}")


def format_value(value: Value) -> str:
    """Shortest text that `parse_value` reads back as the same value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ":".join(map(format_value, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def hints(part: Any) -> dict[str, Any]:
    """Option name -> annotation, in declaration order."""
    kind = part if isinstance(part, type) else type(part)
    resolved = typing.get_type_hints(kind)
    return {f.name: resolved[f.name] for f in dataclasses.fields(kind)}


def check(part: Any) -> None:
    """Check a part's fields against their annotations and turn ints into floats where a float is declared."""
    for name, annotation in hints(part).items():
        value, kinds = getattr(part, name), alternatives(annotation)
        if any(type(value) is type(choice) and value == choice for choice in choices(annotation)):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            if int in kinds:
                continue
            if float in kinds:
                object.__setattr__(part, name, float(value))
                continue
        if isinstance(value, float) and float in kinds and math.isfinite(value):
            continue
        if isinstance(value, tuple) and NUMBERS in kinds and value and all(_is_number(number) for number in value):
            object.__setattr__(part, name, tuple(map(float, value)))
            continue
        raise ValueError(f"{part.NAME}: option {name} is {format_value(value)!r} but must be {describe(annotation)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def canonical(part: Any) -> str:
    """`name(main,option=value,…)` with the options that differ from their defaults, in declaration order."""
    written = []
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if value != f.default or type(value) is not type(f.default):
            written.append(format_value(value) if f.name == part.MAIN else f"{f.name}={format_value(value)}")
    return f"{part.NAME}({','.join(written)})" if written else part.NAME
