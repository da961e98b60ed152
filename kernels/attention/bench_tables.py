"""The measured tables of docs/kernels.md, from results.json."""

import itertools
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
SHOWN = ("device", "driver", "python", "jax", "nvidia-cudnn-cu13", "torch", "triton", "fla-core", "tokamax")
Row = dict[str, Any]


def tables(report: dict[str, Any]) -> str:
    """All of them, as Markdown."""
    rows = report["rows"]
    known = [f"{n} {v}" for n in (*SHOWN, "flash-attn3-jax") for v in [versions(report, n)] if v]
    letters = dict(zip(report["runs"], "abcdefghijklmnopqrstuvwxyz", strict=False))
    runs = [f"{letter}: {name}, commit {report['runs'][name]['commit']}" for name, letter in letters.items()]
    head = [", ".join(known) + ".", "", f"Runs: {'; '.join(runs)}. Ratios are within a run.", ""]
    return "\n".join([*head, *speed(rows, letters), "", *decode(rows, letters), "", *checks(rows, letters)])


def versions(report: dict[str, Any], package: str) -> str:
    """Of all runs; a run may have gone without a package that is a peer in another."""
    found = dict.fromkeys(env[package] for env in report["runs"].values() if package in env)
    return " and ".join([v for v in found if v != "not installed"] or found)


def label(row: Row) -> str:
    """What a row is called: its implementation, unless that is the fastest one, and its case."""
    names = {"mosaic_gpu": "", "cudnn": "cuDNN (jax), ", "pallas_triton": "portable, "}
    extra = ", float32" if row["dtype"] == "float32" else ""
    return names.get(row["impl"], row["impl"] + ", ") + row["case"] + extra


def speed(rows: list[Row], letters: dict[str, str]) -> list[str]:
    """Forward, and forward with backward, of every shape and case; letters: of the runs."""
    lines = [
        "| B, T, H, D | case | run | forward ms | TFLOP/s | ratio | fwd + bwd ms | TFLOP/s | ratio | memory MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    timed = [r for r in rows if r["pass"] in ("fwd", "fwd_bwd") and ("ms" in r or "skipped" in r)]
    shapes = dict.fromkeys(tuple(r[n] for n in "BTHD") for r in timed if "B" in r)
    for shape, run in itertools.product(shapes, letters):
        mine = [r for r in timed if "B" in r and tuple(r[n] for n in "BTHD") == shape and r["run"] == run]
        for name in dict.fromkeys(map(label, mine)):
            cells: list[str] = []
            peak = None
            for which in ("fwd", "fwd_bwd"):
                match = [r for r in mine if label(r) == name and r["pass"] == which and "ms" in r]
                cells += _times(match[0], mine) if match else ["–"] * 3
                peak = match[0].get("memory_bytes", peak) if match else peak
            skipped = [r["skipped"] for r in mine if label(r) == name and "skipped" in r]
            if skipped:
                cells[0] = f"skipped: {skipped[0]}"
            size = f"{peak / 2**20:.0f}" if peak else "–"
            lines.append(f"| {', '.join(map(str, shape))} | {name} | {letters[run]} | {' | '.join(cells)} | {size} |")
    return lines


def _times(row: Row, others: list[Row]) -> list[str]:
    """ms with spread, TFLOP/s, and cuDNN's time over this one."""
    digits = 3 if row["ms"] < 100 else 1
    shown = f"{row['ms']:.{digits}f} ({row['ms_min']:.{digits}f}–{row['ms_max']:.{digits}f})"
    base = [r for r in others if r["impl"] == "cudnn" and r["pass"] == row["pass"] and r["dtype"] == row["dtype"]]
    return [shown, f"{row['tflops']:.0f}", f"{base[0]['ms'] / row['ms']:.2f}" if base else "–"]


def decode(rows: list[Row], letters: dict[str, str]) -> list[str]:
    """Time of a token, and how much of the speed of a copy that is."""
    copied = next((r for r in rows if r["pass"] == "copy" and "bandwidth" in r), None)
    if copied is None:
        return []
    copy = copied["bandwidth"]
    lines = [
        f"Decode, run {letters[copied['run']]}: copying 2 GiB reads and writes {copy / 1e12:.2f} TB/s.",
        "",
        "| case | B, S, H, Hkv, D | tokens | backend | µs per layer | K and V read, TB/s | of the copy |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if r["pass"] == "decode" and "ms" in r:
            shape = ", ".join(str(r[n]) for n in ("B", "S", "H", "Hkv", "D"))
            spread = f"{r['ms'] * 1e3:.1f} ({r['ms_min'] * 1e3:.1f}–{r['ms_max'] * 1e3:.1f})"
            share = f"{r['bandwidth'] / 1e12:.2f} | {r['bandwidth'] / copy:.2f}"
            lines.append(f"| {r['case']} | {shape} | {r['T']} | {r['impl']} | {spread} | {share} |")
    return lines


def checks(rows: list[Row], letters: dict[str, str]) -> list[str]:
    """The largest error of every check."""
    from kernels.attention.bench_cases import Case
    from kernels.attention.bench_parts import judged

    lines = [
        "| check | run | backend | dtype | shape | largest error (of) | same bits twice |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if r["pass"] == "check" and "error" in r:
            documents = 1 if r["case"] == "one token per document" else 0
            prior = "ggd_extreme" if "extreme" in r["case"] else None
            errors = judged(
                Case(r["case"], r["B"], r["T"], r["H"], r["D"], prior, S=r["S"], documents=documents), r["error"]
            )
            worst = max(errors, key=lambda n: errors[n])
            shape = f"{r['B']}, {r['T']}×{r['S']}, {r['H']}, {r['D']}"
            same = "yes" if r["deterministic"] else "no"
            lines.append(
                f"| {r['case']} | {letters[r['run']]} | {r['impl']} | {r['dtype']} | {shape} "
                f"| {errors[worst]:.1e} ({worst}) | {same} |"
            )
    return lines
