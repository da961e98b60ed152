"""The tables of docs/lsh.md, from results.json."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NAMES = {
    "lsh, s = 5": "LSH, s = 5",
    "lsh, s = 10": "LSH, s = 10",
    "lsh, s = 20": "LSH, s = 20",
    "fixed": "fixed blocks of 2 sigma",
    "alibi": "exact ALiBi, all keys",
    "window, s = 10": "exact ALiBi, one window: longest block of any head",
    "windows, s = 10": "exact ALiBi, a window per head: its longest block",
}
PASSES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
RESULTS, COMPILED = (Path(__file__).with_name(name) for name in ("results.json", "aot_results.json"))
MARK = "<!-- results -->", "<!-- end of results -->"


def write_tables(docs: Path) -> None:
    """Put the tables of the committed results between the marks of docs/lsh.md."""
    before, rest = docs.read_text(encoding="utf-8").split(MARK[0] + "\n")
    after = rest.split("\n" + MARK[1])[1]
    docs.write_text(f"{before}{MARK[0]}\n{committed()}\n{MARK[1]}{after}", encoding="utf-8")


def committed() -> str:
    """The tables of the results that are in the repository."""
    read = lambda path: json.loads(path.read_text(encoding="utf-8"))
    return "\n".join([tables(read(RESULTS)), "", *compiled(read(COMPILED))])


def compiled(report: dict[str, Any]) -> list[str]:
    """What the TPU kernels need, per chip of four; nothing has run there."""
    rows, env = report["rows"], report["env"]
    topologies = list(dict.fromkeys(row["topology"] for row in rows))
    head = " | ".join(f"{name.split(':')[0]}: MiB, s" for name in topologies)
    lines = [
        "TPU kernels compiled ahead of time, forward + backward, four chips as batch × heads = 2 × 2; peak memory per "
        f"chip, and seconds of compilation on two busy CPU cores; jax {env['jax']}, libtpu {env['libtpu']}.",
        "",
        f"| case | B, T, H/Hkv, D | s | dtype | arguments MiB | {head} |",
        "|---" * (5 + len(topologies)) + "|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {row["topology"]: row for row in rows if row["case"] == case}
        row = own[topologies[0]]
        size = f"{row['B']}, {row['T']}, {row['H']}/{row['Hkv']}, {row['D']}"
        cells = [f"{own[t]['memory_bytes'] / 2**20:.0f}, {own[t]['compile_s']:.0f}" for t in topologies]
        name = case + (", documents" if row["segments"] else "")
        arguments = f"{row['argument_bytes'] / 2**20:.0f}"
        lines.append(
            f"| {name} | {size} | {row['samples']} | {row['dtype']} | {arguments} | " + " | ".join(cells) + " |"
        )
    return lines


def tables(report: dict[str, Any]) -> str:
    """Times, memory and checks, as Markdown."""
    rows = report["rows"]
    checked = ["", *checks(rows)] if any(row["pass"] == "check" for row in rows) else []
    return "\n".join([*map(_run, report["runs"].values()), "", *times(rows), "", *memory(rows), *checked])


def _run(env: dict[str, Any]) -> str:
    device = f"{env.get('device', 'no GPU')}, driver {env.get('driver', '?')}"
    versions = ", ".join(f"{n} {env[n]}" for n in ("jax", "jaxlib", "python") if n in env)
    return f"- {device}, {versions}, {env['date']}, commit {env['commit']}."


def timed(rows: list[Row]) -> dict[tuple[str, str, str, int], Row]:
    """(case, implementation, pass, length) -> row."""
    return {(r["case"], r["impl"], r["pass"], r["T"]): r for r in rows if "ms" in r and r["pass"] in PASSES}


def _ways(found: dict[tuple[str, str, str, int], Row]) -> list[tuple[str, str]]:
    """(case, implementation) in the order of NAMES."""
    return sorted({key[:2] for key in found}, key=lambda way: (list(NAMES).index(way[0]), way[1]))


def name(case: str, impl: str) -> str:
    """What a case is called in the tables."""
    return NAMES[case] + (f" (`{impl}`)" if case == "alibi" else "")


def times(rows: list[Row]) -> list[str]:
    """Per pass a table over lengths: ms, and in parentheses how many times the exact kernel's time of the same run."""
    found = timed(rows)
    lengths = sorted({key[3] for key in found})
    lines: list[str] = []
    for which, title in PASSES.items():
        head = " | ".join(f"T = {length:,}" for length in lengths)
        lines += [f"ms, {title} (times faster than exact ALiBi over all keys, `mosaic_gpu`):", ""]
        lines += [f"| | {head} |", "|---" * (len(lengths) + 1) + "|"]
        for case, impl in _ways(found):
            cells = [_cell(found, case, impl, which, length) for length in lengths]
            lines.append(f"| {name(case, impl)} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines[:-1]


def _cell(found: dict[tuple[str, str, str, int], Row], case: str, impl: str, which: str, length: int) -> str:
    row, exact = (found.get((*key, which, length)) for key in ((case, impl), ("alibi", "mosaic_gpu")))
    if row is None:
        return "–"
    digits = 3 if row["ms"] < 10 else 1
    text = f"{row['ms']:.{digits}f}"
    if exact is None or row is exact or row["run"] != exact["run"]:
        return text  # a ratio is of one run
    return f"{text} ({exact['ms'] / row['ms']:.1f}×)"


def memory(rows: list[Row]) -> list[str]:
    """MiB of temporaries, which is all that a call needs beside its inputs, outputs and gradients."""
    found = timed(rows)
    lengths = sorted({key[3] for key in found})[-3:]
    head = " | ".join(f"T = {length:,}" for length in lengths)
    lines = [
        "MiB of temporaries, forward / forward + backward:",
        "",
        f"| | {head} |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for case, impl in _ways(found):
        cells = []
        for length in lengths:
            pair = [found.get((case, impl, which, length)) for which in PASSES]
            cells.append(" / ".join("–" if row is None else f"{row['temp_bytes'] / 2**20:.0f}" for row in pair))
        lines.append(f"| {name(case, impl)} | " + " | ".join(cells) + " |")
    return lines


def checks(rows: list[Row]) -> list[str]:
    """The largest error of every check, or why it failed."""
    lines = ["| check | T | H/Hkv, D | dtype | largest error (of) | same bits twice |", "|---|---|---|---|---|---|"]
    for row in (r for r in rows if r["pass"] == "check"):
        what = row["case"] + ("" if row["causal"] else ", not causal") + (", documents" if row["documents"] else "")
        size = f"{row['T']} | {row['H']}/{row['Hkv']}, {row['D']} | {row['dtype']}"
        if "error" not in row:
            lines.append(f"| {what} | {size} | failed: {row['failed']} | |")
            continue
        worst = max(row["error"], key=lambda n: row["error"][n])
        same = "–" if "deterministic" not in row else "yes" if row["deterministic"] else "no"
        lines.append(f"| {what} | {size} | {row['error'][worst]:.1e} ({worst}) | {same} |")
    return lines
