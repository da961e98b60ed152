"""Start a training run somewhere, keep it going, and bring its logs back:

    python -m launch.run --on local --config tiny train.steps=200
    python -m launch.run --on tpu-vm --create --spot --type v5litepod-256 --zone us-west4-a --runs /mnt/runs \\
        --setup 'sudo mkdir -p /mnt/runs && sudo mount 10.0.0.2:/runs /mnt/runs' \\
        --config bam-1.1b train.accumulate=1 data.batch_size=1280 mesh.data=16 mesh.fsdp=16 --dry-run
    python -m launch.run --on xpk --cluster pods --zone us-west4-a --type v6e-256 --runs /mnt/runs \\
        --config bam-1.1b position=path+fox train.accumulate=1 data.batch_size=1280 mesh.data=16 mesh.fsdp=16
    python -m launch.run --on slurm --nodes 2 --gpus-per-node 8 --time 24:00:00 \\
        --config bam-1.1b train.accumulate=1 mesh.fsdp=16

A run is called by its configuration, scheme and date; its folder is RUNS/NAME, which all of its machines must see. It
is started with --resume, so that every later start continues from the last checkpoint: after a preemption, a kill, a
lost machine. --dry-run prints exactly what would be written and run, as a shell script, and does nothing. To go on with
a run later, launch it again with its --name.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bampath import config as configs
from bampath.command import end_with_status
from bampath.config import Config
from launch.needs import paths, refuse_missing
from launch.plan import call, check_name, execute, run_name, script
from launch.targets import TARGETS, chips_of

ROOT = Path(__file__).parents[1]
CHIPS_PER_HOST = {"v5litepod": 8, "v5p": 4, "v6e": 8}  # of slices of one host; larger ones have 4 per host
_COMMON = {"on", "config", "overrides", "name", "runs", "logs", "max_restarts", "dry_run", "allow_dirty"}
_OWN: dict[str, tuple[set[str], set[str]]] = {  # options that a target needs, and that it may have
    "tpu-vm": ({"zone", "type", "runs"}, {"project", "tpu", "create", "spot", "runtime_version", "setup"}),
    "xpk": ({"cluster", "zone", "type", "runs"}, {"project", "image", "base_image"}),
    "slurm": ({"nodes", "gpus_per_node", "time"}, {"partition", "account"}),
    "local": (set(), {"processes", "python"}),
}
_WORDS = ("zone", "project", "tpu", "runtime_version", "cluster", "image", "base_image", "partition", "account")
_DEFAULTS = {"processes": 1, "python": sys.executable, "base_image": "python:3.12"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 done, 2 a wrong command line, else the status of the run (see `launch.supervise`)."""
    try:
        options = parse(arguments)
        if options.on in ("tpu-vm", "xpk"):
            refuse_uncommitted(options)
            refuse_missing(options.needed, ROOT)
        plan = TARGETS[options.on](options)
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(script(plan))
        return 0
    if options.on == "local":  # in place of this process, so that whoever stops it stops the run
        try:
            os.execvp(plan.run[0].argv[0], plan.run[0].argv)
        except OSError as error:
            print(f"error: {options.python} cannot be run ({error.strerror})", file=sys.stderr)
            return 2
    return execute(plan, call)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked. ValueError for options that are missing, that the target has no use for or whose value
    it could not use, for a wrong configuration, and for a mesh of another size than the machine's."""
    options = _parser().parse_intermixed_args(arguments)
    config = configs.get(options.config, *options.overrides)
    needed, possible = _OWN[options.on]
    for name, value in vars(options).items():
        given = value is not None and value is not False
        if name in needed and not given:
            raise ValueError(f"--on {options.on} needs {_flag(name)}")
        if given and name not in _COMMON | needed | possible:
            raise ValueError(f"--on {options.on} has no use for {_flag(name)}")
        if name in possible and not given and name in _DEFAULTS:
            setattr(options, name, _DEFAULTS[name])
    _check_words(options)
    options.runs = _folder("runs", options.runs or "runs", here=options.on in ("local", "slurm"))
    options.logs = _folder("logs", options.logs, here=True)
    options.name = options.name or run_name(options.config, config.model.position, time.localtime())
    check_name(options.name)
    _check_target(options, config)
    options.needed = paths(config)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the configuration's")
    parser.add_argument("--on", required=True, choices=tuple(TARGETS), help="where")
    parser.add_argument("--config", required=True, metavar="NAME", help=f"one of {', '.join(configs.names())}")
    parser.add_argument("--name", help="of the run; default: configuration, scheme and date")
    parser.add_argument("--runs", metavar="DIR", help="folder of runs, the same on all machines (here: runs)")
    parser.add_argument("--logs", default="runs/logs", metavar="DIR", help="where logs go (default runs/logs)")
    parser.add_argument("--max-restarts", type=int, default=50, metavar="N", help="default 50")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--allow-dirty", action="store_true", help="launch although files differ from the last commit")
    cloud = parser.add_argument_group("tpu-vm and xpk")
    cloud.add_argument("--type", metavar="T", help="accelerator type: v5litepod-256, v5p-512, v6e-256, …")
    cloud.add_argument("--zone")
    cloud.add_argument("--project", help="default: gcloud's own")
    vm = parser.add_argument_group("tpu-vm")
    vm.add_argument("--tpu", metavar="NAME", help="a TPU VM that is there (default: called like the run)")
    vm.add_argument("--create", action="store_true", help="make it, and again when it was preempted")
    vm.add_argument("--spot", action="store_true", help="as a spot machine, with --create")
    vm.add_argument("--runtime-version", metavar="V", help="default: the one of the type")
    vm.add_argument("--setup", metavar="COMMAND", help="run on every worker first: mount --runs, install a Python")
    gke = parser.add_argument_group("xpk")
    gke.add_argument("--cluster")
    gke.add_argument("--image", help="a docker image that holds this repository and its requirements")
    gke.add_argument("--base-image", help="or one to put them into (default python:3.12)")
    batch = parser.add_argument_group("slurm")
    batch.add_argument("--nodes", type=int)
    batch.add_argument("--gpus-per-node", type=int)
    batch.add_argument("--time", help="HH:MM:SS or D-HH:MM:SS of one attempt")
    batch.add_argument("--partition")
    batch.add_argument("--account")
    here = parser.add_argument_group("local")
    here.add_argument("--processes", type=int, help="of the run on this machine (default 1)")
    here.add_argument("--python", help="interpreter (default: this one)")
    return parser


def _check_words(options: argparse.Namespace) -> None:
    """ValueError for text that would mean something else in a script: lines of its own, quotes, nothing at all."""
    for name, value in vars(options).items():
        if not isinstance(value, str):
            continue
        if not value:
            raise ValueError(f"{_flag(name)} {value!r} is empty")
        if name in _WORDS and not re.fullmatch(r"[\w.,:@+/-]+", value, re.ASCII):
            raise ValueError(f"{_flag(name)} {value!r} must be of letters, digits and . , : @ + / - _")
        if re.search(r"[\x00-\x1f\x7f]", value):
            raise ValueError(f"{_flag(name)} {value!r} must not have control characters")


def _folder(name: str, value: str, *, here: bool) -> str:
    """A folder as the machines need it. here: relative to this folder or home, which they see, too.

    ValueError for an address, which would become a folder of every machine's own, and for a home that is not there.
    """
    if re.match(r"[a-z][a-z0-9+.-]+:/", value, re.IGNORECASE):
        raise ValueError(f"{_flag(name)} {value} is an address, must be a folder: mount it and name that")
    if not here and not value.startswith("/"):
        raise ValueError(f"{_flag(name)} {value!r} must be a path from /, the same folder on all machines")
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise ValueError(f"{_flag(name)} {value!r}: there is no such home")
    return expanded.rstrip("/")


def _check_slurm(options: argparse.Namespace) -> None:
    for name in ("nodes", "gpus_per_node"):
        if getattr(options, name) < 1:
            raise ValueError(f"{_flag(name)} {getattr(options, name)} must be at least 1")
    if not re.fullmatch(r"(\d+-)?\d+:\d{1,2}:\d{1,2}", options.time, re.ASCII):
        raise ValueError(f"--time {options.time!r} must be HH:MM:SS or D-HH:MM:SS")
    logs = str(Path(options.logs).absolute())
    if re.search(r"[\s%#\\\"']", logs):  # sbatch splits, expands and unquotes what is after --output=
        raise ValueError(
            f"--logs: SLURM cannot write into {logs!r}: choose a folder without blanks, quotes, #, % and \\"
        )


def _check_target(options: argparse.Namespace, config: Config) -> None:
    if options.max_restarts < 0:
        raise ValueError(f"--max-restarts {options.max_restarts} must not be negative")
    if options.on == "tpu-vm" and not options.create and not options.tpu:
        raise ValueError("--on tpu-vm needs --tpu NAME of a TPU VM that is there, or --create")
    if options.on == "tpu-vm" and options.spot and not options.create:
        raise ValueError("--spot is for machines that are made: it needs --create")
    if options.on == "xpk" and options.image and options.base_image != _DEFAULTS["base_image"]:
        raise ValueError("--image and --base-image exclude each other")
    if options.on == "local":
        if options.processes < 1:
            raise ValueError(f"--processes {options.processes} must be at least 1")
        if shutil.which(options.python) is None:
            raise ValueError(f"--python {options.python!r} is not a program on this machine")
    devices = None
    if options.on in ("tpu-vm", "xpk"):
        devices = chips_of(options.type)
        own_host = CHIPS_PER_HOST[options.type.split("-")[0]]
        options.hosts = 1 if devices <= own_host else devices // 4
    elif options.on == "slurm":
        _check_slurm(options)
        devices = options.nodes * options.gpus_per_node
    if devices is not None and config.mesh.size != devices:
        raise ValueError(
            f"the machine has {devices} devices, but mesh.data × mesh.fsdp × mesh.tensor × mesh.context is "
            f"{config.mesh.size}; `python -m launch.compile` finds out what fits"
        )


def refuse_uncommitted(options: argparse.Namespace) -> None:
    """ValueError if what is sent would not be what is here: machines get the last commit."""
    git = ["git", "status", "--porcelain", "--untracked-files=no"]
    done = subprocess.run(git, capture_output=True, text=True, check=False, cwd=ROOT)
    if (done.returncode or done.stdout.strip()) and not options.allow_dirty:
        raise ValueError("files differ from the last commit, which is what the machines get: commit, or --allow-dirty")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    end_with_status(main)
