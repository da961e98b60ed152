"""The tables of docs/path.md, from results.json."""

import json
import re
from pathlib import Path
from typing import Any

from kernels.path.bench_cases import LIMITS

Row = dict[str, Any]
RESULTS = Path(__file__).with_name("results.json")
DOCS = Path(__file__).parents[2] / "docs" / "path.md"


def tables(results: Path = RESULTS) -> str:
    """All of them, as Markdown."""
    data = json.loads(results.read_text())
    env, rows = data["env"], data["rows"]
    names = ("device", "driver", "python", "jax", "torch", "triton", "flash-linear-attention", "date", "commit")
    known = [f"{n} {env[n]}" for n in names if env.get(n)]
    parts = (speed(rows), kernels(rows), decode(rows), checks(rows))
    return "\n".join([", ".join(known) + ".", *(line for part in parts if part for line in ("", *part))])


def _ms(row: Row) -> str:
    return f"{row['ms']:.2f} ({row['ms_min']:.2f}–{row['ms_max']:.2f})"


def _memory(row: Row, name: str) -> str:
    """In units of q, of 16 bits."""
    return f"{row[name] / (2 * row['B'] * row['T'] * row['H'] * row['D']):.1f}" if name in row else "–"


def speed(rows: list[Row]) -> list[str]:
    """Forward, and forward with backward, beside FLA and beside attention without transport."""
    out = [
        "| B, T, H, D | case | pass | ms | FLA ms | FLA / ours | ours / plain attention | memory / q | FLA's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    key = lambda r: tuple(r[n] for n in ("case", "pass", "B", "T", "H", "D"))
    theirs = {key(r): r for r in rows if r.get("impl") == "fla" and "ms" in r}
    for r in rows:
        if r.get("impl") != "mosaic_gpu" or r.get("pass") not in ("fwd", "fwd_bwd") or "ms" not in r:
            continue
        shape = ", ".join(str(r[n]) for n in "BTHD")
        other, ratio = theirs.get(key(r)), r.get("ratio", {})
        fla = [_ms(other), f"{ratio['fla']:.2f}"] if other else ["–", "–"]
        plain = f"{1 / ratio['plain']:.2f}" if "plain" in ratio else "–"
        memory = [_memory(r, "memory_bytes"), _memory(other or {}, "peak_bytes")]
        out.append(
            "| " + " | ".join([shape, r["case"], r["pass"].replace("_", " + "), _ms(r), *fla, plain, *memory]) + " |"
        )
    skipped = sorted({r["skipped"] for r in rows if r.get("impl") == "fla" and "skipped" in r})
    return [*out, "", f"FLA was skipped: {'; '.join(skipped)}."] if skipped else out


def kernels(rows: list[Row]) -> list[str]:
    """Where the time of forward and backward goes: ms of every kernel that takes a hundredth somewhere."""
    found = [r for r in rows if r.get("pass") == "fwd_bwd kernels" and r.get("kernels")]
    if not found:
        return []
    short = lambda name: re.split(r"_d\d+_", name)[0]
    spent: list[dict[str, float]] = []
    for r in found:
        one: dict[str, float] = {}
        for name, (_, ms) in r["kernels"].items():
            one[short(name)] = one.get(short(name), 0) + ms
        spent.append(one)
    heads = [", ".join(str(r[n]) for n in "BTHD") for r in found]
    out = ["| kernel, ms in forward + backward | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    names = sorted({n for one in spent for n in one}, key=lambda n: -sum(one.get(n, 0) for one in spent))
    large = [n for n in names if any(one.get(n, 0) >= 0.01 * sum(one.values()) for one in spent)]
    for n in large:
        out.append(f"| `{n}` | " + " | ".join(f"{one[n]:.2f}" if n in one else "–" for one in spent) + " |")
    rest = [sum(ms for n, ms in one.items() if n not in large) for one in spent]
    return [*out, "| the rest | " + " | ".join(f"{ms:.2f}" for ms in rest) + " |"]


def decode(rows: list[Row]) -> list[str]:
    """Tokens per second of the ways to keep a cache."""
    out = ["| cache | rows | way | ms for 64 tokens a row | tokens/s | over rewriting |", "|---|---|---|---|---|---|"]
    for r in rows:
        if r.get("pass") == "decode" and "ms" in r:
            ratio = r.get("ratio", {}).get("rewritten")
            gain = "1.00" if ratio is None else f"{ratio:.2f}"
            out.append(
                f"| {r['T']} | {r['B']} | {r['case']}, {r['impl']} | {_ms(r)} | {r['tokens_per_s']:.0f} | {gain} |"
            )
    return out


def _error(error: float | None, limit: float | None) -> str:
    if error is None:
        return "–"
    return f"{error:.1e}" if limit is None or error <= limit else f"**{error:.1e}**"


def checks(rows: list[Row]) -> list[str]:
    """The errors of every output and gradient; those above a limit are bold."""
    names = ("o", "dq", "dk", "dv", "dw", "dbeta", "dgates", "dsharpness", "dalpha")
    head = " | ".join(names)
    out = [f"| check | B, T, H, D | of | {head} | same bits twice |", "|---|---|---|" + "---|" * (len(names) + 1)]
    for r in rows:
        if r.get("pass") == "check" and "error" in r:
            shape = ", ".join(str(r[n]) for n in "BTHD")
            errors = [_error(r["error"].get(n), LIMITS.get(n)) for n in names]
            same = {True: "yes", False: "NO", None: "–"}[r.get("same_bits")]
            who = "FLA" if r["impl"] == "fla" else "ours"
            out.append("| " + " | ".join([r["case"], shape, who, *errors, same]) + " |")
    return out
