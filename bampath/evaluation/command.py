"""What the evaluation commands share: the checkpoint, the reader, lengths such as 4x."""

import argparse

from bampath.command import file_to_write
from bampath.evaluation.reader import CHUNK, ModelReader
from bampath.load import Loaded, load


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model runs, and how."""
    parser.add_argument("checkpoint", help="a run's folder (its latest checkpoint) or a checkpoint's")
    parser.add_argument("--tokenizer", help="path of the tokenizer's file (default: the copy in the checkpoint)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype (default: the model's)")
    parser.add_argument(
        "--position", metavar="SPEC", help="another scheme of the same parameters: a rescaled rope, say"
    )
    parser.add_argument("--implementation", help="attention implementation (default: the model's)")
    parser.add_argument(
        "--chunk",
        type=int,
        default=CHUNK,
        help="tokens of a row in one forward; longer rows go through the cache in such pieces (default %(default)s)",
    )
    parser.add_argument("--out", help="write results as JSON to this file")


def check_options(args: argparse.Namespace, *counts: str, **least: int) -> None:
    """ValueError for options that cannot be, before a checkpoint is read: a place of results that cannot be written,
    lengths that are none, numbers below 1 (counts) or below what is given (least)."""
    for name, low in {"chunk": 1, **dict.fromkeys(counts, 1), **least}.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {low}")
    if args.out:
        args.out = str(file_to_write(args.out, "--out"))
        if args.out.endswith(".md"):
            raise ValueError(f"--out {args.out}: results are JSON, and the page beside them is called so; write .json")


def load_reader(args: argparse.Namespace) -> tuple[Loaded, ModelReader]:
    """The checkpoint of parsed arguments and a reader for it."""
    changes = {"dtype": args.dtype, "attention_impl": args.implementation, "position": args.position}
    loaded = load(args.checkpoint, args.tokenizer, **{name: value for name, value in changes.items() if value})
    return loaded, ModelReader(loaded.model, loaded.params, args.chunk)


def parse_length(text: str, option: str, train_length: int) -> int:
    """`parse_lengths` of an option that takes one. ValueError names it where there are several."""
    found = parse_lengths(text, train_length)
    if len(found) > 1:
        raise ValueError(f"{option} {text!r} must be one length")
    return found[0]


def parse_lengths(text: str, train_length: int) -> list[int]:
    """Lengths in tokens from "512,1024" or, as multiples of the training length, "1x,2.5x"; the forms may be mixed."""
    lengths = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(item[:-1]) * train_length if item.endswith("x") else int(item)
        except ValueError:
            raise ValueError(f"length {item!r} is neither a number of tokens nor a multiple such as 4x") from None
        if value < 0 or value != value or value == float("inf"):
            raise ValueError(f"length {item!r} must be finite and not negative")
        lengths.append(int(value))
    if not lengths:
        raise ValueError(f"no length in {text!r}")
    return lengths
