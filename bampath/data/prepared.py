"""Corpora that are made of others: data sets of shards (`shards:FOLDER`), and mixtures (`0.7*A,0.3*B`)."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bampath.data.config import DataConfig
from bampath.data.corpus import PARTS, Part, TokenCorpus, digest
from bampath.data.shards import DATASET_NAME, PLAN_NAME, JoinedTokens, ShardTokens, read_json
from bampath.data.sources import WEIGHT
from bampath.data.tokenizer import Tokenizer

SHARDS = "shards:"
MADE_WITH = ("add_bos", "add_eos", "split", "validation_fraction", "documents", "text_field", "invalid_utf8")


def mixture_of(source: str) -> list[tuple[float, str]]:
    """(weight, source) of `0.7*A,0.3*B`; empty for any other source, also for one part alone: `9*.txt` is a glob.

    ValueError for weights that are not positive numbers.
    """
    parts = re.split(rf",(?=\s*{WEIGHT}\*)", source)
    found = [re.fullmatch(rf"\s*({WEIGHT})\*(.+)", part) for part in parts]
    if found[0] is None or len(found) == 1:
        return []
    parsed = []
    for match in found:
        if match is None:  # nothing behind the star
            raise ValueError(f"a part of source={source!r} has a weight and no source")
        try:
            weight = float(match[1])
        except ValueError:
            raise ValueError(f"the weight {match[1]!r} in source={source!r} is not a number") from None
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight {match[1]} in source={source!r} must be finite and greater than 0")
        parsed.append((weight, match[2].strip()))
    return parsed


def open_mixture(config: DataConfig, part: Part, tokenizer: Tokenizer, load: Callable[..., TokenCorpus]) -> TokenCorpus:
    """The corpora of a mixture end to end, with weights that add up to 1. `load` is `corpus.load_corpus`.

    Weights are shares of the rows in training; held out is what each part holds out.
    """
    held_out = part == "validation" and config.validation_source
    spec = config.validation_source if held_out else config.source
    own = replace(config, validation_source="", split="none") if held_out else config
    parts = mixture_of(spec)
    corpora = [load(replace(own, source=source), "train" if held_out else part, tokenizer) for _, source in parts]
    total = sum(weight for weight, _ in parts)
    weights = [weight / total for weight, _ in parts]
    dtypes = {corpus.tokens.dtype for corpus in corpora}
    shifts = np.cumsum([0, *(len(corpus.tokens) for corpus in corpora[:-1])])
    offsets = [corpus.offsets[:-1] + shift for corpus, shift in zip(corpora, shifts, strict=True)]
    joined = JoinedTokens([corpus.tokens for corpus in corpora], np.result_type(*dtypes))
    facts = [(corpus.fingerprint, round(weight, 9)) for corpus, weight in zip(corpora, weights, strict=True)]
    info = {
        "source": spec,
        "part": part,
        "licence": "; ".join(dict.fromkeys(str(c.info["licence"]) for c in corpora if c.info.get("licence"))),
        "tokenizer": tokenizer.name,
        "split": config.split,
        "skipped": sum(corpus.info["skipped"] for corpus in corpora),
        "other_documents": sum(corpus.info["other_documents"] for corpus in corpora),
        "characters": sum(corpus.info["characters"] for corpus in corpora),
        "first_names": [],
        "mixture": [
            f"{weight:.1%} {corpus.info['source']} ({corpus.documents:,} documents, {len(corpus.tokens):,} tokens)"
            for corpus, weight in zip(corpora, weights, strict=True)
        ],
    }
    whole = np.append(np.concatenate(offsets), len(joined)).astype(np.int64)
    fingerprint = digest(repr(facts).encode())
    return TokenCorpus(joined, whole, fingerprint, info, tuple(zip(corpora, weights, strict=True)))


def open_shards(config: DataConfig, part: Part, tokenizer: Tokenizer) -> TokenCorpus:
    """One part of a data set that `python -m bampath.data.prepare --shards` made.

    FileNotFoundError if there is none; ValueError if it is unfinished or damaged (sizes are compared; --check compares
    checksums), or was made with another tokenizer or other options.
    """
    folder = Path(config.source.removeprefix(SHARDS)).expanduser()
    dataset = read_json(folder / DATASET_NAME)
    if dataset is None:
        raise _no_dataset(folder)
    _refuse_differences(config, folder, dataset["plan"], tokenizer)
    facts = dataset["parts"][part]
    dtype = np.dtype(dataset["plan"]["dtype"])
    for shard in facts["shards"]:
        for name, file in shard["files"].items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != file["bytes"]:
                what = "is missing" if size is None else f"has {size} bytes of {file['bytes']}"
                raise ValueError(f"{path} {what}: delete {folder / DATASET_NAME} and prepare the data set again")
    shards = [ShardTokens(folder / _name(shard), shard["tokens"], dtype) for shard in facts["shards"]]
    lengths = [np.fromfile((folder / _name(shard)).with_suffix(".lengths"), "<u4") for shard in facts["shards"]]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, "<u4"), *lengths]), dtype=np.int64)])
    others = dataset["parts"][next(p for p in PARTS if p != part)]["documents"]
    if facts["documents"] == 0:
        why = f"its split puts all {others} documents on the other side" if others else "it has no documents at all"
        raise ValueError(f"the {part} part of {config.source} is empty: {why}")
    more = {"part": part, "source": config.source, "other_documents": others}
    info = {**dataset["facts"], **{name: facts[name] for name in ("characters", "first_names")}, **more}
    return TokenCorpus(JoinedTokens(shards, dtype), offsets.astype(np.int64), facts["fingerprint"], info)


def _name(shard: dict[str, Any]) -> str:
    return next(name for name in shard["files"] if name.endswith(".array_record"))


def _no_dataset(folder: Path) -> Exception:
    plan = read_json(folder / PLAN_NAME)
    if plan is None:
        return FileNotFoundError(
            f"{folder} holds no data set: python -m bampath.data.prepare --shards {folder} … makes one"
        )
    done = len(list(folder.glob("unit-*.json")))
    return ValueError(
        f"the data set {folder} is not finished ({done} of {len(plan['units'])} units): run the command that makes it "
        f"(python -m bampath.data.prepare source={plan['source']} --shards {folder}) again: it goes on where it stopped"
    )


def _refuse_differences(config: DataConfig, folder: Path, plan: dict[str, Any], tokenizer: Tokenizer) -> None:
    """ValueError for a tokenizer or an option that is not the one that the shards were made with. Options at their
    defaults are taken as not given where they only say how text was read or split."""
    if plan["tokenizer_fingerprint"] != tokenizer.fingerprint:
        raise ValueError(f"{folder} was made with the tokenizer {plan['tokenizer']}, not with {tokenizer.name}")
    default = DataConfig()
    for name in MADE_WITH:
        now, made = getattr(config, name), plan["options"][name]
        if now != made and (name.startswith("add_") or now != getattr(default, name)):
            raise ValueError(f"{folder} was made with data.{name}={made}, not {now}")
    if config.max_documents:
        raise ValueError(f"data.max_documents={config.max_documents} does not work on shards: they are read whole")
