"""Whether BAM+SSMax finds the keys that it was to find, and which other cases do, in numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.bam_h200.config import LOOKED_AT

MARKS = ((4, 0.9), (32, 0.7))  # times the training length, share of keys that BAM+SSMax was to find there
CHOSEN_ON = (0, 1, 2)  # the seeds of BAM+SSMax whose passkeys were looked at when the recipe was chosen


def marks(part: dict[str, Any]) -> list[str]:
    """One line per mark: BAM+SSMax over all its seeds and over those that the recipe was chosen on, RoPE and ALiBi
    beside it, and every other case whose mean over seeds reaches the mark."""
    main, *beside = LOOKED_AT
    lines = []
    for times, least in MARKS:
        shares = _shares(part, times * part["study"]["train_length"])
        if main not in shares:
            continue
        own = shares.pop(main)
        told = [f"{times}× the training length: `{main}` {_mean(own.values())}, mark {least:g}: {_verdict(own, least)}"]
        chosen = {seed: share for seed, share in own.items() if seed in CHOSEN_ON}
        if 0 < len(chosen) < len(own):
            told.append(f"over seeds {_listed(chosen)} alone {_average(chosen):.2f}: {_verdict(chosen, least)}")
            fresh = {seed: share for seed, share in own.items() if seed not in chosen}
            told.append(f"over seeds {_listed(fresh)} alone {_average(fresh):.2f}: {_verdict(fresh, least)}")
        beside_it = [f"`{case}` {_mean(shares[case].values())}" for case in beside if case in shares]
        others = sorted(((_average(found), case) for case, found in shares.items()), key=lambda one: -one[0])
        reached = [f"`{case}` {_mean(shares[case].values())}" for _, case in others if _reaches(shares[case], least)]
        also = f"Others that reach it: {'; '.join(reached)}." if reached else "No other case reaches it."
        lines.append(". ".join(["; ".join(told), *(["; ".join(beside_it)] if beside_it else []), also]))
    return lines


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
    return ", ".join(map(str, sorted(seeds)))


def _mean(values: Iterable[float]) -> str:
    shares: Sequence[float] = list(values)
    if len(shares) == 1:
        return f"{shares[0]:.2f} (one seed)"
    return f"{np.mean(shares):.2f} (seeds {', '.join(f'{share:.2f}' for share in shares)})"
