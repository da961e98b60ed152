"""Results files: one JSON object with `env`, what produced the numbers, and `rows`, the numbers."""

import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def environment() -> dict[str, Any]:
    """Date, device, versions and commit of this process."""
    import jax

    devices = jax.devices()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "platform": f"{platform.system()} {platform.machine()}, {cores} CPU cores usable",
        "driver": _driver(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def write_results(path: Path, env: dict[str, Any], rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write a results file; `more` stands between env and rows."""
    write_json(path, {"env": env, **more, "rows": list(rows)})


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a crash leaves the old file or the new one, and of several writers one wins. NaN and infinity
    become null."""
    write_text(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file as `write_json` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}-{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # of a disk that is full


def finite(value: Any) -> Any:
    """The value with null in place of NaN and infinity, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The NVIDIA driver's version, None without one."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return None
    return next((word for word in first.split() if word[0].isdigit()), None)


def _commit() -> str | None:
    """The commit of the working tree, with "+" if files differ from it; None outside a repository."""
    here = Path(__file__).resolve().parent
    git = lambda *args: subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout
    try:
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain", "-uno").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None
