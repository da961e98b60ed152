"""Results of a session: JSON, a Markdown page and figures beside it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bampath.analysis import heatmap_figure, passkey_figure, perplexity_figure, save
from bampath.analysis.figures import short_number
from bampath.evaluation.results import write_results

Row = dict[str, Any]
_LABELS = ("essay", "words", "documents", "background", "facts", "names", "text", "file", "entries", "mode")


def write(path: Path, env: dict[str, Any], rows: Sequence[Row], train_length: int, skipped: dict[str, str]) -> None:
    """path: the JSON file; its Markdown has the same name with .md, its figures begin with that name."""
    write_results(path, env, rows, skipped=skipped)
    shown = figures(path, rows, train_length)
    path.with_suffix(".md").write_text(page(env, rows, skipped, shown), encoding="utf-8")


def show(row: Row) -> str:
    """One line for a terminal."""
    if row["benchmark"] == "state":
        asked = "" if row["trained"] else "  (never trained on it)"
        wrong = f"{row['error']:8.4%} [{row['lower']:.4%}, {row['upper']:.4%}]"
        return f"{row['task']:>24} {row['test']:<16} error {wrong}{asked}"
    if row["benchmark"] == "short":
        return (
            f"{row['task']:>24} {row['metric']:<16} {row['value']:.4f} ± {row['stderr'] or 0:.4f}  n = {row['samples']}"
        )
    if row["benchmark"] == "perplexity":
        return f"{row['start']:>10,} to {row['end']:>10,}  perplexity {row['perplexity']:.3f}"
    speed = f"  {row['samples_per_second']:.2f} samples/s" if "samples_per_second" in row else ""
    return f"{_name(row):>24} {_length(row):>9}  {100 * row['accuracy']:6.2f} {_interval(row)}{speed}"


def page(env: dict[str, Any], rows: Sequence[Row], skipped: dict[str, str], shown: Sequence[Path]) -> str:
    """The Markdown page: per benchmark a table of tasks by lengths, its material, its mean."""
    first = rows[0] if rows else {}
    parts = [
        f"# Evaluation of `{first.get('checkpoint', '')}`",
        f"`{first.get('case', '')}`, step {first.get('step', '')}; {env['date']}, {env['device']}, {env['platform']}, "
        f"JAX {env['jax']}, commit {env['commit']}.",
    ]
    for benchmark, own in _group(rows, "benchmark").items():
        parts += [f"## {benchmark}", *_TABLES.get(benchmark, _score_tables)(own)]
    parts += [f"![{path.stem}]({path.name})" for path in shown]
    if skipped:
        parts += ["## Not run", "\n".join(f"- {name}: {reason}" for name, reason in skipped.items())]
    return "\n\n".join(parts) + "\n"


def figures(path: Path, rows: Sequence[Row], train_length: int) -> list[Path]:
    """Score by length of each benchmark that has several lengths, by depth where samples have one, perplexity."""
    made = []
    named = lambda name: path.with_name(f"{path.stem}-{name}.png")
    for benchmark, own in _group(rows, "benchmark").items():
        if benchmark == "perplexity":
            made.append(save(perplexity_figure(own, train_length), named(benchmark)))
            continue
        scored = [{**row, "case": _name(row)} for row in own if row.get("length")]
        for part, some in enumerate(_parts(scored), 1):
            name = benchmark + (f"-{part}" if len(_parts(scored)) > 1 else "")
            made.append(save(passkey_figure(some, train_length, f"{benchmark} by length", "score"), named(name)))
        deep = [row for row in scored if all(sample["depth"] is not None for sample in row["depths"])]
        if deep:
            title = f"{benchmark} by length and depth"
            made.append(save(heatmap_figure(deep, train_length, title, "score"), named(f"{benchmark}-depth")))
    return made


def _parts(rows: Sequence[Row]) -> list[list[Row]]:
    """At most seven tasks to a figure, so that every line looks different."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    cut = [cases[start : start + 7] for start in range(0, len(cases), 7)]
    return [[row for row in rows if row["case"] in some] for some in cut]


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and whose others are numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _score_tables(rows: Sequence[Row]) -> list[str]:
    lengths = sorted({row["length"] for row in rows if row.get("length") is not None})
    body = []
    for task, own in _group(rows, "task").items():
        by = {row.get("length"): f"{100 * row['accuracy']:.1f} {_interval(row)}" for row in own}
        body.append([f"{task} (n = {own[0]['samples']})", *(by.get(n, "") for n in lengths or [None])])
    if len(body) > 1 and lengths:
        whole = [[row["accuracy"] for row in rows if row["length"] == n] for n in lengths]
        body.append(
            [
                f"mean of these {len(body)} tasks",
                *(f"{100 * sum(w) / len(w):.1f}" if len(w) == len(body) else "" for w in whole),
            ]
        )
    heads = ["task", *(short_number(n) for n in lengths)] if lengths else ["task", "score"]
    labels = sorted({f"{name}={row[name]}" for row in rows for name in _LABELS if name in row})
    note = [f"Material: {', '.join(labels)}. Numbers on other material do not compare."] if labels else []
    return [table(heads, body), *note, *too_long(rows)]


def too_long(rows: Sequence[Row]) -> list[str]:
    """A sentence if there are prompts that are longer than their length says: passkeys' have a shortest one."""
    longer = sorted({row["length"] for row in rows if row.get("length") and row.get("tokens", 0) > row["length"]})
    if not longer:
        return []
    tokens = max(row["tokens"] for row in rows if row.get("length") in longer)
    lengths = ", ".join(f"{length:,}" for length in longer)
    return [f"No prompt is as short as {lengths}: those have up to {tokens:,} tokens."]


def _perplexity_table(rows: Sequence[Row]) -> list[str]:
    body = [
        [
            f"{row['start']:,} to {row['end']:,}",
            f"{row['perplexity']:.3f}"
            + (f" [{row['lower']:.3f}, {row['upper']:.3f}]" if math.isfinite(row["lower"]) else ""),
        ]
        for row in rows
    ]
    return [table(["positions", "perplexity"], body)]


def _state_table(rows: Sequence[Row]) -> list[str]:
    body = [
        [
            f"`{row['task']}`, {row['test']}",
            f"{row['error']:.4%} [{row['lower']:.4%}, {row['upper']:.4%}]",
            f"{row['sequence_accuracy']:.1%}",
            f"{row['sequences']:,}",
        ]
        for row in rows
    ]
    untrained = (
        [] if all(row["trained"] for row in rows) else ["The model was never trained on this: it reads it as text."]
    )
    return [table(["test", "wrong answers", "rows without one", "rows"], body), *untrained]


def _short_table(rows: Sequence[Row]) -> list[str]:
    body = [
        [
            f"{row['task']} ({row['fewshot'] or 0}-shot)",
            row["metric"],
            f"{row['value']:.4f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.4f}"),
            str(row["samples"]),
        ]
        for row in rows
    ]
    cut = f"{rows[0]['cut']} contexts lost their beginning, {rows[0]['merged']} had a token across their end."
    return [table(["task", "metric", "value ± standard error", "samples"], body), cut]


_TABLES: dict[str, Any] = {"perplexity": _perplexity_table, "state": _state_table, "short": _short_table}


def _name(row: Row) -> str:
    return str(row.get("task", row["benchmark"]))


def _length(row: Row) -> str:
    return "" if row.get("length") is None else f"{row['length']:,}"


def _interval(row: Row) -> str:
    return f"[{100 * row['lower']:.0f}, {100 * row['upper']:.0f}]"


def _group(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row.get(key, row["benchmark"]), []).append(row)
    return found
