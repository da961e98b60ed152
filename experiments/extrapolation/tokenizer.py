"""A small byte-level BPE for the study: whole words for the protocol's sentences, one token per digit.

The paper's tokenizer (Mistral 7B v0.3) has 32,768 tokens; an embedding of that size would be most of a model that
trains in a minute. This one is trained on the study's own training text; the protocol's sentences are added often
enough that their words become tokens, so prompts have about as many tokens as in the paper (task 29, noise 24, info 25,
question 10 instead of 31, 24, 25, 10).
"""

import os
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

from bampath.config import Config
from bampath.data import WORDINGS
from bampath.data.sources import open_source, split_rule

REPEATS = 5000


def make_tokenizer(path: Path, config: Config) -> Path:
    """Train a tokenizer of model.vocab_size tokens on data's training documents, unless `path` is there already."""
    if path.exists():
        return path
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Split(Regex(r"\d"), "isolated")]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.model.vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(config), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.partial")
    tokenizer.save(str(temporary))
    os.replace(temporary, path)
    return path


def _texts(config: Config) -> Iterator[str]:
    source = open_source(config.data.source, config.data.read_options)
    held_out = split_rule(source, config.data.split, config.data.validation_fraction)
    yield from (document.text for document in source.read() if not held_out(document))
    wording = WORDINGS["passkey"]
    sentences = (wording.task, wording.filler, wording.needle.format(key=""), wording.question)
    yield from repeat(" ".join(sentences), REPEATS)
