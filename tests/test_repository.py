"""What a reader relies on: the README's numbers, its links, and that our folder `kernels` shadows nobody."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bam_h200 import kept, report, summary
from experiments.tables import passkey_table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("experiments/*/README.md"))]


def test_the_readme_shows_the_table_of_the_committed_results() -> None:
    results = json.loads((ROOT / "experiments/extrapolation/results.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- passkey table -->\n(.*?)\n<!-- end of passkey table -->", readme, re.DOTALL)
    assert shown is not None
    assert shown.group(1) == passkey_table(results)


def test_the_readmes_show_the_tables_of_the_committed_results_of_the_gpu() -> None:
    results = kept.read(ROOT / "experiments/bam_h200/results.json")
    rows = results["rows"]
    speed = json.loads((ROOT / "experiments/bam_h200/speed.json").read_text(encoding="utf-8"))
    keys, rates = summary.key_table(rows), summary.rate_table(speed)
    front, study = [
        (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "experiments/bam_h200/README.md")
    ]
    assert "\n".join([summary.KEYS[0], keys, summary.KEYS[1]]) in front
    assert f"{report.BEGIN}\n{report.readme_block(results)}\n{report.END}" in study
    for page in (front, study):
        assert "\n".join([summary.RATES[0], rates, summary.RATES[1]]) in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "docs/path.md"])
def test_examples_run_as_they_are_written(page: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout


def test_other_packages_import_from_the_root_although_one_is_called_kernels() -> None:
    """Whoever looks for the published package finds our folder instead, and must not break on it."""
    code = "import kernels.attention.api, jax, flax, orbax.checkpoint, optax; print(kernels.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip().splitlines()[-1]).parent == ROOT / "kernels"


def test_transformers_imports_from_the_root() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed here")
    done = subprocess.run(
        [sys.executable, "-c", "import transformers, kernels; transformers.AutoConfig"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
