"""Train many small models as one program, and compare them:

    python -m experiments.sweep --config tiny --vary seed=0..7
    python -m experiments.sweep --config tiny --vary seed=0..3 --vary optim.lr=1e-3,3e-3 \\
        --structure position=rope,bam+ssmax --structure model.layers=1,2 train.steps=200
    python -m experiments.sweep --config tiny --vary seed=0,1 --vary init.theta_beta=0.5,1,2 position=bam+ssmax
    python -m experiments.sweep --resume --out runs/sweeps/20261129-120000

Values of --vary are members of one jitted program, vmapped over stacked parameters: seed (train.seed and data.seed
together), the learning rate and its schedule (optim.lr, .schedule, .warmup_steps, .decay_steps, .lr_start, .lr_end),
init.PARAMETER (where a positional parameter starts, in all heads and layers), and every other key that changes only
what a run starts from or reads, such as position=bam(init=laplace). Values of --structure change the program: each
combination is compiled by itself, through one cache of compiled programs. All combinations are trained.

Values are separated by commas; where one holds commas itself, as a pattern of layers does, by semicolons:
--structure 'position=3*rope+window(512),nope;rope'.

Each member becomes an ordinary run in OUT/members, with the numbers that `experiments.train` alone would give.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bampath import config as configs
from bampath.command import Stop, end_with_status
from bampath.evaluation.results import environment, write_json, write_results
from bampath.lock import NAME as LOCK
from bampath.lock import RunLock, refuse_in_use
from experiments.sweep.plan import INIT, SCHEDULE, SEEDS, Group, Spec, axis_of, member_of, plan, read_spec, spec_json

SWEEPS = Path("runs/sweeps")
PROGRAMS = "programs"

# What brings JAX is imported inside the functions that need it, so that help and refusals come at once.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 done, 2 a wrong command line, 128 + n stopped by signal n."""
    options = parse(arguments)
    try:
        spec, out = spec_of(options), folder_of(options)
        groups = plan(spec)
        prepare_devices(max(len(group.members) for group in groups), options.devices, out)
        for group in groups:
            check(group, spec)
        check_text(groups)
        print(describe(spec, groups, out), flush=True)
        if options.dry_run:
            return 0
        with RunLock(out, "--out") as lock:
            claim(out, lock, options.resume)
            return train(spec, groups, out)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def train(spec: Spec, groups: Sequence[Group], out: Path) -> int:
    """Train all groups that are not finished, and write what came out; returns the exit status."""
    from experiments.sweep.group import run_group
    from experiments.sweep.report import page, report, write_figures

    stop = Stop()
    write_json(out / "sweep.json", spec_json(spec))
    rows, start = [], time.monotonic()
    for group in groups:
        try:
            rows += run_group(group, out, stop)
        except (ValueError, OSError) as error:
            print(f"error: {group.slug}: {error}", file=sys.stderr)
            return 2
        write_results(out / "results.json", environment(), rows, sweep=spec_json(spec))
        if stop.by:
            print(f"stopped; continue with python -m experiments.sweep --resume --out {out}")
            return 128 + stop.by
    figures = [str(path.relative_to(out)) for path in write_figures(rows, out)]
    (out / "report.md").write_text(page(rows, spec, groups, environment(), figures), encoding="utf-8")
    print(f"{report(rows, spec_json(spec))}\n{len(rows)} runs in {time.monotonic() - start:.1f} s: {out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that all members share")
    parser.add_argument("--config", metavar="NAME", help=f"one of {', '.join(configs.names())}")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=A,B,…", help="members of one program")
    parser.add_argument("--structure", action="append", default=[], metavar="KEY=A,B,…", help="a compile for each")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: a new folder in {SWEEPS}")
    parser.add_argument("--resume", action="store_true", help="continue the sweep in --out where it was stopped")
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        metavar="N",
        help="spread the members of a program over N devices (default: all; on a CPU one virtual device per member, up "
        "to 16); a device with several members vmaps them",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would be trained, and stop"
    )
    return parser.parse_intermixed_args(arguments)


def spec_of(options: argparse.Namespace) -> Spec:
    """The sweep of a command line, or with --resume the one in the folder. ValueError where they contradict."""
    given = None
    if options.config:
        axes = [tuple(axis_of(text) for text in texts) for texts in (options.vary, options.structure)]
        given = Spec(options.config, tuple(options.overrides), *axes)
    if not options.resume:
        if given is None:
            raise ValueError(f"--config is missing; there are {', '.join(configs.names())}")
        return given
    if options.out is None:
        raise ValueError("--resume needs --out, the folder of the sweep")
    saved = read_spec(options.out.expanduser() / "sweep.json")
    if given is None and (options.vary or options.structure or options.overrides):
        raise ValueError("--resume takes everything from the folder; leave out --vary, --structure and key=value")
    if given not in (None, saved):
        raise ValueError(f"{options.out} holds another sweep: {saved}; choose another --out")
    return saved


def folder_of(options: argparse.Namespace) -> Path:
    """Where the sweep goes. OSError if it cannot be written, is being written, or is not to be continued."""
    out = Path(options.out or SWEEPS / time.strftime("%Y%m%d-%H%M%S")).expanduser().absolute()
    there = next(path for path in (out, *out.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "has no permission to be written" if there.is_dir() else "is not a folder"
        raise OSError(f"{there} {what}, so {out} cannot be the folder of a sweep: choose another --out")
    if options.resume:
        refuse_in_use(out, "--out")
    else:
        refuse_used(out)
    return out


def refuse_used(out: Path) -> None:
    """FileExistsError for a folder with something in it beside what a command leaves that did not begin to train."""
    if out.exists() and any(path.name not in (LOCK, PROGRAMS) for path in out.iterdir()):
        raise FileExistsError(f"{out} is not empty; continue that sweep with --resume, or choose another --out")


def claim(out: Path, lock: RunLock, resume: bool) -> None:
    """Make the folder and lock it. InUseError if another process trains there, FileExistsError if one has begun to."""
    out.mkdir(parents=True, exist_ok=True)
    lock.take()
    if not resume:
        refuse_used(out)


def check(group: Group, spec: Spec) -> None:
    """ValueError if the members of a group are not one program, naming the axis that changes it, or if the model has no
    parameter that is to start somewhere."""
    from bampath.step import build_model, declare
    from bampath.sweep import refuse_unknown, same_program

    first = group.members[0]
    if first.starts:
        refuse_unknown(declare(build_model(first.config)), first.starts)
    for axis in spec.vary:
        if axis.key in (*SEEDS, *SCHEDULE) or axis.key.startswith(INIT):
            continue
        for value in axis.values[1:]:
            other = member_of(spec, group.values, first.values | {axis.key: value})
            if not same_program(first.config, other.config):
                raise ValueError(
                    f"--vary {axis.key}: {value} makes another program than {axis.values[0]} (other shapes, or another "
                    f"constant in the step): not to be vmapped; use --structure {axis}"
                )


def check_text(groups: Sequence[Group]) -> None:
    """Errors of sources and tokenizers that a group would meet when its turn comes. Text is read for a moment where it
    is not tokenised yet."""
    from bampath import preflight
    from bampath.data import tokenizer_of
    from bampath.data.corpus import DamagedCacheError
    from bampath.startup import check_vocabulary

    looked = set()
    for config in (member.config for group in groups for member in group.members):
        data = replace(config.data, seed=0)
        if (data, config.model.vocab_size) in looked:
            continue
        looked.add((data, config.model.vocab_size))
        tokenizer = tokenizer_of(data)
        check_vocabulary(config, tokenizer)
        try:
            preflight.text(config, "train", tokenizer)
            if data.split != "none" or data.validation_source:
                preflight.text(config, "validation", tokenizer)
        except DamagedCacheError:
            pass  # built anew when the group's turn comes


def prepare_devices(members: int, wanted: int, out: Path) -> None:
    """Before JAX starts: virtual CPU devices for the members, and a cache of compiled programs for all groups."""
    import jax

    if wanted < 0:
        raise ValueError(f"--devices {wanted} must be at least 1, or 0 for all")
    jax.config.update("jax_num_cpu_devices", wanted or min(members, 16))  # used only where there is nothing else
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(out / PROGRAMS))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def describe(spec: Spec, groups: Sequence[Group], out: Path) -> str:
    """What is going to be trained."""
    members = sum(len(group.members) for group in groups)
    first = groups[0].members[0].config
    lines = [f"sweep       {members} runs in {len(groups)} program(s), {first.train.steps} steps each, in {out}"]
    for name, axes in (("vary", spec.vary), ("structure", spec.structure)):
        lines += [f"{name:<11} {axis}" for axis in axes]
    return "\n".join(lines)


if __name__ == "__main__":
    end_with_status(main)
