"""Tokenise a text once, ahead of training, and print its card:

    python -m bampath.data.prepare source=sotu
    python -m bampath.data.prepare source=fineweb:fineweb/sample/10BT tokenizer=tokenizer.json --shards data/fineweb

Arguments are the fields of `DataConfig`, written key=value. Without --shards tokens go to the token cache, made by one
process; with it to a data set of ArrayRecord shards (docs/data.md), made by many, which a stopped build goes on with.
--check compares everything with its checksums.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bampath.command import fail_gracefully
from bampath.data.build import CARD_NAME, build, unit_is_whole
from bampath.data.config import DataConfig
from bampath.data.corpus import PARTS, cache_folder, load_corpus, open_entry, tokenizer_of
from bampath.data.describe import card, describe
from bampath.data.loader import BatchSource
from bampath.data.prepared import SHARDS, mixture_of
from bampath.data.shards import DATASET_NAME, read_json
from bampath.data.sources import open_source
from bampath.data.tokenizer import Tokenizer
from bampath.overrides import override


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the cache entry if it is missing; print a card per part and one row as training sees it."""
    parser = argparse.ArgumentParser(
        prog="python -m bampath.data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="fields of DataConfig, for example source=sotu"
    )
    parser.add_argument("--shards", type=Path, metavar="DIR", help="make a data set of shards there, or go on with it")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--shard-mb", type=int, default=256, metavar="MB", help="text per shard (default 256)")
    parser.add_argument("--check", action="store_true", help="compare every file with its checksums")
    options = parser.parse_intermixed_args(arguments)
    if options.shard_mb < 1:
        raise ValueError(f"--shard-mb {options.shard_mb} must be at least 1")
    if options.workers < 0:
        raise ValueError(f"--workers {options.workers} must be at least 1, or 0 for one per core")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = override(DataConfig(), options.overrides, {})
    tokenizer = tokenizer_of(config)
    if options.shards:
        options.shards = options.shards.expanduser()
        dataset = build(config, options.shards, options.workers, options.shard_mb << 20)
        if options.check:
            check_shards(options.shards, len(dataset["plan"]["units"]))
        config = replace(config, source=f"{SHARDS}{options.shards}")
        print((options.shards / CARD_NAME).read_text("utf-8"))
    elif options.check:
        check(config, tokenizer)
    corpus = load_corpus(config, "train", tokenizer)
    for part in PARTS:
        if part == "train" or corpus.info["other_documents"] or config.validation_source:
            print("\n" + card(load_corpus(config, part, tokenizer), config.sequence_length))
    print("\n" + describe(BatchSource(config, corpus, tokenizer)[0], 0, tokenizer))


def check(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Compare a token cache or a data set of shards with its checksums. ValueError for what is damaged."""
    if config.source.startswith(SHARDS):
        folder = Path(config.source.removeprefix(SHARDS)).expanduser()
        dataset = read_json(folder / DATASET_NAME)
        if dataset is not None:
            check_shards(folder, len(dataset["plan"]["units"]))
        return
    if mixture_of(config.source):
        raise ValueError(f"--check looks at one source at a time, not at the mixture {config.source}")
    load_corpus(config, "train", tokenizer)
    entry = cache_folder(config, open_source(config.source, config.read_options), tokenizer)
    print(f"cache entry {entry}")
    for part in PARTS:
        open_entry(entry, part, check_all=True)


def check_shards(folder: Path, units: int) -> None:
    """ValueError that names the damaged units, which are deleted so that the next build makes them again."""
    damaged = [number for number in range(units) if not unit_is_whole(folder, number, check=True)]
    for number in damaged:
        (folder / f"unit-{number:05d}.json").unlink(missing_ok=True)
    if damaged:
        (folder / DATASET_NAME).unlink(missing_ok=True)
        raise ValueError(
            f"{folder}: unit(s) {damaged} are damaged; make them again with the same command without --check"
        )
    print(f"{folder}: all files of {units} units have their checksums")


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
