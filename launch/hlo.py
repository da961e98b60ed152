"""Which collectives a compiled program contains, how often they run and what they move, read from its HLO text.

Loops count with their trip count, so a collective of one layer in a loop over 24 counts 24 times. A TPU program shows
one asynchronous collective in several fusions (its start, what runs meanwhile, its end): they share a channel and count
once.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_FUSIONS = ("fused_computation", "async_collective_fusion")
_BOUND = re.compile(r"= [su](?:32|64)\[\]\S* constant\((\d+)\)")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


@dataclass(frozen=True)
class Collective:
    """One collective of a program. axes: the mesh axes that its groups span; size: devices of a group; shapes: of the
    results on one device (XLA joins small collectives); result_bytes: of all of them; times: how often it runs."""

    op: str
    axes: tuple[str, ...]
    size: int
    shapes: tuple[tuple[int, ...], ...]
    result_bytes: int
    times: int

    @property
    def moved_bytes(self) -> float:
        """Bytes that each device sends per run of the program, by a ring."""
        share = (self.size - 1) / self.size
        factor = {"all-reduce": 2 * share, "reduce-scatter": self.size - 1.0, "collective-permute": 1.0}
        return self.times * self.result_bytes * factor.get(self.op, share)


def collectives(text: str, axes: dict[str, int]) -> list[Collective]:
    """Every collective of a compiled program's text that moves something. axes: the mesh's axes and sizes, in order."""
    computations = dict(_computations(text))
    times = _times(computations)
    found: list[Collective] = []
    fused: dict[Any, Collective] = {}
    for name, lines in computations.items():
        for line in lines:
            match = _INSTRUCTION.match(line)
            op = match.group(2).removesuffix("-start") if match else ""
            if match and op in OPS:
                one, channel = _collective(op, match.group(1), line, times[name], axes), _CHANNEL.search(line)
                if channel is None or not name.startswith(_FUSIONS):
                    found.append(one)
                    continue
                key = channel.group(1), one.op, one.shapes
                if key not in fused or fused[key].times < one.times:
                    fused[key] = one
    return [one for one in (*found, *fused.values()) if one.size > 1]


def summary(found: Sequence[Collective]) -> list[dict[str, object]]:
    """Counts and moved bytes by op and axes, most bytes first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = defaultdict(list)
    for one in found:
        groups[one.op, one.axes].append(one)
    rows: list[dict[str, object]] = [
        {
            "op": op,
            "axes": "+".join(names),
            "count": sum(one.times for one in group),
            "moved_bytes": round(sum(one.moved_bytes for one in group)),
        }
        for (op, names), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["moved_bytes"])))


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = None, []  # type: str | None, list[str]
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            name, lines = match.group(1), []
            if line.startswith("ENTRY"):
                name = "ENTRY"
        elif line.startswith("}") and name is not None:
            yield name, lines
            name = None
        elif name is not None:
            lines.append(line)


def _times(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs: those of a loop as often as it turns (once if it does not say)."""
    calls: dict[str, list[tuple[str, int]]] = {name: [] for name in computations}
    for name, lines in computations.items():
        for line in lines:
            for kind, called in _CALLED.findall(line):
                times = _trips(line, computations) if kind == "body" else 1
                calls[name] += [(other, times) for other in re.findall(r"[\w.\-]+", called)]
    total: dict[str, int] = defaultdict(int)

    def visit(name: str, times: int) -> None:
        total[name] += times
        for other, each in calls.get(name, []):
            visit(other, times * each)

    visit("ENTRY", 1)
    return total


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """How often a loop turns: as it says, or as its condition does (`counter < constant`; counters start at 0)."""
    said = _TRIPS.search(line)
    if said:
        return int(said.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = computations.get(condition.group(1), []) if condition else []
    bounds = [match.group(1) for other in lines if (match := _BOUND.search(other))]
    compares = any("direction=LT" in other for other in lines)
    return int(bounds[0]) if compares and len(bounds) == 1 else 1


def _collective(op: str, result: str, line: str, times: int, axes: dict[str, int]) -> Collective:
    shapes = [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in _SHAPE.findall(result)]
    if f"{op}-start(" in line and result.startswith("(("):  # ((operands), (results)), as on GPUs
        shapes = shapes[len(shapes) // 2 :]
    elif f"{op}-start(" in line and op in ("all-gather", "collective-permute"):  # (operands, results, …)
        shapes = shapes[1:2] if op == "collective-permute" else shapes[len(shapes) // 2 :]
    size = sum(BYTES[kind] * math.prod(dims) for kind, dims in shapes)
    group = _group(line)
    return Collective(op, _axes(group, axes), len(group), tuple(dims for _, dims in shapes), size, times)


def _group(line: str) -> list[int]:
    """The devices of the first group, or of the longest chain of a permutation."""
    pairs = _PAIRS.search(line)
    if pairs:
        routes = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\d+,\d+", pairs.group(1))]
        moved = [list(route) for route in routes if route[0] != route[1]]
        return moved[0] if moved else [0]
    named = _MESH.search(line)
    if named:
        return _named_group(*named.groups())
    groups = _GROUPS.search(line)
    if groups is None:
        raise ValueError(f"a collective without groups: {line.strip()[:200]}")
    written = groups.group(1)
    if written.startswith("{{"):
        return [int(n) for n in written[2:].split("}")[0].split(",")]
    shape, order = written.split("<=")
    return list(map(int, _iota(order).reshape(_numbers(shape))[0]))


def _named_group(sizes: str, order: str | None, used: str) -> list[int]:
    """The first group of `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`: devices that differ in the used axes."""
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    names = re.findall(r"'(\w+)'", used)
    if ":" in used:
        raise ValueError(f"groups over part of a mesh axis are not understood: {used}")
    devices = _iota(order) if order else np.arange(math.prod(axes.values()))
    devices = devices.reshape(tuple(axes.values()))
    index = tuple(slice(None) if name in names else 0 for name in axes)
    return list(map(int, devices[index].reshape(-1)))


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: the numbers from 0 in this shape, transposed."""
    dims, _, order = text.partition("T")
    devices = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return devices.transpose(_numbers(order)) if order else devices


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _axes(group: Sequence[int], axes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    places = np.stack(np.unravel_index(np.asarray(group), tuple(axes.values())))
    return tuple(name for name, row in zip(axes, places, strict=True) if len(set(row.tolist())) > 1)
