"""What the two commands cost on a fresh clone:

    python -m experiments.extrapolation.commands                      set-up, make demo, make test: about 20 minutes
    python -m experiments.extrapolation.commands --only setup test

Clones the repository's last commit into a temporary folder and times the set-up that both commands begin with, then
each command after it. Writes commands.json (steps not asked for keep their rows) and the table in the study's README.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bampath.evaluation.results import environment
from experiments.tables import replace_between

HERE = Path(__file__).parent
STEPS = {"setup": ["make", ".venv/.run"], "demo": ["make", "demo"], "test": ["make", "test"]}
CLOSING = re.compile(r"^(?:\d+ (?:passed|failed)\b|total ).*$", re.MULTILINE)  # of the test runner, of the study
BEGIN, END = "<!-- commands: written by commands.py -->", "<!-- end of commands -->"


def measure(clone: Path, steps: Sequence[str]) -> list[dict[str, Any]]:
    """One row per step: its command, seconds, exit status and closing line. Ends at the first step that fails."""
    rows: list[dict[str, Any]] = []
    environ = {**os.environ, "PIP_NO_CACHE_DIR": "1", "BAMPATH_CACHE": str(clone / "build" / "cache")}
    for case in steps:
        start = time.monotonic()
        done = subprocess.run(STEPS[case], cwd=clone, env=environ, capture_output=True, text=True, check=False)
        closing = CLOSING.findall(done.stdout)
        row = {
            "case": case,
            "date": time.strftime("%Y-%m-%dT%H:%M"),
            "command": " ".join(STEPS[case]),
            "seconds": round(time.monotonic() - start, 1),
        }
        rows.append(row | {"status": done.returncode, "closing": closing[-1].strip() if closing else ""})
        print(rows[-1], flush=True)
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
            break
    return rows


def with_kept(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and those of other steps that `path` already holds, in the steps' order."""
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    by_step = {row["case"]: row for row in (*kept, *rows)}
    return [by_step[case] for case in STEPS if case in by_step]


def summary(results: dict[str, Any]) -> str:
    """The table of the README."""
    env = results["env"]
    lines = [
        f"On a fresh clone ({env['date'][:10]}, {env['device']}, {env['platform']}, nothing cached by pip or "
        "bampath; each command after the steps above it):",
        "",
        "| step | command | seconds | exit status | its last line |",
        "| --- | --- | ---: | ---: | --- |",
        *(
            f"| {r['case']} | `{r['command']}` | {r['seconds']:.0f} | {r['status']} | {r['closing']} |"
            for r in results["rows"]
        ),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.extrapolation.commands",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(STEPS), default=list(STEPS), help="which steps (default all)"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(HERE.parent.parent), folder], check=True)
        rows = measure(Path(folder), [step for step in STEPS if step in options.only])
    results = {"env": environment(), "rows": with_kept(HERE / "commands.json", rows)}
    (HERE / "commands.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    replace_between(HERE / "README.md", BEGIN, END, f"\n{summary(results)}\n")
    return max(row["status"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
