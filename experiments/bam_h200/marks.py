"""Whether BAM+SSMax finds the keys that it was to find, and which other cases do, in numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

MARKS = ((4, 0.9), (32, 0.7))  # times the training length, share of keys that BAM+SSMax was to find there
# BAM+SSMax in the best recipe and as it is by default, and who stands beside each: in the same recipe, and plain.
BEST = "init=0.2"
MARKED = {
    f"bam+ssmax({BEST})": (f"rope+ssmax({BEST})", f"alibi+ssmax({BEST})", "rope", "alibi"),
    "bam+ssmax": ("rope", "alibi"),
}
# The seeds of BAM+SSMax whose passkeys were looked at when the recipe was chosen, by size: at small the rows of
# training text, at 120m where SSMax starts. In other recipes (other rows, other heads) nothing was chosen.
CHOSEN_ON = {"small": (0, 1, 2), "120m": (0,)}


def marks(part: dict[str, Any]) -> list[str]:
    """Lines for each mark: BAM+SSMax over all its seeds, over those that the recipe was chosen on and over the others,
    RoPE and ALiBi beside it; then every other case whose mean over seeds reaches the mark."""
    lines = []
    for times, least in MARKS:
        shares = _shares(part, times * part["study"]["train_length"])
        marked = [case for case in MARKED if case in shares]
        lines += [f"{times}× the training length: {_told(part, shares, case, least)}" for case in marked]
        if marked:
            others = {case: own for case, own in shares.items() if case not in MARKED and _reaches(own, least)}
            best_first = sorted(others, key=lambda case: -_average(others[case]))
            names = "; ".join(f"`{case}` {_mean(others[case].values())}" for case in best_first)
            lines.append(f"{times}×, others that reach {least:g}: {names or 'none'}.")
    return lines


def _told(part: dict[str, Any], shares: dict[str, dict[int, float]], case: str, least: float) -> str:
    """Whether a case reaches a mark, by which seeds, and those that stand beside it."""
    own = shares[case]
    chosen_on = () if part["study"].get("recipe") else CHOSEN_ON.get(part["rows"][0]["size"], ())
    told = [f"`{case}` {_mean(own.values())}, mark {least:g}: {_verdict(own, least)}"]
    chosen = {seed: share for seed, share in own.items() if seed in chosen_on}
    if 0 < len(chosen) < len(own):
        fresh = {seed: share for seed, share in own.items() if seed not in chosen}
        for group in (chosen, fresh):
            told.append(f"{_listed(group)} alone {_average(group):.2f}: {_verdict(group, least)}")
    beside = [f"`{name}` {_mean(shares[name].values())}" for name in MARKED[case] if name in shares]
    return ". ".join(["; ".join(told), *(["; ".join(beside)] if beside else [])]) + "."


def _shares(part: dict[str, Any], length: int) -> dict[str, dict[int, float]]:
    """Case -> seed -> share of keys found at a length."""
    found: dict[str, dict[int, float]] = {}
    for row in sorted(part["rows"], key=lambda row: row["seed"]):
        if row["benchmark"] == "passkey" and row["length"] == length:
            found.setdefault(row["case"], {})[row["seed"]] = row["accuracy"]
    return found


def _average(shares: dict[int, float]) -> float:
    return float(np.mean(list(shares.values())))


def _reaches(shares: dict[int, float], least: float) -> bool:
    return _average(shares) > least - 1e-9  # the mean of 0.9, 0.7 and 0.5 is 0.7


def _verdict(shares: dict[int, float], least: float) -> str:
    return "reached" if _reaches(shares, least) else "not reached"


def _listed(seeds: Iterable[int]) -> str:
    """ "seed 0" or "seeds 0, 1"."""
    names = [str(seed) for seed in sorted(seeds)]
    return f"seed{'s' * (len(names) > 1)} {', '.join(names)}"


def _mean(values: Iterable[float]) -> str:
    shares: Sequence[float] = list(values)
    if len(shares) == 1:
        return f"{shares[0]:.2f} (one seed)"
    return f"{np.mean(shares):.2f} (seeds {', '.join(f'{share:.2f}' for share in shares)})"
