"""Compile the named models' train steps for TPU topologies, without a TPU, and write results.json:

    python -m experiments.pod_compile.run                  # all cases
    python -m experiments.pod_compile.run --case bam-120m@v5e:4x4 --full

A case that is run again replaces its row; the others stay as they are. The table of docs/scaling.md is rewritten.
"""

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from bampath.command import fail_gracefully
from experiments.studies import read_kept
from launch.chips import GIB, chip_of
from launch.compile import check, compiler, report, resolve
from launch.program import topology_devices

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
MARKS = ("<!-- pod table -->", "<!-- end of pod table -->")


@dataclass(frozen=True)
class Case:
    """A configuration for a topology, with overrides; `lane`: CI compiles it too."""

    config: str
    topology: str
    overrides: tuple[str, ...] = ()
    lane: bool = True

    @property
    def name(self) -> str:
        return "@".join((" ".join((self.config, *self.overrides)), self.topology))


TOPOLOGIES = ("v5e:4x4", "v5p:2x2x2", "v6e:4x4")
# The papers' batches; PaTH's 2.1M tokens are worked off in parts of 4 rows per chip on 16 chips.
NAMED: dict[str, tuple[str, ...]] = {
    "bam-120m": (),
    "bam-1.1b": (),
    "path-760m": ("train.accumulate=8",),
}
CASES = (
    *(Case(name, topology, overrides) for name, overrides in NAMED.items() for topology in TOPOLOGIES),
    Case("bam-1.1b", "v5e:16x16", ("position=path+fox",), lane=False),
    Case("bam-1.1b", "v5e:4x4", ("mesh.fsdp=4", "mesh.tensor=4"), lane=False),
    Case(
        "path-760m",
        "v5p:2x2x2",
        ("position=path+fox", "data.sequence_length=32768", "data.batch_size=2", "mesh.fsdp=2", "mesh.context=4"),
        lane=False,
    ),
    Case("bam-1.1b", "v5e:2x2", ("data.batch_size=128",), lane=False),
    Case("bam-1.1b", "v5e:2x2", lane=False),  # does not fit
)


def run(case: Case, full: bool = False) -> dict[str, Any]:
    """One row of results. full: compiled as a run does it, not with the least effort (`launch.compile`)."""
    devices = topology_devices(case.topology)
    config, chosen = resolve(case.config, case.overrides, len(devices))
    row = check(config, chip_of(case.topology), case.topology, compiler(devices), search=True, full=full)
    return {"case": case.name, "config": case.config, "overrides": [*case.overrides, *chosen], **row}


def environment() -> dict[str, Any]:
    """Versions and date, for the results file."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "none: compiled ahead of time",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu", "flax", "optax")},
        "commit": git.stdout.strip() or None,
    }


def save(row: dict[str, Any]) -> None:
    """Put a row in its place in results.json, with the environment that it was made in."""
    known = read_kept(RESULTS)["rows"] if RESULTS.exists() else []
    rows = {old["case"]: old for old in known} | {row["case"]: {**row, "env": environment()}}
    ordered = [rows[case.name] for case in CASES if case.name in rows]
    text = json.dumps({"env": environment(), "rows": ordered}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| configuration | topology | mesh | rows × length per chip | memory per chip, GiB | sent per chip, MiB | "
        "estimate, ms per step | MFU | compiled, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mesh = " × ".join(f"{name} {size}" for name, size in row["mesh"].items() if size > 1)
        rows_here, found, note = row["rows_per_device"], row, ""
        if not row["fits"]:
            found = row.get("at_largest_batch") or {}
            wanted = f"{row['wanted_bytes'] / GIB:.1f}" if row["wanted_bytes"] else "more"
            note = f"batch {row['batch']} needs {wanted}: does not fit; the largest, {row['largest_batch']}: "
            rows_here = (row["largest_batch"] or 0) * row["rows_per_device"] // row["batch"]
        given = [entry for entry in row["overrides"] if not entry.startswith(_CHOSEN)]
        name = " ".join((row["config"], *given))
        cells = [f"`{name}`", row["topology"], mesh, f"{rows_here} × {row['length'] // row['mesh']['context']}"]
        if found:
            low, high = (1e3 * seconds for seconds in found["step_seconds"])
            cells += [
                f"{note}{found['memory_bytes'] / GIB:.2f} of {row['hbm_bytes'] / GIB:.2f}",
                f"{found['collective_bytes_per_device'] / 2**20:,.0f}",
                f"{low:.1f} – {high:.1f}",
                f"{100 * found['mfu'][1]:.0f} – {100 * found['mfu'][0]:.0f} %",
                f"{found['compile_s']:.0f}" + ", least effort" * found.get("quick", False),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_CHOSEN = ("mesh.", "model.scan", "model.remat", "data.batch_size", "train.accumulate=1")


def write_table() -> None:
    """Put the table of results.json between its marks in docs/scaling.md."""
    rows = read_kept(RESULTS)["rows"]
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    by_name = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=list(by_name), default=list(by_name), metavar="CASE")
    parser.add_argument("--full", action="store_true", help="compile as a run does, not with the least effort")
    options = parser.parse_args(arguments)
    if RESULTS.exists():
        read_kept(RESULTS)  # a damaged file is said before minutes of compiling
    for name in options.case:
        print(f"== {name}", flush=True)
        row = run(by_name[name], options.full)
        save(row)
        print(report(row), flush=True)
    write_table()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    fail_gracefully(main, sys.argv[1:], stopped="stopped; the rows of finished cases are kept")
