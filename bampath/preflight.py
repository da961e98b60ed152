"""`--dry-run`: everything that can be known of a run before its first step, in seconds and without changing anything.

Whatever would be refused is refused here, with the same message: configuration, mesh, kernels, the run's folder, the
checkpoint to continue from or to begin with, tokenizer and text. Text that is not tokenised yet is read for a moment.
Memory is estimated (`bampath.memory`).
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from bampath import memory, runs, sharding, startup, warm
from bampath.config import Config
from bampath.data import DataConfig, Tokenizer, load_corpus, make_loader, tokenizer_of
from bampath.data.corpus import Part, cache_folder, open_entry
from bampath.data.formats import Source
from bampath.data.packing import plan_rows
from bampath.data.prepared import SHARDS, mixture_of
from bampath.data.sources import open_source
from bampath.lock import refuse_in_use
from bampath.memory import Memory
from bampath.memory import in_words as size_in_words
from bampath.profiling import Window
from bampath.step import build_model, declare

# How far estimates were from what a compiler placed (docs/training.md): real / estimated is within these.
_REAL_MOST, _REAL_LEAST = 1.4, 0.85
_SAMPLE_SECONDS, _SAMPLE_CHARACTERS = 3.0, 1 << 20


@dataclass(frozen=True)
class Preflight:
    """What was found. fits: true or false, None where the estimate is too close to the limit or there is none."""

    memory: Memory
    limit: float | None
    fits: bool | None


def pretend_devices(count: int) -> None:
    """Let JAX have `count` devices that do nothing, for a mesh that is elsewhere; before its first use."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # it has begun to work with what it found
        if len(jax.devices()) < count:
            raise ValueError(f"{count} devices cannot be pretended: JAX has {len(jax.devices())} already") from error


def check(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    profile: Window | None = None,
    limit: float | None = None,
    say: Callable[[str], None],
) -> Preflight:
    """Look at everything that `bampath.train.fit` would meet before its first step; `say` hears what was found.

    limit: bytes that a device has, by default what this machine's say. Errors are those of `fit`.
    """
    try:
        mesh = sharding.mesh_of(config)
    except ValueError as error:
        raise ValueError(f"{error}; if they are elsewhere, --device-memory GIB says what each of them has") from None
    declared = declare(build_model(config))
    if resume:
        refuse_in_use(run_dir)
    found = runs.open_run(config, run_dir.absolute(), declared, resume, say)
    if profile is not None:
        profile.check(found.step, config.train.steps)
    tokenizer = tokenizer_of(config.data)
    startup.check_vocabulary(config, tokenizer)
    say(startup.banner(config, declared, tokenizer))
    if config.train.init_from and not found.path:
        say(str(warm.plan(config, declared.shapes, tokenizer)))
    parts: tuple[Part, ...] = ("train", "validation") if config.train.eval_every else ("train",)
    for part in parts:
        say(f"{'text' if part == 'train' else 'held out':<11} {text(config, part, tokenizer)}")
    if _ready(config.data, "train", tokenizer):
        with make_loader(config.data, tokenizer=tokenizer) as loader:
            if found.data is not None:
                loader.restore(found.data)
            say(startup.first_rows(loader, found.step))
    needed = memory.estimate(config, declared, mesh)
    available = memory.device_bytes() if limit is None else limit
    fits = verdict(needed, available)
    say(f"{'memory':<11} {in_words(needed, available, fits)}")
    return Preflight(needed, available, fits)


def verdict(needed: Memory, limit: float | None) -> bool | None:
    """Whether it fits, None if that cannot be told."""
    if limit is None or _REAL_LEAST * needed.total <= limit < _REAL_MOST * needed.total:
        return None
    return needed.total < limit


def in_words(needed: Memory, limit: float | None, fits: bool | None) -> str:
    """The line about memory, with what to do where it is short."""
    of = "an unknown amount" if limit is None else size_in_words(limit)
    start = f"about {size_in_words(needed.total)} of {of} per device"
    if fits:
        return f"{start}: it fits ({needed})"
    advice = "a larger train.accumulate, model.remat=attention or full, mesh.fsdp, a smaller batch need less"
    if fits is None:
        return f"{start}: TOO CLOSE TO TELL ({needed}); compile it to be sure; {advice}"
    return f"{start}: IT DOES NOT FIT ({needed}); {advice}"


def text(config: Config, part: Part, tokenizer: Tokenizer) -> str:
    """What is known of one part of the text. Errors of sources and tokenizers pass through."""
    data = config.data
    if not _ready(data, part, tokenizer):
        return _sample(data, part, tokenizer)
    corpus = load_corpus(data, part, tokenizer)
    rows, tokens = plan_rows(corpus.offsets, data.sequence_length, data.packing).rows, int(corpus.offsets[-1])
    size = f"{corpus.documents:,} documents, {tokens:,} tokens, {rows:,} rows of {data.sequence_length}"
    if part == "validation":
        used = min(config.train.eval_batches * data.batch_size, rows)
        return f"{size}, of which {used:,} are scored every {config.train.eval_every:,} steps"
    if mixture_of(data.source):
        return f"{size} in all parts of the mixture"
    return f"{size}; the run goes through them {config.train.steps * data.batch_size / rows:.3g} times"


def _sources(data: DataConfig, part: Part) -> list[tuple[DataConfig, str, Part]]:
    """The sources that make up a part of the text, each with its options and the part of it that is meant."""
    held_out = part == "validation" and bool(data.validation_source)
    spec = data.validation_source if held_out else data.source
    own = replace(data, validation_source="", split="none") if data.validation_source else data
    names = [name for _, name in mixture_of(spec)] or [spec]
    return [(replace(own, source=name), name, "train" if held_out else part) for name in names]


def _ready(data: DataConfig, part: Part, tokenizer: Tokenizer) -> bool:
    """Whether all of a part is tokenised already, and whole. Errors for what is not there at all."""
    return all(_entry(own, name, one, tokenizer) for own, name, one in _sources(data, part))


def _entry(data: DataConfig, name: str, part: Part, tokenizer: Tokenizer) -> bool:
    if name.startswith(SHARDS):
        return bool(load_corpus(data, part, tokenizer))  # opens or raises
    source = open_source(name, data.read_options)
    return open_entry(cache_folder(data, source, tokenizer), part) is not None


def _sample(data: DataConfig, part: Part, tokenizer: Tokenizer) -> str:
    """Read and tokenise the beginning of a text that is not tokenised yet."""
    lines = []
    for own, name, one in _sources(data, part):
        if _entry(own, name, one, tokenizer):
            lines.append(f"{name}: tokenised")
            continue
        documents, characters, tokens, whole = _read_some(open_source(name, own.read_options), tokenizer)
        if not documents:
            raise ValueError(f"source {name} has no documents with any text in its beginning")
        what = "all of it" if whole else "its beginning"
        lines.append(
            f"{name}: not tokenised yet, which the run does first; {what} has {documents:,} documents, "
            f"{characters:,} characters, {tokens:,} tokens"
        )
    return "; ".join(lines)


def _read_some(source: Source, tokenizer: Tokenizer) -> tuple[int, int, int, bool]:
    """(documents, characters, tokens, whether that was all) of what can be read in a moment."""
    documents = characters = tokens = 0
    last = time.monotonic() + _SAMPLE_SECONDS
    reading = (document.text for document in source.read() if document.text)
    while characters < _SAMPLE_CHARACTERS and time.monotonic() < last:
        some = list(itertools.islice(reading, 16))
        if not some:
            return documents, characters, tokens, True
        documents, characters = documents + len(some), characters + sum(map(len, some))
        tokens += sum(len(ids) for ids in tokenizer.encode_batch(some))
    return documents, characters, tokens, False
