"""What the machines of a launch must have that the code does not bring: text, tokenizer, weights to begin with."""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bampath.config import Config
from bampath.data.prepared import SHARDS, mixture_of

_PREFIXES = (SHARDS, "fineweb:", "fineweb-edu:")
_PYTHONS = ("python3.13", "python3.12", "python3.11", "python3")
_SUITABLE = "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
# Types of file systems, as `stat -f` calls them, that belong to one machine.
_LOCAL_DISKS = ("ext2/ext3", "xfs", "btrfs", "overlayfs", "tmpfs")


def paths(config: Config) -> dict[str, str]:
    """{key: path, folder or glob} of what a run reads; named sources and the byte tokenizer are none."""
    data = config.data
    tokenizer = "" if data.tokenizer == "bytes" else data.tokenizer
    found = {"data.tokenizer": tokenizer, "train.init_from": config.train.init_from}
    for key, spec in (("data.source", data.source), ("data.validation_source", data.validation_source)):
        names = [name for _, name in mixture_of(spec)] or [spec]
        for number, name in enumerate(names):
            found[f"{key}[{number}]" if len(names) > 1 else key] = _path_of(name)
    return {key: path for key, path in found.items() if path}


def _path_of(source: str) -> str:
    if source.startswith("tfds:"):
        return source.partition("@")[2]
    prefix = next((prefix for prefix in _PREFIXES if source.startswith(prefix)), "")
    return "" if source == "sotu" else source[len(prefix) :]


def refuse_missing(needed: Mapping[str, str], root: Path) -> None:
    """ValueError for a path that other machines will not have: one that is not from / and not in the last commit."""
    for key, path in needed.items():
        if path.startswith("/"):
            continue
        listed = ["git", "ls-tree", "--name-only", "HEAD", "--", path.rstrip("/")]
        done = subprocess.run(listed, capture_output=True, text=True, check=False, cwd=root)
        if done.returncode or not done.stdout.strip():
            raise ValueError(
                f"{key}: {path!r} is not in the last commit, which is all that the machines get: "
                "name a path from / that they all have, such as one in the folder of --runs"
            )


def find_python() -> str:
    """Shell text that sets $p to an interpreter that bampath runs on, or ends with status 2."""
    tried = f'for p in {" ".join(_PYTHONS)}; do "$p" -c {shlex.quote(_SUITABLE)} 2>/dev/null && break; p=; done'
    found = _otherwise('[ -n "$p" ]', "no Python 3.11 to 3.13: install one with --setup")
    return f"{tried}; {found}"


def look(needed: Mapping[str, str], runs: str, *, shared: bool) -> str:
    """Shell text that looks at a machine and ends with status 2 and a line if something is missing there: Python, a
    folder of runs that can be written (shared: and that is not the machine's own), every path from /."""
    checks = [
        find_python(),
        _otherwise(f"mkdir -p {shlex.quote(runs)} && [ -w {shlex.quote(runs)} ]", _unwritable(runs)),
    ]
    if shared:
        own = f"case $(stat -f -c %T {shlex.quote(runs)}) in {'|'.join(_LOCAL_DISKS)}) false ;; esac"
        message = f"{runs} is a disk of this machine alone, must be one that all share: mount it with --setup"
        checks.append(_otherwise(own, message))
    for key, path in needed.items():
        if path.startswith("/"):
            checks.append(_otherwise(f"compgen -G {shlex.quote(path)} > /dev/null", f"{key}: there is no {path}"))
    return "; ".join(checks)


def _unwritable(runs: str) -> str:
    return f"{runs} cannot be written: mount it with --setup"


def _otherwise(test: str, message: str) -> str:
    return f'{test} || {{ echo "$(hostname): "{shlex.quote(message)} >&2; exit 2; }}'
