"""The tables of docs/path.md, from results.json."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = Path(__file__).with_name("results.json")
DOCS = Path(__file__).parents[2] / "docs" / "path.md"


def tables(results: Path = RESULTS) -> str:
    """All of them, as Markdown."""
    data = json.loads(results.read_text())
    env, rows = data["env"], data["rows"]
    names = ("device", "driver", "python", "jax", "torch", "triton", "flash-linear-attention", "date")
    known = [f"{n} {env[n]}" for n in names if env.get(n)]
    return "\n".join([", ".join(known) + ".", "", *speed(rows), "", *decode(rows), "", *checks(rows)])


def _ms(row: Row) -> str:
    return f"{row['ms']:.2f} ({row['ms_min']:.2f}–{row['ms_max']:.2f})"


def speed(rows: list[Row]) -> list[str]:
    out = [
        "| B, T, H, D | case | pass | ms | FLA ms | FLA / ours | ours / plain attention | memory MiB |",
        "|---|---|---|---|---|---|---|---|",
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
        memory = f"{r['memory_bytes'] / 2**20:.0f}"
        out.append(
            "| " + " | ".join([shape, r["case"], r["pass"].replace("_", " + "), _ms(r), *fla, plain, memory]) + " |"
        )
    skipped = next((r["skipped"] for r in rows if r.get("impl") == "fla" and "case" not in r), None)
    return [*out, "", f"FLA was skipped: {skipped}."] if skipped else out


def decode(rows: list[Row]) -> list[str]:
    out = ["| cache | rows | way | ms for 64 tokens a row | tokens/s | over rewriting |", "|---|---|---|---|---|---|"]
    for r in rows:
        if r.get("pass") == "decode" and "ms" in r:
            ratio = r.get("ratio", {}).get("rewritten")
            gain = "1.00" if ratio is None else f"{ratio:.2f}"
            out.append(f"| {r['T']} | {r['B']} | {r['case']} | {_ms(r)} | {r['tokens_per_s']:.0f} | {gain} |")
    return out


def checks(rows: list[Row]) -> list[str]:
    names = ("o", "dq", "dk", "dv", "dw", "dbeta", "dgates", "dsharpness", "dalpha")
    head = " | ".join(names)
    out = [f"| check | B, T, H, D | {head} | same bits twice |", "|---|---|" + "---|" * (len(names) + 1)]
    for r in rows:
        if r.get("pass") == "check" and "error" in r:
            shape = ", ".join(str(r[n]) for n in "BTHD")
            errors = [f"{r['error'][n]:.1e}" if n in r["error"] else "–" for n in names]
            out.append("| " + " | ".join([r["case"], shape, *errors, "yes" if r["same_bits"] else "NO"]) + " |")
    return out
