"""How fast text becomes shards, and shards become batches:

    python -m experiments.data_loading.run                      about 5 minutes on 2 CPU cores

Makes web-like documents (words drawn by Zipf's law, lengths log-normal with FineWeb's median of about 450 tokens) as
parquet files with FineWeb's columns, trains a byte-level BPE of 32,000 tokens on some of them, prepares a data set of
shards with 1 and 2 workers, and then loads batches from it and from the token cache, with 0, 1 and 2 threads. Every
loading case runs several times, in turns. Writes results.json and the tables in README.md.
"""

import argparse
import dataclasses
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bampath.command import fail_gracefully
from bampath.data import DataConfig, make_loader
from bampath.data.build import build
from bampath.evaluation.results import environment, write_results
from experiments.tables import replace_between

HERE = Path(__file__).parent
SECONDS, REPEATS = 2.0, 5
LEAST_CHARACTERS = 1_000_000  # some documents in each file, and some of them held out
RATES = ("tokens_per_second", "tokens_per_cpu_second")
SHAPES = ((256, 512), (32, 4096))  # rows, length
BEGIN, END = "<!-- numbers: written by experiments.data_loading.run -->", "<!-- end of numbers -->"


def write_text(folder: Path, characters: int) -> None:
    """Parquet files of documents, about so many characters in all."""
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(rng.choice(letters, n)) for n in rng.integers(2, 11, 40_000)])
    files = 4
    for number in range(files):
        rows: list[str] = []
        left = characters // files
        while left > 0:
            length = int(np.clip(rng.lognormal(5.8, 1.0), 20, 20_000))
            text = " ".join(words[np.minimum(rng.zipf(1.2, length) - 1, len(words) - 1)])
            rows.append(text)
            left -= len(text)
        table = pyarrow.table({"text": rows, "id": [f"{number}-{i}" for i in range(len(rows))]})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=1000)


def write_tokenizer(folder: Path, text: Path) -> Path:
    """A byte-level BPE of 32,000 tokens (what the real models have), trained on the first file."""
    import pyarrow.parquet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=32_000, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False)
    texts = pyarrow.parquet.read_table(text / "0.parquet", columns=["text"]).column(0).to_pylist()[:4000]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def prepare(config: DataConfig, folder: Path, workers: int) -> dict[str, Any]:
    """A row: tokens per second of making a data set of shards."""
    start, before = time.perf_counter(), _cpu_seconds()
    dataset = build(config, folder, workers, shard_bytes=16 << 20)
    seconds, used = time.perf_counter() - start, _cpu_seconds() - before
    tokens = sum(part["tokens"] for part in dataset["parts"].values())
    return {
        "case": "prepare",
        "workers": workers,
        "tokens": tokens,
        "documents": sum(part["documents"] for part in dataset["parts"].values()),
        "shards": sum(len(part["shards"]) for part in dataset["parts"].values()),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds),
        "tokens_per_cpu_second": round(tokens / used),
    }


def _cpu_seconds() -> float:
    """Of this process and of the workers that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def load(cases: Sequence[tuple[str, DataConfig]]) -> list[dict[str, Any]]:
    """Rows: tokens per second of loading, wall and per CPU second; the cases take turns."""
    measured: dict[int, list[tuple[float, float]]] = {index: [] for index in range(len(cases))}
    for _ in range(REPEATS):
        for index, (_, config) in enumerate(cases):
            with make_loader(config) as loader:
                next(loader)
                start, cpu, steps = time.perf_counter(), time.process_time(), 0
                while time.perf_counter() - start < SECONDS:
                    next(loader)
                    steps += 1
                tokens = steps * config.batch_size * config.sequence_length
                wall, used = time.perf_counter() - start, time.process_time() - cpu
                measured[index].append((tokens / wall, tokens / used))
    rows = []
    for index, (name, config) in enumerate(cases):
        walls, cpus = zip(*measured[index], strict=True)
        rows.append(
            {
                "case": "load",
                "from": name,
                "workers": config.workers,
                "B": config.batch_size,
                "T": config.sequence_length,
                "tokens_per_second": round(statistics.median(walls)),
                "tokens_per_second_min": round(min(walls)),
                "tokens_per_second_max": round(max(walls)),
                "tokens_per_cpu_second": round(statistics.median(cpus)),
            }
        )
    return rows


def tables(results: dict[str, Any]) -> str:
    """The rows for the README."""
    env, made = results["env"], [row for row in results["rows"] if row["case"] == "prepare"]
    lines = [
        f"{env['date'][:10]}, {env['platform']}, Python {env['python']}, array_record {env['array_record']}, grain "
        f"{env['grain']}; load average {env['load']} by other work, so rates per CPU second say more.",
        "",
        "| making shards | tokens | documents | seconds | tokens per second | per CPU second |",
        "|---|---|---|---|---|---|",
    ]
    for row in made:
        counts = [f"{row[name]:,}" for name in ("tokens", "documents", "seconds", *RATES)]
        lines.append(f"| {row['workers']} worker(s) | {' | '.join(counts)} |")
    lines += [
        "",
        "| loading from | rows × length | threads | M tokens/s, median (least, most) | M tokens per CPU second |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        if row["case"] == "load":
            low, mid, high = (row[f"tokens_per_second{end}"] / 1e6 for end in ("_min", "", "_max"))
            cells = [row["from"], f"{row['B']} × {row['T']}", str(row["workers"]), f"{mid:.1f} ({low:.1f}, {high:.1f})"]
            lines.append(f"| {' | '.join(cells)} | {row['tokens_per_cpu_second'] / 1e6:.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.data_loading.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--characters", type=int, default=160_000_000, help="of text (default 160 million)")
    options = parser.parse_args(arguments)
    if options.characters < LEAST_CHARACTERS:
        raise ValueError(f"--characters {options.characters} must be at least {LEAST_CHARACTERS}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        write_text(folder / "text", options.characters)
        tokenizer = write_tokenizer(folder, folder / "text")
        text = DataConfig(
            source=f"fineweb:{folder / 'text'}", tokenizer=str(tokenizer), validation_fraction=0.01, cache_dir=name
        )
        rows = [prepare(text, folder / f"shards-{workers}", workers) for workers in (1, 2)]
        print(*rows, sep="\n", flush=True)
        shards = dataclasses.replace(text, source=f"shards:{folder / 'shards-2'}")
        mixture = dataclasses.replace(text, source=f"0.7*shards:{folder / 'shards-1'},0.3*shards:{folder / 'shards-2'}")
        sources = {"shards": shards, "mixture of two": mixture, "token cache": text}
        cases = [
            (name, dataclasses.replace(config, batch_size=rows, sequence_length=length, workers=workers))
            for name, config in sources.items()
            for rows, length in SHAPES
            for workers in ((0, 1, 2) if name == "shards" else (1,))
        ]
        rows += load(cases)
        print(*rows[2:], sep="\n", flush=True)
    from importlib.metadata import version

    env = environment() | {"array_record": version("array_record"), "load": f"{os.getloadavg()[1]:.1f}"}
    write_results(HERE / "results.json", env, rows)
    replace_between(HERE / "README.md", BEGIN, END, f"\n{tables({'env': env, 'rows': rows})}\n")


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
