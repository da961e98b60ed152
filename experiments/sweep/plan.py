"""What a sweep trains: axes as they are written, their combinations, a name for each, and what cannot be an axis."""

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bampath import config as configs
from bampath.config import Config
from bampath.overrides import split_overrides

SCHEDULE = ("optim.lr", "optim.schedule", "optim.warmup_steps", "optim.decay_steps", "optim.lr_start", "optim.lr_end")
SEEDS = ("seed", "train.seed", "data.seed")
INIT = "init."
MOST_RUNS = 4096
LONGEST_NAME = 200  # of a file; file systems allow 255 bytes, and others add an ending
TOKENIZER = ("data.tokenizer", "data.bos_token", "data.eos_token", "data.pad_token", "data.single_digits")

# A comma that is not inside parentheses; a number and a star, which begin a repeated layer or a part of a mixture.
_COMMA = re.compile(r",(?![^(]*\))")
_TIMES = re.compile(r"\s*[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?\s*\*")


@dataclass(frozen=True)
class Axis:
    """A key and the values that it takes, as they are written on the command line."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        """As it is written on the command line."""
        plain = not any(_COMMA.search(value) for value in self.values)
        last = ";" if len(self.values) == 1 and not plain else ""
        return f"{self.key}={(',' if plain else ';').join(self.values)}{last}"


@dataclass(frozen=True)
class Spec:
    """A sweep: a named configuration, overrides of all members, and the axes of both kinds."""

    config: str
    overrides: tuple[str, ...]
    vary: tuple[Axis, ...]
    structure: tuple[Axis, ...]


@dataclass(frozen=True)
class Member:
    """One run of a sweep. values: key -> value of every axis; starts: positional parameter -> initial value; slug: a
    name for files, no other member's."""

    config: Config
    values: dict[str, str]
    starts: dict[str, float]
    slug: str


@dataclass(frozen=True)
class Group:
    """The members of one program; values: those of its structural axes; slug: a name for files, no other group's."""

    values: dict[str, str]
    members: tuple[Member, ...]
    slug: str = "all"


def slug(values: dict[str, str]) -> str:
    """Values of axes as something that can be a file's name; different values may give one name."""
    words = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())
    return re.sub(r"[^\w.+-]+", "_", words).strip("_") or "all"


def slugs(choices: Sequence[dict[str, str]]) -> list[str]:
    """A name for files for each choice of values, no two the same even where capital letters do not count: with a hash
    of the values where a name alone would not do, or would be too long."""
    plain = [slug(values) for values in choices]
    times = Counter(name.lower() for name in plain)
    found = []
    for name, values in zip(plain, choices, strict=True):
        if times[name.lower()] > 1 or len(name.encode()) > LONGEST_NAME:
            digest = hashlib.blake2b(json.dumps(list(values.items())).encode(), digest_size=6).hexdigest()
            name = f"{name.encode()[: LONGEST_NAME - 13].decode(errors='ignore')}-{digest}"
        found.append(name)
    return found


def axis_of(text: str) -> Axis:
    """`KEY=A,B`, `KEY=A;B` or `KEY=0..7` as an axis. Where there is a `;`, commas belong to values; commas inside
    parentheses always do.

    ValueError if there is no value, or one twice, or too many, or if a pattern or a mixture could be one or several.
    """
    key, equals, rest = text.partition("=")
    span = re.fullmatch(r"(\d+)\.\.(\d+)", rest.strip())
    if span:
        first, last = int(span[1]), int(span[2])
        if last - first >= MOST_RUNS:
            raise ValueError(f"{text} has {last - first + 1:,} values; a sweep may have {MOST_RUNS:,} runs")
        values = tuple(str(n) for n in range(first, last + 1))
    else:
        parts = rest.split(";") if ";" in rest else _COMMA.split(rest)
        if ";" not in rest and len(parts) > 1 and any(_TIMES.match(part) for part in parts):
            raise ValueError(
                f"{text!r} may be one value (a pattern of layers, a mixture) or {len(parts)}: write '{text};' for one, "
                f"'{key}={';'.join(parts)}' for {len(parts)}"
            )
        values = tuple(part.strip() for part in parts if part.strip())
    key = configs.ALIASES.get(key.strip(), key.strip())
    if not equals or not values:
        raise ValueError(f"{text!r} is no axis; write KEY=A,B,… or KEY=A;B;… or KEY=0..7")
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r} has a value twice")
    return Axis(key, values)


def plan(spec: Spec) -> list[Group]:
    """All members, by program. ValueError for keys and values that do not exist, or that no member may change."""
    keys = [axis.key for axis in (*spec.vary, *spec.structure)]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice or ("seed" in keys and {"train.seed", "data.seed"} & set(keys)):
        raise ValueError(f"the axis {(twice or ['seed'])[0]} is given twice")
    for axis in spec.vary:
        refuse_axis(axis.key)
        if axis.key in TOKENIZER:
            raise ValueError(f"--vary {axis.key}: the members of a program share one tokenizer; use --structure")
    for axis in spec.structure:
        if axis.key in SEEDS or axis.key.startswith(INIT):
            raise ValueError(f"--structure {axis.key}=… would compile one program again and again; use --vary")
        refuse_axis(axis.key)
    refuse_overlap(spec, keys)
    runs = math.prod(len(axis.values) for axis in (*spec.vary, *spec.structure))
    if runs > MOST_RUNS:
        sizes = " x ".join(f"{axis.key} {len(axis.values):,}" for axis in (*spec.structure, *spec.vary))
        raise ValueError(f"{runs:,} runs ({sizes}) are too many: a sweep may have {MOST_RUNS:,}")
    structures, varied = list(combinations(spec.structure)), list(combinations(spec.vary))
    names = iter(slugs([structure | values for structure in structures for values in varied]))
    groups = []
    for structure, name in zip(structures, slugs(structures), strict=True):
        members = [replace(member_of(spec, structure, values), slug=next(names)) for values in varied]
        groups.append(Group(structure, tuple(members), name))
    refuse_same([member for group in groups for member in group.members])
    return groups


def refuse_overlap(spec: Spec, keys: Sequence[str]) -> None:
    """ValueError for a key that is an axis and also given for all."""
    shared = {key for key, _ in split_overrides(spec.overrides, configs.ALIASES)}
    for key in keys:
        for one in sorted(({"train.seed", "data.seed"} if key == "seed" else {key}) & shared):
            option = "--vary" if key in [axis.key for axis in spec.vary] else "--structure"
            raise ValueError(
                f"{one} is given for all runs and also as an axis, {option} {key}=…: leave one of them out"
            )


def refuse_same(members: Sequence[Member]) -> None:
    """ValueError for two members that are one run, such as those of optim.lr=1e-3 and optim.lr=0.001."""
    seen: dict[Any, Member] = {}
    for member in members:
        first = seen.setdefault((member.config, tuple(member.starts.items())), member)
        if first is not member:
            pairs = [(key, first.values[key], value) for key, value in member.values.items()]
            same = ", ".join(f"{key}={a} and {key}={b}" for key, a, b in pairs if a != b)
            raise ValueError(f"{same} are one value, which would be trained twice: leave one of them out")


def refuse_axis(key: str) -> None:
    """ValueError for a key that cannot differ between members because they run together."""
    if key.startswith("train.") and key != "train.seed":
        raise ValueError(f"{key} cannot be an axis: the runs of a sweep take their steps together; set it for all")
    if key.startswith("mesh."):
        raise ValueError(f"{key} cannot be an axis: the members of a sweep are spread over devices, each whole")


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Every choice of one value per axis; one empty choice if there are no axes."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def member_of(spec: Spec, structure: dict[str, str], varied: dict[str, str]) -> Member:
    """The member with these values."""
    values = {**structure, **varied}
    starts = {key.removeprefix(INIT): _number(key, value) for key, value in values.items() if key.startswith(INIT)}
    keys = {key: value for key, value in values.items() if not key.startswith(INIT)}
    if "seed" in keys:
        seed = keys.pop("seed")
        keys |= {"train.seed": seed, "data.seed": seed}
    config = configs.get(spec.config, *spec.overrides, *(f"{key}={value}" for key, value in keys.items()))
    if config.mesh.size > 1:
        raise ValueError(
            f"mesh.* spreads one run over {config.mesh.size} devices; a sweep's members are whole: leave it"
        )
    return Member(config, values, starts, slug(values))


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key}={text!r} is not a number") from None


def spec_json(spec: Spec) -> dict[str, Any]:
    axes = lambda some: [[axis.key, list(axis.values)] for axis in some]
    return {
        "config": spec.config,
        "overrides": list(spec.overrides),
        "vary": axes(spec.vary),
        "structure": axes(spec.structure),
    }


def read_spec(path: Path) -> Spec:
    """The sweep that a folder's sweep.json tells of. ValueError that names the file if it is not there or damaged."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist, so there is no sweep to resume; start one without --resume")
    try:
        return spec_from(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is damaged ({what}): give the sweep's --config, --vary, --structure and values again with another "
            "--out, or restore the file"
        ) from error


def spec_from(saved: dict[str, Any]) -> Spec:
    """What `spec_json` gave. KeyError for what is missing, TypeError or ValueError for what is something else."""
    axes = lambda some: tuple(Axis(key, tuple(values)) for key, values in some)
    spec = Spec(saved["config"], tuple(saved["overrides"]), axes(saved["vary"]), axes(saved["structure"]))
    words = [spec.config, *spec.overrides]
    words += [word for axis in (*spec.vary, *spec.structure) for word in (axis.key, *axis.values)]
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"{word!r} is no text")
    return spec
