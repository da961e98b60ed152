"""Figures from result rows: plain dicts in, a matplotlib figure out. Nothing here runs a model.

Rows are those that the evaluations write, with `case` (the scheme) and, where there are several runs, `seed`. The
palette is Okabe and Ito's, which stays apart for colour-blind readers; every line has its own marker and dash as well.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bampath.intervals import over_seeds
from bampath.positions.theory import RETRIEVAL_BOUND

Row = dict[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A8A")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1.5, 1, 1.5)), "-", (0, (5, 1.5)), (0, (1, 1)), "-")
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures, inside a with block."""
    with mpl.rc_context(_STYLE):
        yield


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def perplexity_figure(rows: Iterable[Row], train_length: int, title: str = "Perplexity by position") -> Figure:
    """Perplexity against position, one line per case (mean loss over seeds), the training length marked."""
    cases = _group(rows, "case")
    names = short_names(cases)
    with style():
        figure = Figure(figsize=(7.4, 4.2), layout="constrained")
        axes = figure.add_subplot()
        highest = 0.0
        for index, (case, own) in enumerate(cases.items()):
            windows = _group(own, "start")
            middle = [(w[0]["start"] + w[0]["end"]) / 2 for w in windows.values()]
            loss = np.array([np.mean([row["loss"] for row in w]) for w in windows.values()])
            axes.plot(middle, np.exp(loss), label=names[case], **_look(index))
            highest = max(highest, float(np.exp(loss).max()))
        _training_line(axes, train_length, "trained up to here")
        lowest = min(float(np.exp(row["loss"])) for own in cases.values() for row in own)
        if highest / lowest > 3:
            axes.set_yscale("log")
            _plain_log_ticks(axes, lowest, highest)
        _length_axis(axes, [train_length * 2**k for k in range(9)], train_length)
        end = max(row["end"] for own in cases.values() for row in own)
        axes.set_xlim(min(end, train_length) / 2.2, max(end, train_length) * 1.05)
        axes.set(xlabel="position in the row (tokens)", ylabel="perplexity of held-out text", title=title)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def passkey_figure(
    rows: Iterable[Row],
    train_length: int,
    title: str = "Passkey retrieval by length",
    what: str = "keys found (all digits right)",
) -> Figure:
    """Accuracy (`what`) against prompt length, one line per case with the 95 % interval of `over_seeds`."""
    cases = _group(rows, "case")
    names = short_names(cases)
    with style():
        figure = Figure(figsize=(7.4, 4.2), layout="constrained")
        axes = figure.add_subplot()
        lengths: set[int] = set()
        for index, (case, own) in enumerate(cases.items()):
            pooled = {length: _pool(group) for length, group in sorted(_group(own, "length").items())}
            lengths |= set(pooled)
            shift = 2 ** ((index - (len(cases) - 1) / 2) * 0.07)  # so that error bars do not hide each other
            x = [length * shift for length in pooled]
            y = np.array([hits / n for hits, n in pooled.values()])
            bounds = np.array([_bounds(group) for _, group in sorted(_group(own, "length").items())])
            error = np.abs(np.stack([y - bounds[:, 0], bounds[:, 1] - y]))
            axes.errorbar(x, y, yerr=error, label=names[case], capsize=2, elinewidth=0.8, **_look(index))
        _training_line(axes, train_length, "trained up to here")
        _length_axis(axes, sorted(lengths), train_length)
        axes.set_ylim(-0.04, 1.06)
        axes.set(xlabel="prompt length (tokens)", ylabel=what, title=title)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def heatmap_figure(
    rows: Iterable[Row], train_length: int, title: str = "Passkey by length and depth", what: str = "keys found"
) -> Figure:
    """Share of `what` for each length (columns) and depth of the key (rows), one panel per case."""
    cases = _group(rows, "case")
    names = short_names(cases)
    columns = min(3, len(cases))
    with style():
        figure = Figure(figsize=(3.1 * columns + 0.6, 2.75 * -(-len(cases) // columns) + 0.5), layout="constrained")
        panels = figure.subplots(-(-len(cases) // columns), columns, squeeze=False, sharex=True, sharey=True)
        image = None
        for panel, (case, own) in zip(panels.flat, cases.items(), strict=False):
            image = _heatmap(panel, own, train_length)
            panel.set_title(names[case], fontsize=9.5)
        for panel in panels.flat[len(cases) :]:
            panel.set_visible(False)
        for panel in panels[:, 0]:
            panel.set_ylabel("depth of the key\n(share of noise before it)")
        for panel in panels[-1]:
            panel.set_xlabel("prompt length (tokens)")
        if image is not None:
            bar = figure.colorbar(image, ax=panels, shrink=0.7, pad=0.02)
            bar.set_label(what)
            bar.outline.set_visible(False)
        figure.suptitle(title, fontsize=11)
    return figure


def prior_figure(rows: Iterable[Row], train_length: int, title: str = "Learned priors") -> Figure:
    """The normalised prior of every head by distance, one panel per layer, from rows of `Head.row`."""
    layers = _group(rows, "layer")
    columns = min(4, len(layers))
    with style():
        size = (3.5 * columns + 0.4, 3.0 * -(-len(layers) // columns) + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(-(-len(layers) // columns), columns, squeeze=False, sharex=True, sharey=True)
        for panel, (layer, own) in zip(panels.flat, layers.items(), strict=False):
            keys = own[0]["keys"]
            for index, row in enumerate(own):
                distance, label = np.asarray(row["curve"]["distance"]) + 1, f"head {row['head']}: {row['regime']}"
                panel.plot(distance, row["curve"]["p"], label=label, **_look(index, marker=False))
            panel.plot([1, keys], [1 / keys] * 2, color="#9A9A9A", lw=0.8, zorder=1)
            _training_line(panel, train_length, "training length" if panel is panels.flat[0] else None, at_top=False)
            panel.set(xscale="log", yscale="log", title=f"layer {layer}", ylim=(1e-3 / keys, 2))
            panel.legend(fontsize=min(7.5, 60 / len(own)), loc="upper right")
        for panel in panels.flat[len(layers) :]:
            panel.set_visible(False)
        for panel in panels[:, 0]:
            panel.set_ylabel("prior probability")
        for panel in panels[-1]:
            panel.set_xlabel("distance to the key + 1")
        figure.suptitle(f"{title} (query that sees {keys:,} keys; grey: uniform)", fontsize=11)
    return figure


def exponent_figure(rows: Iterable[Row], title: str = "What the heads have learned") -> Figure:
    """(theta_beta, theta_alpha) of every GGD-BAM head, layers apart by colour and marker, regimes shaded.

    rows: those of `Head.row`, of one run or of several. ValueError if none is of a GGD-BAM prior.
    """
    points = [row for row in rows if "bam/theta_beta" in row["parameters"]]
    if not points:
        raise ValueError("no head has theta_alpha and theta_beta: the scheme has no GGD-BAM prior")
    of = lambda own, name: [row["parameters"][f"bam/{name}"] for row in own]
    with style():
        figure = Figure(figsize=(6.6, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for index, (layer, own) in enumerate(_group(points, "layer").items()):
            colour, again = COLOURS[index % len(COLOURS)], index >= len(COLOURS)  # then the same marks, but hollow
            look: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)], "s": 40 if again else 52}
            look |= {"facecolors": "none" if again else colour, "edgecolors": colour if again else "white"}
            place = of(own, "theta_beta"), of(own, "theta_alpha")
            axes.scatter(*place, label=f"layer {layer}", zorder=3, **look)
        betas = of(points, "theta_beta")
        _regimes(axes, min(-1.0, *betas) - 0.2, max(1.0, *betas) + 0.2)
        axes.margins(y=0.15)
        axes.set(xlabel=r"exponent $\theta_\beta$", ylabel=r"log-scale $\theta_\alpha$", title=title)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _regimes(axes: Axes, low: float, high: float) -> None:
    """Shade the exponents from `low` to `high` by what they mean."""
    at = axes.get_xaxis_transform()
    regimes = ((low, RETRIEVAL_BOUND, "anti-local"), (RETRIEVAL_BOUND, 0, "retrieval"), (0, high, "local"))
    for (left, right, name), colour in zip(regimes, ("#F3E1D4", "#E0EEF7", "#FFFFFF"), strict=True):
        axes.axvspan(left, right, color=colour, zorder=0, lw=0)
        middle = (left + right) / 2
        axes.text(middle, 0.985, name, transform=at, ha="center", va="top", color="#555555", fontsize=8.5)
    axes.axvline(0, color="#555555", lw=0.8)
    axes.axvline(1, color="#9A9A9A", lw=0.8, ls=":")
    axes.text(1.02, 0.02, "Laplace (ALiBi)", transform=at, fontsize=7.5, color="#777777", va="bottom")
    axes.set_xlim(low, high)


def _heatmap(panel: Axes, rows: list[Row], train_length: int, bins: int = 20) -> Any:
    """Each cell shows the samples whose depth is nearest to its own: short prompts have fewer depths than cells."""
    groups = sorted(_group(rows, "length").items())
    lengths = [length for length, _ in groups]
    share = np.stack([_by_depth(group, (np.arange(bins) + 0.5) / bins) for _, group in groups], axis=1)
    image = panel.imshow(share, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
    panel.set_xticks(range(len(lengths)), [short_number(n) for n in lengths])
    panel.set_yticks([-0.5, bins / 2 - 0.5, bins - 0.5], ["0", "0.5", "1"])
    panel.grid(False)
    inside = sum(length <= train_length for length in lengths)
    if 0 < inside < len(lengths):
        panel.axvline(inside - 0.5, color="white", lw=2.2)
        panel.axvline(inside - 0.5, color="#D55E00", lw=1.2)
    return image


def _by_depth(rows: list[Row], places: np.ndarray) -> np.ndarray:
    """Share of keys found among the samples of the depth nearest to each of `places`."""
    samples = [sample for row in rows for sample in row["depths"]]
    depths = np.array([sample["depth"] for sample in samples])
    correct = np.array([sample["correct"] for sample in samples], float)
    gaps = np.abs(depths[None, :] - places[:, None])
    nearest = gaps <= gaps.min(axis=1, keepdims=True) + 1e-9
    return (nearest * correct[None, :]).sum(axis=1) / nearest.sum(axis=1)


def short_names(cases: Iterable[str]) -> dict[str, str]:
    """Specs without their options, for legends and panel titles; with them where two would else be alike: then none
    is shortened, as a name without options would read as the scheme by default."""
    bare = {case: re.sub(r"\([^()]*\)", "", case) for case in cases}
    return bare if len(set(bare.values())) == len(bare) else {case: case for case in bare}


def short_number(n: int) -> str:
    """512, 2k, 16k, 1M: powers of two as people say them."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return f"{n:,}"


def _look(index: int, marker: bool = True) -> dict[str, Any]:
    look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "ls": DASHES[index % len(DASHES)], "lw": 1.6}
    return look | ({"marker": MARKERS[index % len(MARKERS)], "ms": 4.5} if marker else {})


def _training_line(axes: Axes, train_length: int, label: str | None, at_top: bool = True) -> None:
    axes.axvline(train_length, color="#666666", lw=1, ls=(0, (2, 2)), zorder=1)
    if label:
        look: dict[str, Any] = {"fontsize": 7.5, "color": "#555555", "va": "top" if at_top else "bottom"}
        axes.text(train_length, 1.0 if at_top else 0.01, f" {label}", transform=axes.get_xaxis_transform(), **look)


def _length_axis(axes: Axes, lengths: Sequence[int], train_length: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{short_number(n)}\n{n / train_length:g}×" for n in lengths])
    axes.minorticks_off()


def _plain_log_ticks(axes: Axes, low: float, high: float) -> None:
    steps = [b * 10**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for b in (1, 2, 5)]
    shown = [s for s in steps if low / 1.5 <= s <= high * 1.5]
    axes.set_yticks(shown, [f"{s:,.0f}" for s in shown])
    axes.minorticks_off()


def _group(rows: Iterable[Row], key: str) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    if not found:
        raise ValueError("there are no rows to show")
    return found


def _pool(rows: list[Row]) -> tuple[int, int]:
    return sum(row["correct"] for row in rows), sum(row["samples"] for row in rows)


def _bounds(rows: list[Row]) -> tuple[float, float]:
    return over_seeds([row["correct"] for row in rows], [row["samples"] for row in rows])
