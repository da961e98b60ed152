"""Frozen dataclasses to and from plain values: typed `a.b=c` overrides, JSON, and messages that name what exists.

Nothing here runs code from a file: a value is only ever read as the type that its field declares.
"""

import dataclasses
import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_dict(config: Any) -> Any:
    """A dataclass as nested dicts, lists and scalars that JSON can hold."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}
    if isinstance(config, (tuple, list)):
        return [to_dict(item) for item in config]
    return config


def from_dict(cls: type[T], values: Mapping[str, Any], at: str = "") -> T:
    """Rebuild a dataclass from `to_dict`'s output. ValueError for unknown keys, TypeError for wrong types."""
    hints = get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ValueError(unknown_key(f"{at}{key}", [f"{at}{name}" for name in known]))
    return cls(**{key: _coerce(hints[key], value, f"{at}{key}") for key, value in values.items()})


def override(config: T, overrides: Sequence[str], aliases: Mapping[str, str]) -> T:
    """`config` with `section.key=value` strings applied, all at once, so that the result is validated as a whole.

    `aliases` maps short keys to full ones. Values are read as the type of their field; ValueError names a key that does
    not exist together with the nearest one that does.
    """
    values = to_dict(config)
    types_of = dict(keys(type(config)))
    for key, text in split_overrides(overrides, aliases):
        if key not in types_of:
            inside = [name for name in types_of if name.startswith(f"{key}.")]
            if inside:
                raise ValueError(f"{key} is a section: set its keys one by one, {', '.join(inside)}")
            raise ValueError(unknown_key(key, [*types_of, *aliases]))
        *path, last = key.split(".")
        section = values
        for name in path:
            section = section[name]
        section[last] = parse_value(types_of[key], text, key)
    return from_dict(type(config), values)


def split_overrides(overrides: Sequence[str], aliases: Mapping[str, str]) -> list[tuple[str, str]]:
    """(full key, text) of each `key=text`. ValueError for an entry without `=` and for a key that is set twice."""
    pairs: dict[str, str] = {}
    for entry in overrides:
        if not isinstance(entry, str):
            raise TypeError(
                f"override {entry!r} is no string such as 'train.steps=100'; give several one after the other"
            )
        key, equals, text = entry.partition("=")
        if not equals:
            raise ValueError(f"override {entry!r} has no '='; write it as key=value, for example train.steps=100")
        key = aliases.get(key.strip(), key.strip())
        if key in pairs:
            raise ValueError(f"{key} is set twice: {pairs[key]!r} and {text!r}")
        pairs[key] = text.strip()
    return list(pairs.items())


def keys(cls: type[Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every leaf field of a dataclass whose fields may be dataclasses."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            yield from keys(hints[field.name], f"{at}{field.name}.")
        else:
            yield f"{at}{field.name}", hints[field.name]


def document(cls: type[Any], at: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, "type = default" in words) of every leaf field; "needed" stands for a field without a default."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from document(hints[field.name], f"{at}{field.name}.")
        elif field.init:
            default = field.default_factory() if callable(field.default_factory) else field.default
            text = "needed" if field.default is field.default_factory else f"= {default!r}"
            yield f"{at}{field.name}", f"{_words(hints[field.name])} {text}"


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join("none" if k is type(None) else _words(k) for k in get_args(kind))
    return _name(kind)


def flat(config: Any, at: str = "") -> dict[str, Any]:
    """{dotted key: value} of every leaf field of a dataclass instance."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{at}{field.name}.")
        elif field.init:
            found[f"{at}{field.name}"] = value
    return found


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The message for a key that does not exist: the nearest names, then everything in the same section."""
    section, _, last = key.rpartition(".")
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not near:  # a right name in a wrong section, or a wrong section
        tails = {name.rpartition(".")[2]: name for name in known}
        near = [tails[tail] for tail in difflib.get_close_matches(last, list(tails), n=1, cutoff=0.75)]
    hint = f"; did you mean {near[0]}?" if near else ";"
    siblings = [name for name in known if section and name.rpartition(".")[0] == section]
    sections = dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in known)
    return f"unknown key {key!r}{hint} There are: {', '.join(siblings or sections)}"


def parse_value(kind: Any, text: str, key: str) -> Any:
    """`text` from a command line as a value of type `kind`. ValueError names the key, the text and the type."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _parse_optional(kind, text, key)
    if origin is Literal:
        return _one_of(get_args(kind), text, key)
    if origin is tuple:
        return _parse_tuple(kind, text, key)
    if kind is bool:
        words = {
            "true": True,
            "1": True,
            "yes": True,
            "on": True,
            "false": False,
            "0": False,
            "no": False,
            "off": False,
        }
        if text.lower() not in words:
            raise ValueError(f"{key}={text!r} is not a bool; write true or false")
        return words[text.lower()]
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key}={text!r} is not {_article(kind.__name__)}") from None


def _parse_optional(kind: Any, text: str, key: str) -> Any:
    choices = [k for k in get_args(kind) if k is not type(None)]
    if len(choices) < len(get_args(kind)) and text.lower() in ("none", "null", ""):
        return None
    errors = []
    for choice in choices:
        try:
            return parse_value(choice, text, key)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError("; ".join(errors))


def _parse_tuple(kind: Any, text: str, key: str) -> tuple[Any, ...]:
    """`a,b,c`, or a JSON list (needed when the items are dataclasses)."""
    item = get_args(kind)[0]
    if text.startswith("["):
        return tuple(_coerce(item, value, key) for value in json.loads(text))
    if dataclasses.is_dataclass(item):
        raise ValueError(f"{key}={text!r} must be a JSON list, for example [{json.dumps(_example(item))}]")
    return tuple(parse_value(item, part.strip(), key) for part in text.split(",") if part.strip())


def _example(cls: Any) -> dict[str, str]:
    return {field.name: "…" for field in dataclasses.fields(cls)}


def _one_of(choices: tuple[Any, ...], value: Any, key: str) -> Any:
    if value in choices:
        return value
    by_text = {str(choice): choice for choice in choices}
    if value in by_text:
        return by_text[value]
    near = difflib.get_close_matches(str(value), list(by_text), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{key}={value!r} is not one of {', '.join(by_text)}{hint}")


def _coerce(kind: Any, value: Any, key: str) -> Any:
    """A JSON value as a value of type `kind`; ints pass as floats, lists as tuples, dicts as dataclasses."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        choices = [k for k in get_args(kind) if k is not type(None)]
        for choice in choices[:-1]:
            try:
                return _coerce(choice, value, key)
            except TypeError:
                continue
        return _coerce(choices[-1], value, key)
    if origin is Literal:
        return _one_of(get_args(kind), value, key)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_coerce(get_args(kind)[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return from_dict(kind, value, f"{key}.")  # type: ignore[arg-type]
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise TypeError(f"{key}={value!r} is {_article(type(value).__name__)}; it must be {_article(_name(kind))}")


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind)) if get_origin(kind) is None else str(kind)


def _article(noun: str) -> str:
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"
