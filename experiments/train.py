"""Train a named configuration:

    python -m experiments.train --config bam-120m position=rope train.steps=100
    python -m experiments.train --resume --run-dir runs/bam-120m-rope

The first interrupt (Ctrl-C, SIGTERM) finishes the step, saves and exits; the second one stops at once. In a run of
several processes one of them may get it: all save and exit.

Exit status: 0 done, 1 a loss that is not finite, 2 a wrong command line or a refused run, 3 a dry run that does not fit
the memory, 4 another process of the run is gone, 5 a file that cannot be written, 128 + n stopped by signal n. After 4
and 128 + n, --resume goes on.
"""

import argparse
import logging
import math
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bampath import config as configs
from bampath.command import Stop, end_with_status
from bampath.config import Config
from bampath.watch import LOST

if TYPE_CHECKING:
    from bampath.profiling import Window

NOT_FINITE, REFUSED, DOES_NOT_FIT, UNWRITTEN = 1, 2, 3, 5  # exit statuses, beside LOST

# What brings JAX is imported inside the functions that need it, so that help and refusals come at once.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (see above)."""
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    if not options.traceback:  # orbax logs tracebacks of what it raises as well
        logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        config, base, run_dir = resolve(options)
        refuse_options(options)
    except (ValueError, TypeError, OSError) as error:
        return refuse(error)
    if options.dry_run:
        print(configs.describe(config, base))
        return dry_run(config, run_dir, options)
    from bampath import distributed
    from bampath.profiling import Window
    from bampath.startup import keep_programs

    try:
        window = None if options.profile is None else Window.parse(options.profile)
        programs = None if options.compile_cache is None else keep_programs(options.compile_cache)
        joined = join(options)
    except (ValueError, OSError) as error:
        return refuse(error)
    if distributed.lead():
        print(configs.describe(config, base), *([programs] if programs else []), sep="\n")
    try:
        status = train(config, run_dir, options, window)
    except BaseException:
        if joined:  # an ordinary end would wait for the others
            traceback.print_exc()
            distributed.leave(1)
        raise
    if joined and status in (REFUSED, LOST, UNWRITTEN):  # the others may not have come to this
        distributed.leave(status)
    distributed.part()
    return status


def join(options: argparse.Namespace) -> bool:
    """Join the other processes of the run, if there are any; returns whether there are."""
    from bampath import distributed

    who = options.coordinator, options.processes, options.process
    joined = distributed.join(*who, wanted=options.distributed, heartbeat=options.heartbeat)
    if joined:
        print(distributed.describe(), flush=True)
    return joined


def train(config: Config, run_dir: Path, options: argparse.Namespace, window: "Window | None") -> int:
    """Train, say how it ended, and return the exit status."""
    from bampath import distributed
    from bampath.checkpoint import CheckpointError, SaveError
    from bampath.distributed import DisagreementError, LostError
    from bampath.train import NonFiniteError, fit

    stop, say = Stop(), print if distributed.lead() else lambda _: None
    try:
        result = fit(config, run_dir, resume=options.resume, should_stop=lambda: stop.by != 0, profile=window)
    except (NonFiniteError, LostError, SaveError) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return {NonFiniteError: NOT_FINITE, LostError: LOST, SaveError: UNWRITTEN}[type(error)]
    except DisagreementError as error:
        refuse(error)
        distributed.part()
        return REFUSED
    except (CheckpointError, OSError, ValueError) as error:
        if options.traceback:
            raise
        return refuse(error)
    if result.stopped:
        say(f"saved after step {result.step}: python -m experiments.train --resume --run-dir {run_dir}")
        return 128 + (stop.by or signal.SIGTERM)  # in one of several processes it may have been another's signal
    say(f"done: {result.step} steps in {run_dir}; look at it with python -m bampath.inspect {run_dir}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.train",
        description=__doc__,
        epilog=listing() if _wants_help(arguments) else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the configuration's")
    parser.add_argument("--config", metavar="NAME", help=f"one of {', '.join(configs.names())}")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME-POSITION")
    parser.add_argument("--resume", action="store_true", help="continue the run in DIR (from its own configuration)")
    parser.add_argument("--init-from", metavar="CHECKPOINT", help="short for train.init_from=CHECKPOINT")
    parser.add_argument("--profile", metavar="FIRST:LAST", help="trace these steps into DIR/profile, such as 10:13")
    parser.add_argument(
        "--compile-cache", type=Path, metavar="FOLDER", help="keep compiled programs here, use those of earlier runs"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration, folders, text and memory, and stop"
    )
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help="with --dry-run: of each device of a mesh that is elsewhere"
    )
    several = parser.add_argument_group("several processes", "docs/scaling.md says when which of these is needed")
    several.add_argument(
        "--distributed",
        action=argparse.BooleanOptionalAction,
        help="join the processes that JAX finds (TPU pods, SLURM, Open MPI, GKE), or never; default: if the "
        "environment names several",
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens, without such a cluster")
    several.add_argument("--processes", type=int, metavar="N", help="how many there are")
    several.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    several.add_argument(
        "--heartbeat", type=int, default=100, metavar="S", help="seconds after which a silent one is given up (100)"
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    return parser.parse_intermixed_args(arguments)


def resolve(options: argparse.Namespace) -> tuple[Config, Config, Path]:
    """(configuration, what it is shown as changed from, run folder). ValueError for what is missing or unknown."""
    if options.run_dir is not None:
        options.run_dir = options.run_dir.expanduser()
        if re.match(r"[a-z][a-z0-9]+:/", str(options.run_dir)):
            raise ValueError(f"--run-dir {options.run_dir} is an address, must be a folder: mount it and name that")
    if options.init_from is not None:
        options.overrides = [*options.overrides, f"train.init_from={options.init_from}"]
    if options.config is not None:
        config, base = configs.get(options.config, *options.overrides), configs.named(options.config)
        slug = re.sub(r"[^\w.+-]+", "_", f"{options.config}-{config.model.position}").strip("_")
        return config, base, options.run_dir or Path("runs") / slug
    if not options.resume:
        raise ValueError(f"--config is missing; there are {', '.join(configs.names())}")
    if options.run_dir is None:
        raise ValueError("--resume needs --run-dir, or --config with the same keys as before")
    path = options.run_dir / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist, so there is no run to resume; start one with --config")
    base = configs.read(path)
    return configs.override(base, *options.overrides), base, options.run_dir


def refuse_options(options: argparse.Namespace) -> None:
    """ValueError for options whose values cannot be."""
    memory = options.device_memory
    if memory is not None and not options.dry_run:
        raise ValueError("--device-memory is for --dry-run")
    if memory is not None and not 0 < memory < math.inf:
        raise ValueError(f"--device-memory {memory:g} must be a number of GiB greater than 0")
    if options.heartbeat < 1:
        raise ValueError(f"--heartbeat {options.heartbeat} must be at least 1 second")


def dry_run(config: Config, run_dir: Path, options: argparse.Namespace) -> int:
    """Check everything that comes before the first step and estimate memory; nothing is changed."""
    from bampath import preflight
    from bampath.profiling import Window
    from bampath.startup import programs_folder

    limit = None if options.device_memory is None else options.device_memory * 2**30
    try:
        window = None if options.profile is None else Window.parse(options.profile)
        if options.compile_cache is not None:
            programs_folder(options.compile_cache)
        if limit is not None:
            preflight.pretend_devices(config.mesh.size)
            print(f"devices     elsewhere, with {options.device_memory:g} GiB each: those below are pretended")
        found = preflight.check(config, run_dir, resume=options.resume, profile=window, limit=limit, say=print)
    except (ValueError, OSError) as error:
        return refuse(error)
    return DOES_NOT_FIT if found.fits is False else 0


def listing() -> str:
    """Every configuration in a line, every key with its type, default and section's explanation."""
    lines = ["configurations:"]
    for name in configs.names():
        model = configs.named(name).model
        shape = f"{model.layers} layers of {model.dim}, {model.heads} heads ({model.kv_heads} of keys)"
        lines.append(f"  {name:<11} {shape}, {model.position}, context {model.train_length}")
    return "\n".join([*lines, "", configs.reference()])


def refuse(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return REFUSED


def _wants_help(arguments: Sequence[str] | None) -> bool:
    return bool({"-h", "--help"} & set(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    end_with_status(main)
