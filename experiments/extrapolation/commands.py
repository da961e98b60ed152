"""What the two commands cost on a fresh clone: `python -m experiments.extrapolation.commands` writes commands.json.

Clones the repository's last commit into a temporary folder and times, one after the other, the set-up that both
commands begin with and `make test`. (`make demo` is that set-up and the study, whose own seconds are in results.json.)
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bampath.evaluation.results import environment

HERE = Path(__file__).parent
STEPS = {"setup": ["make", ".venv/.run"], "test": ["make", "test"]}


def measure(clone: Path) -> list[dict[str, Any]]:
    """One row per step: its command, seconds, exit status and the test runner's closing line."""
    rows = []
    environ = {**os.environ, "PIP_NO_CACHE_DIR": "1"}
    for case, command in STEPS.items():
        start = time.monotonic()
        done = subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True, check=False)
        closing = re.findall(r"^\d+ (?:passed|failed).*$", done.stdout, re.MULTILINE)
        row = {"case": case, "command": " ".join(command), "seconds": round(time.monotonic() - start, 1)}
        rows.append(row | {"status": done.returncode, "closing": closing[-1] if closing else ""})
        print(rows[-1], flush=True)
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
            break
    return rows


def main() -> int:
    root = HERE.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(root), folder], check=True)
        rows = measure(Path(folder))
    results = {"env": environment(), "rows": rows}
    (HERE / "commands.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return max(row["status"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
