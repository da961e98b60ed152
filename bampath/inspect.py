"""Look into a checkpoint without loading it:

    python -m bampath.inspect runs/demo                    its latest checkpoint: facts, arrays, priors of every head
    python -m bampath.inspect runs/demo/checkpoints/00000100 --full
    python -m bampath.inspect --diff runs/a runs/b         what differs in configuration and arrays
    python -m bampath.inspect runs/demo --json             the same facts for a program

Only `checkpoint.json` is read, and for the priors the few positional parameters; no device and no mesh is needed.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bampath import checkpoint
from bampath.checkpoint import ArrayInfo, Info
from bampath.command import end_with_status
from bampath.config import Config, describe, from_json
from bampath.overrides import flat

LEAST_KEYS = 6  # that `bampath.analysis.read_heads` takes
_SMALL = 1 << 20  # bytes: prior and sharpness parameters are far below, the projections of PaTH and FoX may be above


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 with a message if there is no such checkpoint or it is damaged."""
    options = _parse(arguments)
    try:
        if options.diff:
            first, second = map(checkpoint.describe, options.checkpoints)
            text = _diff_text(first, second, options.json)
        else:
            text = _text(checkpoint.describe(options.checkpoints[0]), options)
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def facts(info: Info) -> dict[str, Any]:
    """Everything that `checkpoint.json` says, as plain values."""
    arrays = lambda items: [{**asdict(a), "shape": list(a.shape), "bytes": a.bytes} for a in items]
    names = ("step", "created", "elapsed", "tokenizer", "data", "versions", "config")
    plain = {name: getattr(info, name) for name in names}
    return {"path": str(info.path), **plain, "params": arrays(info.params), "state": arrays(info.state)}


def heads(info: Info, keys: int = 0) -> list[dict[str, Any]]:
    """Per layer and head with a distance prior: its parameters, regime, entropy and mean distance.

    keys: how many keys the query sees, 0 for the training length. Reads the small positional parameters only.
    """
    from bampath.analysis.heads import read_heads  # brings JAX, which the rest can do without

    config = config_of(info).model
    wanted = {array.name for array in info.params if "position" in array.name and array.bytes <= _SMALL}
    params = checkpoint.read_params(info.path, only=wanted.__contains__)
    for layer in range(config.layers):
        params.setdefault(f"layer_{layer}", {}).setdefault("attention", {})
    found = read_heads(config, params, max(LEAST_KEYS, keys or config.train_length))
    names = ("layer", "head", "keys", "parameters", "regime", "entropy", "mean_distance")
    return [{name: getattr(head, name) for name in names} for head in found]


def tree(arrays: Sequence[ArrayInfo], full: bool = False) -> str:
    """Arrays as an indented tree with shape, type, size and placement; without `full`, layers that are alike are shown
    once."""
    root: dict[str, Any] = {}
    for array in arrays:
        *parents, last = array.name.split("/")
        node = root
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = array
    return "\n".join(_branches(root, 0, full))


def difference(a: Info, b: Info) -> dict[str, list[str]]:
    """What differs between two checkpoints, in words: configuration, arrays, and facts such as the step."""
    left, right = flat(config_of(a)), flat(config_of(b))
    keys = [f"{key}: {left[key]!r} → {right[key]!r}" for key in left if left[key] != right[key]]
    one, two = _facts(a), _facts(b)
    missing = "nothing"
    other = [
        f"{name}: {one.get(name, missing)} → {two.get(name, missing)}"
        for name in dict.fromkeys([*one, *two])
        if one.get(name, missing) != two.get(name, missing)
    ]
    arrays = checkpoint.differences(a.params, b.params, "the first", "the second")
    state = checkpoint.differences(a.state, b.state, "the first", "the second")
    return {"configuration": keys, "parameters": arrays, "state": state, "facts": other}


def config_of(info: Info) -> Config:
    """The configuration that a checkpoint was trained with."""
    return from_json(json.dumps(info.config))


def _facts(info: Info) -> dict[str, Any]:
    """Step, tokenizer, data state and versions under dotted names: {"data.identity.seed": 0, …}."""
    nested = {"step": info.step, "tokenizer": info.tokenizer, "data": info.data, "versions": info.versions}
    return dict(_leaves(nested, ""))


def _leaves(tree: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bampath.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a run's folder, or one checkpoint's")
    parser.add_argument("--diff", action="store_true", help="compare two checkpoints")
    parser.add_argument("--full", action="store_true", help="every layer, and the optimiser's arrays")
    parser.add_argument("--keys", type=int, default=0, help="keys that a query sees; default: the training length")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_intermixed_args(arguments)
    if options.keys and options.keys < LEAST_KEYS:
        parser.error(f"--keys {options.keys} must be at least {LEAST_KEYS}, or 0 for the training length")
    if len(options.checkpoints) != (2 if options.diff else 1):
        given = f"got {len(options.checkpoints)}: {' '.join(options.checkpoints)}"
        parser.error(
            f"--diff compares two checkpoints, as in --diff A B; {given}"
            if options.diff
            else f"one checkpoint is inspected at a time (--diff A B compares two); {given}"
        )
    return options


def _text(info: Info, options: argparse.Namespace) -> str:
    rows = heads(info, options.keys)
    if options.json:
        return json.dumps({**facts(info), "heads": rows}, indent=1)
    state = ["", f"optimiser state: {len(info.state)} arrays, {_size(sum(a.bytes for a in info.state))}"]
    parts = [
        f"checkpoint   {info.path}",
        f"step         {info.step}, after {info.elapsed / 3600:.2f} h of training, saved {info.created}",
        f"data         next step {info.data.get('step')}, tokenizer {info.tokenizer}",
        f"versions     {', '.join(f'{name} {version}' for name, version in info.versions.items())}",
        "",
        describe(config_of(info)),
        "",
        f"parameters: {sum(math.prod(a.shape) for a in info.params):,} in {len(info.params)} arrays, "
        f"{_size(sum(a.bytes for a in info.params))}",
        tree(info.params, options.full),
        *state,
        *([tree(info.state, True)] if options.full else []),
    ]
    return "\n".join([*parts, *_head_lines(rows)])


def _diff_text(a: Info, b: Info, as_json: bool) -> str:
    found = difference(a, b)
    if as_json:
        return json.dumps({"first": str(a.path), "second": str(b.path), **found}, indent=1)
    lines = [f"first   {a.path}", f"second  {b.path}"]
    for name, differences in found.items():
        lines += ["", f"{name}:" if differences else f"{name}: no difference", *(f"  {d}" for d in differences)]
    return "\n".join(lines)


def _branches(node: Mapping[str, Any], depth: int, full: bool) -> list[str]:
    lines: list[str] = []
    names = sorted(node, key=_natural)
    done: set[str] = set()
    for name in names:
        if name in done:
            continue
        child = node[name]
        if isinstance(child, ArrayInfo):
            label = f"{'  ' * depth}{name}"
            shape = f"{child.dtype}[{', '.join(map(str, child.shape))}]"
            lines.append(f"{label:<36} {shape:<28} {_size(child.bytes):>9}  {child.placement}")
            continue
        alike = [n for n in names if not full and _family(n) == _family(name) and _same(node[n], child)]
        done |= set(alike)
        lines.append(f"{'  ' * depth}{name}" + (f" … {alike[-1]} ({len(alike)} alike)" if len(alike) > 1 else ""))
        lines += _branches(child, depth + 1, full)
    return lines


def _same(a: Any, b: Any) -> bool:
    """Whether two branches hold the same arrays under the same names."""
    if isinstance(a, ArrayInfo) or isinstance(b, ArrayInfo):
        kind = lambda x: (x.shape, x.dtype, x.placement) if isinstance(x, ArrayInfo) else None
        return kind(a) == kind(b)
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def _family(name: str) -> str:
    return name.rstrip("0123456789")


def _natural(name: str) -> tuple[str, int]:
    digits = name[len(_family(name)) :]
    return _family(name), int(digits or 0)


def _head_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["", "no head has a prior over distance"]
    lines = ["", f"priors of a query that sees {rows[0]['keys']} keys (entropy in nats, mean distance in tokens)"]
    lines += ["named after the prior's shape (docs/theory.md); what a head does with it, only its attention shows"]
    for row in rows:
        numbers = "  ".join(f"{name.partition('/')[2]} {value:+.4f}" for name, value in row["parameters"].items())
        lines.append(
            f"  layer {row['layer']:>2} head {row['head']:>2}  {row['regime']:<10} entropy {row['entropy']:6.3f}  "
            f"distance {row['mean_distance']:9.1f}  {numbers}"
        )
    return lines


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


if __name__ == "__main__":
    end_with_status(main)
