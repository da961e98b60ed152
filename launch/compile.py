"""Compile the train step of a configuration for a TPU pod that is not here, and say whether and how fast it would run:

    python -m launch.compile --topology v5e:16x16 --config bam-1.1b position=path+fox

Needs libtpu (requirements-tpu.txt), no TPU. The compiler is the chip's own: it places every buffer, so that memory per
device is exact, and it refuses kernels that the chip cannot run. Without mesh.* the mesh is fsdp up to 16 × data;
without model.scan, model.remat and train.accumulate: layers as a loop, remat=attention, one part; a batch that the mesh
does not divide is rounded up. What was chosen is printed. A configuration that does not fit is reported with the
largest batch that does; then the exit status is 3. Speeds are estimates under the assumptions that are printed.

The program is compiled with the least effort, which takes minutes instead of tens of them and some percent more memory.
What comes near the limit, or everything with --full, is compiled once more as a run does it.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bampath import config as configs
from bampath.command import end_with_status, file_to_write
from bampath.config import Config, MeshConfig
from bampath.overrides import override, to_dict
from launch.chips import GIB, Chip, DoesNotFit, chip_of, chips_in
from launch.roofline import ASSUMPTIONS, estimate

if TYPE_CHECKING:
    from launch.program import Program

# What brings JAX and libtpu is imported inside the functions that need it, so that refusals come at once.

Compile = Callable[..., "Program"]  # (config, quick=…)
_NEAR = 1.15  # within this factor of a chip's memory the least effort and a run's may come to different answers


@dataclass(frozen=True)
class _MeshAlone:
    """The mesh.* of a command line, before it is known which batch it divides."""

    mesh: MeshConfig = field(default_factory=MeshConfig)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 it fits, 2 a wrong command line, 3 it does not fit."""
    options = parse(arguments)
    try:
        if options.output and not options.output.parent.is_dir():
            raise ValueError(f"--output {options.output}: there is no folder {options.output.parent}")
        if options.output:
            file_to_write(options.output, "--output")
        chip, count = chip_of(options.topology), chips_in(options.topology)
        config, chosen = resolve(options.config, options.overrides, count)
        devices = _devices(options.topology, count)
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in chosen:
        print(f"chosen: {line}")
    row = check(config, chip, options.topology, compiler(devices), search=not options.no_search, full=options.full)
    print(report(row))
    if options.output:
        options.output.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return 0 if row["fits"] else 3


def _devices(topology: str, count: int) -> list[Any]:
    """The chips of a topology, by libtpu. ValueError if it does not know it, or as something of another size."""
    import jax

    from launch.program import topology_devices

    jax.config.update("jax_platforms", "cpu")  # there is no TPU to look for
    devices = topology_devices(topology)
    if len(devices) != count:
        raise ValueError(f"--topology {topology}: libtpu has {len(devices)} chips for it, not {count}")
    return devices


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the configuration's")
    parser.add_argument("--config", required=True, metavar="NAME", help=f"one of {', '.join(configs.names())}")
    parser.add_argument("--topology", required=True, help="v5e:16x16, v5p:4x4x4, v6e:8x8, …")
    parser.add_argument("--no-search", action="store_true", help="do not look for the largest batch that fits")
    parser.add_argument("--full", action="store_true", help="compile as a run does, in several times the time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the row of results as JSON")
    return parser.parse_intermixed_args(arguments)


def resolve(name: str, overrides: Sequence[str], devices: int) -> tuple[Config, list[str]]:
    """The configuration for so many devices, and what was chosen because it was not given, in words.

    ValueError for keys and values that do not exist, and for a given mesh of another size.
    """
    given = {entry.partition("=")[0].strip() for entry in overrides}
    defaults = {"model.scan": "true", "model.remat": "attention", "train.accumulate": "1"}
    chosen = [f"{key}={value}" for key, value in defaults.items() if key not in given]
    mesh_keys = [key for key in given if key.startswith("mesh.")]
    wanted = [entry for entry in overrides if not entry.startswith("mesh.")]
    base = configs.get(name, *wanted, *chosen)
    if not mesh_keys:
        fsdp = math.gcd(devices, 16, base.model.dim)
        chosen += [f"mesh.data={devices // fsdp}", f"mesh.fsdp={fsdp}"]
    entries = [entry for entry in (*overrides, *chosen) if entry.startswith("mesh.")]
    mesh = override(_MeshAlone(), entries, {}).mesh
    if mesh.size != devices:
        raise ValueError(f"the mesh has {mesh.size} devices, but the topology has {devices}")
    spread = mesh.data * mesh.fsdp * base.train.accumulate
    rows = -(-base.data.batch_size // spread) * spread
    if rows != base.data.batch_size:
        if "data.batch_size" in given:
            raise ValueError(f"data.batch_size={base.data.batch_size} is not divisible by the {spread} of the mesh")
        chosen.append(f"data.batch_size={rows}")
    return configs.get(name, *overrides, *chosen), chosen


def compiler(devices: list[Any]) -> Compile:
    """Compile for `devices`, and say on stderr what is compiled and what came of it: a search has several."""

    from launch.program import compile_step

    def compile_for(config: Config, quick: bool) -> "Program":
        start = time.monotonic()
        say = lambda text, **how: print(text, file=sys.stderr, flush=True, **how)
        say(f"compiling   {rows_of(config)} rows per chip{', with the least effort' * quick}", end=": ")
        try:
            program = compile_step(config, devices, quick=quick)
        except DoesNotFit as error:
            size = "an unknown amount" if error.wanted is None else f"{error.wanted / GIB:.2f} GiB"
            say(f"needs {size}, does not fit ({time.monotonic() - start:.0f} s)")
            raise
        say(f"{program.peak_bytes / GIB:.2f} GiB ({time.monotonic() - start:.0f} s)")
        return program

    return compile_for


def check(
    config: Config, chip: Chip, topology: str, compile_for: Compile, *, search: bool, full: bool = False
) -> dict[str, Any]:
    """One row of results: `config` compiled, and where it does not fit the largest batch that does."""
    from bampath.startup import schemes

    row: dict[str, Any] = {
        "topology": topology,
        "devices": config.mesh.size,
        "position": schemes(config),
        "mesh": to_dict(config.mesh),
        "length": config.data.sequence_length,
        "batch": config.data.batch_size,
        "rows_per_device": rows_of(config),
        "accumulate": config.train.accumulate,
        "remat": config.model.remat,
        "scan": config.model.scan,
        "dtype": config.model.dtype,
        "hbm_bytes": round(chip.hbm),
    }
    try:
        program = _compiled(config, chip, compile_for, full)
    except DoesNotFit as error:
        row |= {"fits": False, "wanted_bytes": None if error.wanted is None else round(error.wanted)}
        if search:
            best = largest_batch(config, compile_for, error.wanted, chip)
            row["largest_batch"] = None if best is None else best[0].data.batch_size
            row["at_largest_batch"] = None if best is None else facts(best[0], chip, best[1])
        return row
    return row | {"fits": True} | facts(config, chip, program)


def _compiled(config: Config, chip: Chip, compile_for: Compile, full: bool) -> "Program":
    """`config` compiled with the least effort and, if that is wanted or too close to tell, as a run compiles it.

    DoesNotFit, at once where the least effort needs much more than there is.
    """
    try:
        program = compile_for(config, quick=True)
    except DoesNotFit as error:
        if error.wanted is None or error.wanted > _NEAR * chip.hbm:
            raise
    else:
        if not full and program.peak_bytes * _NEAR <= chip.hbm:
            return program
    return compile_for(config, quick=False)


def facts(config: Config, chip: Chip, program: "Program") -> dict[str, Any]:
    """What a compiled program says of itself, and the estimate of its speed."""
    from launch.hlo import summary

    speed = estimate(config, chip, program.parameters, program.collectives)
    tokens = config.data.batch_size * config.data.sequence_length
    return {
        "parameters": program.parameters,
        "memory_bytes": program.peak_bytes,
        "argument_bytes": program.argument_bytes,
        "temporary_bytes": program.temporary_bytes,
        "memory_share": round(program.peak_bytes / chip.hbm, 4),
        "kernels": program.kernels,
        "model_flops_per_step": speed.model_flops,
        "xla_flops_per_device": program.xla_flops,
        "collectives": summary(program.collectives),
        "collective_bytes_per_device": round(sum(one.moved_bytes for one in program.collectives)),
        "seconds": {name: round(getattr(speed, f"{name}_seconds"), 6) for name in _PARTS},
        "step_seconds": [round(speed.fastest, 6), round(speed.slowest, 6)],
        "mfu": [round(speed.mfu(speed.fastest), 4), round(speed.mfu(speed.slowest), 4)],
        "tokens_per_second": [round(tokens / speed.fastest), round(tokens / speed.slowest)],
        "lower_s": round(program.lower_seconds, 1),
        "compile_s": round(program.compile_seconds, 1),
        "cpu_s": round(program.cpu_seconds, 1),
        "quick": program.quick,
    }


_PARTS = ("matmul", "attention", "optimizer", "collective")


def largest_batch(
    config: Config, compile_for: Compile, wanted: float | None, chip: Chip
) -> tuple[Config, "Program"] | None:
    """The most rows per device (in each part of a step) that fit, compiled with the least effort; None if not even one
    row does.

    Memory grows about linearly with rows, so the first guesses are proportional and the row above a guess that fits;
    where they mislead, halves follow.
    """
    rows = rows_of(config)
    guess = rows // 2 if wanted is None else int(rows * chip.hbm / wanted)
    low, high, tries = (0, None), rows, 0  # type: tuple[int, Any], int, int
    while high - low[0] > 1:
        tries += 1
        tried = (low[0] + high) // 2 if tries > 3 else min(max(guess, low[0] + 1), high - 1)
        try:
            low = tried, compile_for(with_rows(config, tried), quick=True)
            guess = tried + 1
        except DoesNotFit as error:
            high = tried
            guess = tried - 1 if error.wanted is None else int(tried * chip.hbm / error.wanted)
    return None if low[1] is None else (with_rows(config, low[0]), low[1])


def report(row: dict[str, Any]) -> str:
    """A row of results for people."""
    mesh = " × ".join(f"{name} {size}" for name, size in row["mesh"].items() if size > 1) or "one device"
    lines = [
        f"topology    {row['topology']}, {row['devices']} chips as {mesh}",
        f"position    {row['position']}",
        f"batch       {row['batch']} rows of {row['length']}, {row['rows_per_device']} per chip in each of "
        f"{row['accumulate']} part(s); remat={row['remat']}",
    ]
    if not row["fits"]:
        wanted = row["wanted_bytes"]
        size = "more" if wanted is None else f"{wanted / GIB:.2f} GiB"
        lines.append(f"memory      DOES NOT FIT: it needs {size} of {row['hbm_bytes'] / GIB:.2f} GiB per chip")
        if "largest_batch" not in row:
            return "\n".join(lines)
        if row["largest_batch"] is None:
            return "\n".join([*lines, "            nor does one row per chip: use more chips, fsdp, tensor or context"])
        lines.append(f"            the largest batch that fits is data.batch_size={row['largest_batch']}:")
        row = {**row, **row["at_largest_batch"], "batch": row["largest_batch"]}
    return "\n".join([*lines, *_facts_in_words(row)])


def _facts_in_words(row: dict[str, Any]) -> list[str]:
    memory = (row["memory_bytes"], row["hbm_bytes"], row["argument_bytes"])
    peak, hbm, arguments = (f"{size / GIB:.2f}" for size in memory)
    fast, slow = row["step_seconds"]
    parts = ", ".join(f"{name} {1e3 * row['seconds'][name]:.2f}" for name in _PARTS)
    moved = [
        f"  {each['op']:<19} over {each['axes']:<16} {each['count']:>5} × , {each['moved_bytes'] / 2**20:>10,.1f} MiB"
        for each in row["collectives"]
        if each["moved_bytes"] >= 2**10
    ]
    return [
        f"memory      peak {peak} GiB of {hbm} per chip ({row['memory_share']:.0%}), {arguments} of it parameters, "
        "moments and batch",
        f"kernels     {', '.join(f'{name} × {n}' for name, n in row['kernels'].items()) or 'none but those of XLA'}",
        f"work        {row['parameters']:,} parameters, {row['model_flops_per_step']:.4g} model FLOP per step",
        f"collectives {row['collective_bytes_per_device'] / 2**20:,.1f} MiB sent per chip and step",
        *moved,
        f"compiled    in {row['compile_s']:.1f} s after {row['lower_s']:.1f} s of tracing and lowering, "
        f"{row['cpu_s']:.0f} s of CPU{', with the least effort' * row['quick']}",
        f"estimate    {1e3 * fast:.2f} to {1e3 * slow:.2f} ms per step, "
        f"MFU {row['mfu'][0]:.1%} to {row['mfu'][1]:.1%}, "
        f"{row['tokens_per_second'][0]:,} to {row['tokens_per_second'][1]:,} tokens/s",
        f"            ms: {parts}",
        *(f"  assumed   {text}" for text in ASSUMPTIONS),
    ]


def rows_of(config: Config) -> int:
    """Rows on each device in each part of a step."""
    return config.data.batch_size // (config.mesh.data * config.mesh.fsdp * config.train.accumulate)


def with_rows(config: Config, rows_per_device: int) -> Config:
    """`config` with so many rows on each device in each part of a step."""
    spread = config.mesh.data * config.mesh.fsdp * config.train.accumulate
    return replace(config, data=replace(config.data, batch_size=rows_per_device * spread))


if __name__ == "__main__":
    end_with_status(main)
