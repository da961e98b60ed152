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

Each member becomes an ordinary run in OUT/members, with the numbers that `experiments.train` alone would give.
"""

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bampath import config as configs
from bampath.config import Config
from bampath.evaluation.results import environment, write_json, write_results
from experiments.train import Stop

SWEEPS = Path("runs/sweeps")
SCHEDULE = ("optim.lr", "optim.schedule", "optim.warmup_steps", "optim.decay_steps", "optim.lr_start", "optim.lr_end")
SEEDS = ("seed", "train.seed", "data.seed")
INIT = "init."
TOKENIZER = ("data.tokenizer", "data.bos_token", "data.eos_token", "data.pad_token", "data.single_digits")

# What brings JAX is imported inside the functions that need it, so that help and refusals come at once.


@dataclass(frozen=True)
class Axis:
    """A key and the values that it takes, as they are written on the command line."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Spec:
    """A sweep: a named configuration, overrides of all members, and the axes of both kinds."""

    config: str
    overrides: tuple[str, ...]
    vary: tuple[Axis, ...]
    structure: tuple[Axis, ...]


@dataclass(frozen=True)
class Member:
    """One run of a sweep. values: key -> value of every axis; starts: positional parameter -> initial value."""

    config: Config
    values: dict[str, str]
    starts: dict[str, float]

    @property
    def slug(self) -> str:
        """A name for files."""
        return slug(f"{key.rpartition('.')[2]}-{value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Group:
    """The members of one program; values: those of its structural axes."""

    values: dict[str, str]
    members: tuple[Member, ...]

    @property
    def slug(self) -> str:
        return slug(f"{key.rpartition('.')[2]}-{value}" for key, value in self.values.items()) or "all"


def slug(words: Any) -> str:
    """Words joined into something that can be a file's name."""
    return re.sub(r"[^\w.+-]+", "_", "_".join(words)).strip("_")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 done, 2 a wrong command line, 128 + n stopped by signal n."""
    options = parse(arguments)
    try:
        spec, out = spec_of(options), folder_of(options)
        groups = plan(spec)
        prepare_devices(max(len(group.members) for group in groups), options.devices, out)
        for group in groups:
            check(group, spec)
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(spec, groups, out), flush=True)
    if options.dry_run:
        return 0
    stop = Stop()
    write_json(out / "sweep.json", spec_json(spec))
    rows, start = [], time.monotonic()
    from experiments.sweep_group import run_group
    from experiments.sweep_report import report, write_figures

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
    (out / "report.md").write_text(report(rows, spec_json(spec)), encoding="utf-8")
    write_figures(rows, out)
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
    path = options.out / "sweep.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist, so there is no sweep to resume; start one without --resume")
    saved = spec_from(json.loads(path.read_text(encoding="utf-8")))
    if given is None and (options.vary or options.structure or options.overrides):
        raise ValueError("--resume takes everything from the folder; leave out --vary, --structure and key=value")
    if given not in (None, saved):
        raise ValueError(f"{options.out} holds another sweep: {saved}; choose another --out")
    return saved


def axis_of(text: str) -> Axis:
    """`KEY=A,B` or `KEY=0..7` as an axis; commas inside parentheses belong to a value. ValueError if there is no value,
    or one twice."""
    key, equals, rest = text.partition("=")
    span = re.fullmatch(r"(\d+)\.\.(\d+)", rest)
    if span:
        values = tuple(str(n) for n in range(int(span[1]), int(span[2]) + 1))
    else:
        values = tuple(part.strip() for part in re.split(r",(?![^(]*\))", rest) if part.strip())
    key = configs.ALIASES.get(key.strip(), key.strip())
    if not equals or not values:
        raise ValueError(f"{text!r} is no axis; write KEY=A,B,… or KEY=0..7")
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r} has a value twice")
    return Axis(key, values)


def folder_of(options: argparse.Namespace) -> Path:
    """Where the sweep goes. FileExistsError if something is there that is not to be continued."""
    out = options.out or SWEEPS / time.strftime("%Y%m%d-%H%M%S")
    if not options.resume and out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; continue that sweep with --resume, or choose another --out")
    return Path(out).absolute()


def plan(spec: Spec) -> list[Group]:
    """All members, by program. ValueError for keys and values that do not exist, or that no member may change."""
    keys = [axis.key for axis in (*spec.vary, *spec.structure)]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice or ("seed" in keys and {"train.seed", "data.seed"} & set(keys)):
        raise ValueError(f"the axis {(twice or ['seed'])[0]} is given twice")
    for axis in spec.vary:
        refuse_axis(axis.key)
        if axis.key in TOKENIZER:
            raise ValueError(f"--vary {axis.key}: the members of a program share one tokenizer; use --structure")
    for axis in spec.structure:
        if axis.key in SEEDS or axis.key.startswith(INIT):
            raise ValueError(f"--structure {axis.key}=… would compile one program again and again; use --vary")
        refuse_axis(axis.key)
    groups = []
    for structure in combinations(spec.structure):
        members = [member_of(spec, structure, varied) for varied in combinations(spec.vary)]
        groups.append(Group(structure, tuple(members)))
    return groups


def refuse_axis(key: str) -> None:
    """ValueError for a key that cannot differ between members because they run together."""
    if key.startswith("train.") and key != "train.seed":
        raise ValueError(f"{key} cannot be an axis: the runs of a sweep take their steps together; set it for all")
    if key.startswith("mesh."):
        raise ValueError(f"{key} cannot be an axis: the members of a sweep are spread over devices, each whole")


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Every choice of one value per axis; one empty choice if there are no axes."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def member_of(spec: Spec, structure: dict[str, str], varied: dict[str, str]) -> Member:
    """The member with these values."""
    values = {**structure, **varied}
    starts = {key.removeprefix(INIT): float(value) for key, value in values.items() if key.startswith(INIT)}
    keys = {key: value for key, value in values.items() if not key.startswith(INIT)}
    if "seed" in keys:
        seed = keys.pop("seed")
        keys |= {"train.seed": seed, "data.seed": seed}
    config = configs.get(spec.config, *spec.overrides, *(f"{key}={value}" for key, value in keys.items()))
    if config.mesh.size > 1:
        raise ValueError(
            f"mesh.* spreads one run over {config.mesh.size} devices; a sweep's members are whole: leave it"
        )
    return Member(config, values, starts)


def check(group: Group, spec: Spec) -> None:
    """ValueError if the members of a group are not one program, naming the axis that changes it."""
    from bampath.sweep import same_program

    first = group.members[0]
    for axis in spec.vary:
        if axis.key in (*SEEDS, *SCHEDULE) or axis.key.startswith(INIT):
            continue
        for value in axis.values[1:]:
            other = member_of(spec, group.values, first.values | {axis.key: value})
            if not same_program(first.config, other.config):
                raise ValueError(
                    f"--vary {axis.key}: {value} makes another program than {axis.values[0]} (other shapes, or another "
                    f"constant in the step): not to be vmapped; use --structure {axis.key}={','.join(axis.values)}"
                )


def prepare_devices(members: int, wanted: int, out: Path) -> None:
    """Before JAX starts: virtual CPU devices for the members, and a cache of compiled programs for all groups."""
    import jax

    if wanted < 0:
        raise ValueError(f"--devices {wanted} must be at least 1, or 0 for all")
    jax.config.update("jax_num_cpu_devices", wanted or min(members, 16))  # used only where there is nothing else
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(out / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def describe(spec: Spec, groups: Sequence[Group], out: Path) -> str:
    """What is going to be trained."""
    members = sum(len(group.members) for group in groups)
    first = groups[0].members[0].config
    lines = [f"sweep       {members} runs in {len(groups)} program(s), {first.train.steps} steps each, in {out}"]
    for name, axes in (("vary", spec.vary), ("structure", spec.structure)):
        lines += [f"{name:<11} {axis.key}: {', '.join(axis.values)}" for axis in axes]
    return "\n".join(lines)


def spec_json(spec: Spec) -> dict[str, Any]:
    axes = lambda some: [[axis.key, list(axis.values)] for axis in some]
    return {
        "config": spec.config,
        "overrides": list(spec.overrides),
        "vary": axes(spec.vary),
        "structure": axes(spec.structure),
    }


def spec_from(saved: dict[str, Any]) -> Spec:
    axes = lambda some: tuple(Axis(key, tuple(values)) for key, values in some)
    return Spec(saved["config"], tuple(saved["overrides"]), axes(saved["vary"]), axes(saved["structure"]))


if __name__ == "__main__":
    sys.exit(main())
