"""How fast batches come: `python -m bampath.data.benchmark [key=value …]`, in tokens per second of one process.

Arguments are the fields of `DataConfig`. Compare the number with what training consumes (tokens/s times processes): the
loader should make at least five times as many.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bampath.command import fail_gracefully, file_to_write
from bampath.data.config import DataConfig
from bampath.data.loader import make_loader
from bampath.overrides import override


def measure(config: DataConfig, seconds: float = 2.0, repeats: int = 3) -> dict[str, Any]:
    """Tokens per second (median, least, most of `repeats` runs of `seconds`), seconds of a resume at step 10^6."""
    rates = []
    with make_loader(config) as loader:
        next(loader)
        for _ in range(repeats):
            steps, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                next(loader)
                steps += 1
            rates.append(steps * config.batch_size * config.sequence_length / (time.perf_counter() - start))
        start = time.perf_counter()
        loader.restore({**loader.state(), "step": 10**6})
        next(loader)
        resume = time.perf_counter() - start
    case = {name: getattr(config, name) for name in ("source", "tokenizer", "packing", "workers", "batch_size")}
    return {
        "case": "data loader",
        **case,
        "T": config.sequence_length,
        "retrieval_share": config.retrieval.share,
        "tokens_per_second": round(statistics.median(rates)),
        "tokens_per_second_min": round(min(rates)),
        "tokens_per_second_max": round(max(rates)),
        "resume_seconds": resume,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one configuration with 0, 1 and 2 workers; with --out, write the results file as well."""
    parser = argparse.ArgumentParser(prog="python -m bampath.data.benchmark", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="fields of DataConfig, for example packing=whole"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each of three runs per number of workers")
    parser.add_argument("--out", type=Path, help="a results.json to write")
    options = parser.parse_intermixed_args(arguments)
    if not 0 < options.seconds < math.inf:
        raise ValueError(f"--seconds {options.seconds:g} must be greater than 0")
    if options.out:
        options.out = file_to_write(options.out, "--out")
    config = override(DataConfig(), options.overrides, {})
    rows = [measure(dataclasses.replace(config, workers=w), options.seconds) for w in (0, 1, 2)]
    for row in rows:
        rate, resume = row["tokens_per_second"] / 1e6, row["resume_seconds"]
        print(f"{row['workers']} workers: {rate:7.1f} M tokens/s, resume at step 1,000,000 in {resume:.3f} s")
    if options.out:
        environment = {
            "date": time.strftime("%Y-%m-%d"),
            "device": f"{platform.machine()}, {os.cpu_count()} CPU cores",
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        options.out.write_text(json.dumps({"env": environment, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
