"""The tables of docs/scaling.md from results.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.multi_gpu.cells import SHAPES
from experiments.studies import read_kept
from experiments.tables import replace_between, table

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
MARKS = ("<!-- multi gpu -->", "<!-- end of multi gpu -->")
Row = dict[str, Any]


def write_tables(results: Path, page: Path = PAGE) -> None:
    """Put the tables of a results file between the marks of a page."""
    replace_between(page, *MARKS, tables(read_kept(results)))


def tables(results: dict[str, Any]) -> str:
    rows = results["rows"]
    parts = ["\n".join(f"- {_made(name, env)}" for name, env in results["runs"].items())]
    trained = [row for row in rows if row["pass"] == "train_step" and "ms" in row]
    for title, kept in _groups(trained).items():
        parts += [f"**{title}**", train_table(kept, trained)]
    attended = [row for row in rows if row["pass"] in ("fwd", "fwd_bwd") and "ms" in row]
    if attended:
        parts += ["**Attention alone, one row of 131,072 tokens spread over the GPUs**", attention_table(attended)]
    losses = [row for row in rows if row["pass"] == "losses"]
    if losses:
        parts += [
            "**Losses of a small model over five steps: largest difference from one GPU, nats**",
            loss_table(losses),
        ]
    missing = not_measured(rows)
    if missing:
        parts += ["Not measured:", missing]
    return "\n\n".join(parts)


def not_measured(rows: Sequence[Row]) -> str:
    """Cells without a result, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "failed" in row and row["pass"] != "losses":
            reasons.setdefault(_short(row["failed"]), []).append(f"`{row['cell']}`")
    return "\n".join(f"- {reason}: {', '.join(cells)}" for reason, cells in reasons.items())


def _made(name: str, env: Row) -> str:
    """With what a run was made."""
    with_what = f"{env.get('device')}, driver {env.get('driver')}, jax {env.get('jax')}"
    beside = f"; {env['beside']}" if "beside" in env else ""
    return f"{name}: {with_what}, commit `{env.get('commit')}`; XLA flags `{env.get('flags')}`{beside}."


def _short(text: str) -> str:
    return text if len(text) < 160 else f"{text[:100]} … {text[-50:]}"


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by what is spread, each with its one GPU."""
    wanted = {
        "FSDP, the same rows on every GPU": ("fsdp", "weak"),
        "FSDP, the same rows in all": ("fsdp", "strong"),
        "Tensor parallel, the same rows in all": ("tensor", "strong"),
        "Context parallel, one row": ("context", "strong"),
    }
    found = {}
    for title, key in wanted.items():
        several = [row for row in rows if (row["strategy"], row["scaling"]) == key]
        used = {(row["shape"], row["case"], row["variant"].replace("no overlap", "")) for row in several}
        single = [row for row in rows if row["gpus"] == 1 and (row["shape"], row["case"], row["variant"]) in used]
        if several:
            found[title] = sorted([*single, *several], key=_order)
    return found


def _order(row: Row) -> tuple[Any, ...]:
    return list(SHAPES).index(row["shape"]), row["case"], row["variant"], row["gpus"]


def one_gpu(row: Row, rows: Sequence[Row]) -> Row | None:
    """The same on one GPU. A program without overlap is compared with the ordinary one."""
    variant = row["variant"].replace("no overlap", "")
    same = lambda other: all(other[key] == row[key] for key in ("shape", "case", "pass"))
    return next((r for r in rows if r["gpus"] == 1 and r["variant"] == variant and same(r)), None)


def efficiency(row: Row, rows: Sequence[Row]) -> float | None:
    """Tokens per second over those of so many times one GPU; None where one GPU was not measured."""
    one = one_gpu(row, rows)
    return None if one is None else row["tokens_per_second"] / (row["gpus"] * one["tokens_per_second"])


def apart(row: Row, rows: Sequence[Row]) -> tuple[float, float] | None:
    """Differences of the first loss, and the largest of those after it, from one GPU; None where data differs."""
    one = one_gpu(row, rows)
    if one is None or one["B"] != row["B"] or row["gpus"] == 1:
        return None
    gaps = [abs(a - b) for a, b in zip(row["losses"], one["losses"], strict=False)]
    return gaps[0], max(gaps[1:])


def train_table(rows: Sequence[Row], every: Sequence[Row]) -> str:
    head = ["configuration", "scheme", "GPUs", "rows × length", "ms per step", "tokens/s", "MFU", "of n × one GPU"]
    head += ["GiB per GPU", "collectives", "alone", "loss apart from one GPU (first, later)"]
    body = []
    for row in rows:
        name = f"`{row['case']}`" + (f" ({row['variant']})" if row["variant"] else "")
        share, gaps = efficiency(row, every), apart(row, every)
        memory = max((n for n in row["memory_bytes"] if n), default=0)
        body.append(
            [
                row["shape"],
                name,
                str(row["gpus"]),
                f"{row['B']} × {row['T']:,}",
                f"{row['ms']:.1f} ({row['ms_min']:.1f} – {row['ms_max']:.1f})",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['mfu']:.1%}" if row["mfu"] else "",
                f"{share:.1%}" if share and row["gpus"] > 1 else "",
                f"{memory / 2**30:.1f}",
                *_shares(row),
                "" if gaps is None else f"{gaps[0]:.1e}, {gaps[1]:.1e}",
            ]
        )
    return table(head, body)


def _shares(row: Row) -> list[str]:
    """Share of a profiled step in which collectives run, and in which nothing else does."""
    where = row.get("where") or {}
    if row["gpus"] == 1 or not where:
        return ["", ""]
    return [f"{where[name] / where['step']:.1%}" for name in ("collectives", "exposed")]


def attention_table(rows: Sequence[Row]) -> str:
    head = ["scheme", "pass", "GPUs", "ms", "TFLOP/s per GPU", "of one GPU's rate", "collectives", "alone"]
    body = []
    for row in sorted(rows, key=lambda row: (row["case"], row["pass"], row["gpus"])):
        one = one_gpu(row, rows)
        share = one["ms"] / (row["gpus"] * row["ms"]) if one else None
        body.append(
            [
                f"`{row['case']}`",
                row["pass"],
                str(row["gpus"]),
                f"{row['ms']:.1f} ({row['ms_min']:.1f} – {row['ms_max']:.1f})",
                f"{row['tflops_per_gpu']:.0f}",
                f"{share:.1%}" if share and row["gpus"] > 1 else "",
                *_shares(row),
            ]
        )
    return table(head, body)


def loss_table(rows: Sequence[Row]) -> str:
    """Schemes and types by meshes: the largest difference of the losses from one GPU's, nats."""
    spread = [row for row in rows if row.get("mesh") != "one" or not row.get("passed", True)]
    meshes = list(dict.fromkeys(row["mesh"] for row in spread if "mesh" in row))
    body = []
    for case, dtype in dict.fromkeys((row["case"], row.get("dtype", "")) for row in spread):
        own = {row.get("mesh"): row for row in spread if (row["case"], row.get("dtype", "")) == (case, dtype)}
        tolerance = next((f"{row['tolerance']:g}" for row in own.values() if "tolerance" in row), "")
        body.append([f"`{case}`", dtype, tolerance, *(_loss_cell(own.get(mesh)) for mesh in meshes)])
    return table(["scheme", "type", "tolerance", *meshes], body)


def _loss_cell(row: Row | None) -> str:
    if row is None:
        return ""
    said = f"{row['apart']:.1e}" if "apart" in row else _short(str(row.get("failed", "")))
    return said if row.get("passed") else f"**{said}**"
