"""What the study says about speed and about trained models: tables and figures of kernels/lsh/results.json and of
training.json."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from bampath.analysis.figures import COLOURS, DASHES, MARKERS, style
from kernels.lsh.bench_tables import NAMES, PASSES, timed

Row = dict[str, Any]
SPEED = (
    *(("lsh, s = 5", "pallas_triton"), ("lsh, s = 10", "pallas_triton"), ("lsh, s = 20", "pallas_triton")),
    *(("fixed", "pallas_triton"), ("windows, s = 10", "mosaic_gpu"), ("window, s = 10", "mosaic_gpu")),
    ("alibi", "mosaic_gpu"),
)
MULTIPLES = (1.0, 1.25, 2.0)  # of the training length
NAMED = {
    "alibi": "exact ALiBi",
    "lsh(samples=10)": "LSH, s = 10",
    "lsh(samples=20)": "LSH, s = 20",
    "lsh(samples=1,law=fixed)": "fixed blocks of 2 sigma",
    "nope": "no bias",
    "alibi+window(size=1024)": "exact ALiBi, window 1024",
}


def speed_figure(rows: list[Row]) -> Figure:
    """ms against length, forward and forward + backward."""
    found = timed(rows)
    with style():
        figure = Figure(figsize=(10.4, 4.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for panel, (which, title) in zip(panels, PASSES.items(), strict=True):
            for n, (case, impl) in enumerate(SPEED):
                own = sorted((k[3], r["ms"]) for k, r in found.items() if k[:3] == (case, impl, which))
                look = {"color": COLOURS[n % len(COLOURS)], "marker": MARKERS[n % len(MARKERS)], "markersize": 4}
                if not own:
                    continue
                label = NAMES[case].partition(":")[0]
                panel.plot(
                    [x for x, _ in own], [y for _, y in own], label=label, linestyle=DASHES[n % len(DASHES)], **look
                )
            panel.set(xscale="log", yscale="log", xlabel="length T", ylabel="ms", title=title)
            panel.set_xscale("log", base=2)
        panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def crossover(rows: list[Row], which: str, rival: str) -> str:
    """Where LSH with ten samples becomes faster than a rival: between which measured lengths, or always or never."""
    found = timed(rows)
    times = lambda case, impl: {k[3]: r["ms"] for k, r in found.items() if k[:3] == (case, impl, which)}
    own, other = times("lsh, s = 10", "pallas_triton"), times(rival, "mosaic_gpu")
    lengths = sorted(own.keys() & other.keys())
    wins = [length for length in lengths if own[length] < other[length]]
    if not wins:
        return f"at none of the lengths up to {lengths[-1]:,}"
    if wins == lengths:
        return f"at every length from {lengths[0]:,} on"
    after = next(length for length in lengths if all(own[n] < other[n] for n in lengths if n >= length))
    before = max(length for length in lengths if length < after)
    return f"between {before:,} and {after:,} tokens"


def losses(rows: Iterable[Row], case: str, read: str) -> tuple[np.ndarray, list[Row]]:
    """Mean loss per window of positions [draws, windows], and the rows."""
    own = [r for r in rows if r["benchmark"] == "perplexity" and (r["case"], r["read"]) == (case, read)]
    return np.array([r["loss"] for r in own]), own


def pairs(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """(trained under, read under), in order."""
    return list(dict.fromkeys((r["case"], r["read"]) for r in rows if r["benchmark"] == "perplexity"))


def training_figure(rows: list[Row], length: int) -> Figure:
    """Perplexity by position, each model under its own scheme; the training length as a line."""
    with style():
        figure = Figure(figsize=(7.8, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for n, case in enumerate(case for case, read in pairs(rows) if case == read):
            found, own = losses(rows, case, case)
            ends = np.arange(1, found.shape[1] + 1) * own[0]["window"]
            look = {"color": COLOURS[n], "marker": MARKERS[n], "linestyle": DASHES[n], "markersize": 4}
            axes.plot(ends, np.exp(found.mean(0)), label=NAMED[case], **look)
        axes.axvline(length, color="#8A8A8A", linewidth=0.8)
        axes.set(xlabel="position in the row", ylabel="perplexity", title="Held-out text; the line: training length")
        axes.set_yscale("log")  # a model without any bias is far from the others
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.4, 1.6, 1.8, 2)))
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def training_tables(results: Row) -> list[str]:
    """Perplexity of rows of 1, 1.25 and 2 training lengths, and of their last windows."""
    rows, plan = results["rows"], results["plan"]
    length = plan["length"]
    tokens = next(r["tokens"] for r in rows if r["benchmark"] == "training")
    head = " | ".join(f"{m:g} T" for m in MULTIPLES)
    lines = [
        f"{plan['layers']} layers of width {plan['dim']}, {plan['heads']} heads, T = {length} tokens, {plan['steps']} "
        f"steps of {plan['batch']} rows ({tokens / 1e6:.1f}M tokens), the same rows for all. Perplexity of all tokens "
        "of held-out rows of that length; after the comma that of the last 512 alone. Where grids are drawn: mean over "
        "three fresh draws, and the range.",
        "",
        f"| trained under | read under | {head} |",
        "|---|---|" + "---|" * len(MULTIPLES),
    ]
    for case, read in pairs(rows):
        found, own = losses(rows, case, read)
        cells = []
        for multiple in MULTIPLES:
            windows = int(multiple * length) // own[0]["window"]
            whole, last = np.exp(found[:, :windows].mean(1)), np.exp(found[:, windows - 1])
            spread = f" ({whole.min():.2f}–{whole.max():.2f})" if len(whole) > 1 else ""
            cells.append(f"{whole.mean():.2f}{spread}, {last.mean():.2f}")
        lines.append(f"| {NAMED[case]} | {NAMED[read]} | " + " | ".join(cells) + " |")
    return lines
