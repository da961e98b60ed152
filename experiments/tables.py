"""Tables of result rows in Markdown, which several studies share: passkeys, perplexity, time, seeds.

`results` is what a results file holds: {"study": {"train_length": …}, "rows": [{"case", "seed", "benchmark", …}]}.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bampath.analysis.figures import short_number
from bampath.evaluation.report import table
from bampath.intervals import over_seeds

Row = dict[str, Any]
LEARNED = 0.9  # share of keys found that counts as having learned retrieval


def passkey_table(results: dict[str, Any]) -> str:
    """Schemes by lengths, pooled over seeds, with the 95 % interval of `over_seeds`."""
    rows = [row for row in results["rows"] if row["benchmark"] == "passkey"]
    trained = results["study"]["train_length"]
    lengths = sorted({row["length"] for row in rows})
    head = ["scheme", *(f"{short_number(n)} ({n // trained}×)" for n in lengths)]
    body = []
    for case, own in by(rows, "case").items():
        cells = [pooled([row for row in own if row["length"] == n]) for n in lengths]
        body.append([f"`{case}`", *cells])
    return table(head, body)


def perplexity_table(results: dict[str, Any]) -> str:
    """Schemes by windows of positions (1×, 2×, 4×, …), mean loss over seeds; empty where a scheme was not asked."""
    rows = [row for row in results["rows"] if row["benchmark"] == "perplexity"]
    trained = results["study"]["train_length"]
    ends = [end for end in sorted({row["end"] for row in rows}) if (end // trained).bit_count() == 1]
    head = ["scheme", *(f"to {short_number(end)} ({end // trained}×)" for end in ends)]
    body = []
    for case, own in by(rows, "case").items():
        losses = [[row["loss"] for row in own if row["end"] == end] for end in ends]
        body.append([f"`{case}`", *(f"{np.exp(np.mean(loss)):.2f}" if loss else "" for loss in losses)])
    return table(head, body)


def time_table(results: dict[str, Any]) -> str:
    """Parameters, final loss, speed and seconds per scheme, medians over seeds."""
    rows = [row for row in results["rows"] if row["benchmark"] == "training"]
    head = ["scheme", "parameters", "positional", "last loss", "tokens/s", "training", "evaluation"]
    body = []
    for case, own in by(rows, "case").items():
        middle = lambda name, own=own: statistics.median(row[name] or 0 for row in own)
        speeds = [row["tokens_per_second"] for row in own if row["tokens_per_second"]]
        body.append(
            [
                f"`{case}`",
                f"{own[0]['parameters']:,}",
                f"{own[0]['positional_parameters']:,}",
                f"{middle('loss'):.3f}",
                f"{statistics.median(speeds):,.0f}" if speeds else "not measured",
                f"{middle('training_seconds'):.0f} s",
                f"{middle('evaluation_seconds'):.0f} s",
            ]
        )
    return table(head, body)


def findings(results: dict[str, Any]) -> list[str]:
    """What the passkey numbers say, in words that hold whichever scheme wins."""
    rows = [row for row in results["rows"] if row["benchmark"] == "passkey"]
    trained = results["study"]["train_length"]
    reached = {case: reach(own, trained) for case, own in by(rows, "case").items()}
    said = []
    missing = [case for case, far in reached.items() if far == 0]
    if missing:
        said.append(f"Not learned at the training length (below {LEARNED:.0%} there): {_names(missing)}.")
    for far in sorted({far for far in reached.values() if far}, reverse=True):
        same = [case for case, own in reached.items() if own == far]
        said.append(f"At least {LEARNED:.0%} of the keys up to {far}× the training length: {_names(same)}.")
    return said


def seed_table(results: dict[str, Any]) -> str:
    """How far each run finds at least 90 % of the keys, as multiples of the training length; 0: not even there."""
    rows = [row for row in results["rows"] if row["benchmark"] == "passkey"]
    seeds = sorted({row["seed"] for row in rows})
    head = [f"at least {LEARNED:.0%} found up to", *(f"seed {seed}" for seed in seeds)]
    body = []
    for case, own in by(rows, "case").items():
        runs = by(own, "seed")
        far = [reach(runs[seed], results["study"]["train_length"]) if seed in runs else None for seed in seeds]
        body.append([f"`{case}`", *("" if n is None else f"{n}×" for n in far)])
    return table(head, body)


def reach(rows: Sequence[Row], trained: int) -> int:
    """The last of the lengths, in order, before the share of keys found falls below 90 %, over the training length."""
    far = 0
    for length in sorted({row["length"] for row in rows}):
        if accuracy([row for row in rows if row["length"] == length]) < LEARNED:
            break
        far = length // trained
    return far


def pooled(rows: list[Row]) -> str:
    """Share of right answers of all rows together with its interval, as `0.95 [0.76, 0.99]`; empty without rows."""
    if not rows:
        return ""
    hits, samples = sum(row["correct"] for row in rows), sum(row["samples"] for row in rows)
    low, high = over_seeds([row["correct"] for row in rows], [row["samples"] for row in rows])
    return f"{hits / samples:.2f} [{low:.2f}, {high:.2f}]"


def accuracy(rows: list[Row]) -> float:
    """Share of right answers of all rows together."""
    return sum(row["correct"] for row in rows) / sum(row["samples"] for row in rows)


def _names(cases: Sequence[str]) -> str:
    return ", ".join(f"`{case}`" for case in cases)


def by(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    """Rows by their value of `key`, in the order in which values first appear."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Put the lines of `text` between two marks of a file, in place of what stands there. ValueError without marks."""
    before, after = _around(path, begin, end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def require_marks(path: Path, *marks: tuple[str, str]) -> None:
    """ValueError for a file that lacks one of these pairs of marks: to be asked before anything is written."""
    for begin, end in marks:
        _around(path, begin, end)


def _around(path: Path, begin: str, end: str) -> tuple[str, str]:
    """What stands before and after two marks of a file."""
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"{path} has no {begin!r} … {end!r} to write between")
    return before, after
