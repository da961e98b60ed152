"""Tables of the study's rows in Markdown, beside those that all studies share (experiments/tables.py)."""

from typing import Any

import numpy as np

from bampath.analysis.figures import short_number
from experiments.tables import by, pooled, table


def niah_table(part: dict[str, Any]) -> str:
    """RULER's single needles: share of answers begun right, pooled over seeds, and in brackets that of their tokens."""
    rows = [row for row in part["rows"] if row["benchmark"] == "niah"]
    lengths = sorted({row["length"] for row in rows})
    body = []
    for case, mine in by(rows, "case").items():
        for task, own in sorted(by(mine, "task").items()):
            cells = []
            for length in lengths:
                same = [row for row in own if row["length"] == length]
                tokens = np.mean([row["token_accuracy"] for row in same]) if same else 0.0
                cells.append(f"{pooled(same)} ({tokens:.2f})" if same else "")
            body.append([f"`{case}`", task.removeprefix("niah_"), *cells])
    return table(["scheme", "task", *map(short_number, lengths)], body)


def digit_table(part: dict[str, Any]) -> str:
    """Share of the keys' digits that are right, mean over seeds, and in brackets the seeds."""
    rows = [row for row in part["rows"] if row["benchmark"] == "passkey"]
    lengths = sorted({row["length"] for row in rows})
    body = []
    for case, own in by(rows, "case").items():
        cells = []
        for length in lengths:
            shares = [r["token_accuracy"] for r in sorted(own, key=lambda r: r["seed"]) if r["length"] == length]
            cells.append(f"{np.mean(shares):.2f} ({', '.join(f'{x:.2f}' for x in shares)})" if shares else "")
        body.append([f"`{case}`", *cells])
    return table(["scheme", *map(short_number, lengths)], body)


def prior_table(part: dict[str, Any]) -> str:
    """How many heads of all seeds fall into each of BAM's clusters, the range of theta_beta, and SSMax's s."""
    rows = [row for row in part["rows"] if row["benchmark"] == "prior" and "bam/theta_beta" in row["parameters"]]
    if not rows:
        return ""
    kinds = ("local", "uniform", "retrieval", "anti-local")
    head = ["scheme", "heads", *kinds, "theta_beta", "theta_alpha", "SSMax's s"]
    body = []
    for case, own in by(rows, "case").items():
        of = lambda name, own=own: [row["parameters"][name] for row in own if name in row["parameters"]]
        span = lambda values: f"{min(values):.2f} … {max(values):.2f}" if values else ""
        counts = [str(sum(row["regime"] == kind for row in own)) for kind in kinds]
        spans = [span(of(name)) for name in ("bam/theta_beta", "bam/theta_alpha", "ssmax/scale")]
        body.append([f"`{case}`", str(len(own)), *counts, *spans])
    return table(head, body)


def attention_table(part: dict[str, Any]) -> str:
    """The largest weight of any head on the sentence with the key, mean over seeds, and which head it is."""
    rows = [row for row in part["rows"] if row["benchmark"] == "attention"]
    if not rows:
        return ""
    lengths = sorted({row["length"] for row in rows})
    head = ["scheme", *(f"at {short_number(length)}" for length in lengths)]
    body = []
    for case, own in by(rows, "case").items():
        cells = []
        for length in lengths:
            runs = by([row for row in own if row["length"] == length], "seed").values()
            best = [max(run, key=lambda row: row["needle"]) for run in runs]
            names = ", ".join(f"{row['layer']}.{row['head']}" for row in best)
            cells.append(f"{np.mean([row['needle'] for row in best]):.2f} (layer.head {names})" if best else "")
        body.append([f"`{case}`", *cells])
    return table(head, body)


def finder_table(part: dict[str, Any], least: float = 0.5) -> str:
    """The heads with at least that weight on the key's sentence at the longest prompt looked at, and their priors."""
    rows = [row for row in part["rows"] if row["benchmark"] == "attention"]
    farthest = max((row["length"] for row in rows), default=0)
    name = lambda row: (row["case"], row["seed"], row["layer"], row["head"])
    priors = {name(row): row["parameters"] for row in part["rows"] if row["benchmark"] == "prior"}
    shown = [row for row in rows if row["length"] == farthest and row["needle"] >= least]
    shown = [row for row in shown if "bam/theta_beta" in priors.get(name(row), {})]
    body = []
    for row in sorted(shown, key=name):
        own = priors[name(row)]
        values = [f"{own[key]:.2f}" for key in ("bam/theta_beta", "bam/theta_alpha", "ssmax/scale") if key in own]
        rank = sorted(p["bam/theta_beta"] for key, p in priors.items() if key[:2] == name(row)[:2])
        place = f"{1 + rank.index(own['bam/theta_beta'])} of {len(rank)}"
        where = f"{row['layer']}.{row['head']}"
        body.append([f"`{row['case']}`", str(row["seed"]), where, f"{row['needle']:.2f}", *values, place])
    if not body:
        return ""
    head = ["scheme", "seed", "layer.head", f"weight at {short_number(farthest)}", "theta_beta", "theta_alpha"]
    return table([*head, "SSMax's s", "theta_beta's rank in its model"], body)


def speed_table(speed: dict[str, Any]) -> str:
    """Tokens per second, MFU and ratios of the train steps that speed.py measured, and why others failed."""
    head = ["shape", "B × T", "what", "tokens/s", "MFU", "GiB", "over PyTorch", "over our RoPE", "date, commit"]
    body, failed = [], list[str]()
    for row in speed["rows"]:
        if "failed" in row:
            body.append([row["shape"], f"{row['B']} × {row['T']:,}", f"`{row['case']}`", "failed", *[""] * 5])
            failed.append(f"- `{row['case']}` at {row['shape']} failed: {row['failed']}")
            continue
        ratio = lambda name, row=row: f"{row['ratio'][name]:.2f}" if name in row["ratio"] else ""
        memory = f"{row['memory_bytes'] / 2**30:.1f}" if row["memory_bytes"] else ""
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
        rate = f"{row['tokens_per_second']:,.0f}"
        cells = [f"{row['B']} × {row['T']:,}", f"`{row['case']}`", rate, mfu, memory, ratio("torch"), ratio("rope")]
        commit = row.get("commit", "")
        cells.append(", ".join(filter(None, [row.get("date", "")[:10], commit[:7] + commit[40:]])))
        body.append([row["shape"], *cells])
    return "\n\n".join([table(head, body), *(["\n".join(failed)] if failed else [])])
