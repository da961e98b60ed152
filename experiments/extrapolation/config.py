"""The study at its two sizes: what is trained, and what is asked of the trained models."""

import re
from dataclasses import dataclass
from pathlib import Path

from bampath.config import Config, get


@dataclass(frozen=True)
class Study:
    """One budget for every scheme.

    base, overrides: a named configuration and its changes, in the order applied; every cell adds its scheme, its seed
    and the study's tokenizer. vocab_size: of the tokenizer, which is trained on the training text first. passkey:
    prompt lengths and perplexity: length of a row of text, as multiples of the training length; perplexity_rows: how
    many rows, 0 for all; samples: prompts per length; batch_tokens: tokens that evaluations read together.
    """

    name: str
    base: str
    overrides: tuple[str, ...]
    schemes: tuple[str, ...]
    vocab_size: int
    passkey: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    samples: int = 20
    perplexity: int = 16
    perplexity_rows: int = 0
    batch_tokens: int = 8192

    def config(self, scheme: str, seed: int, tokenizer: Path | str = "bytes") -> Config:
        """The configuration of one cell. ValueError for a scheme or an override that is wrong."""
        cell = (f"position={scheme}", f"train.seed={seed}", f"data.seed={seed}", f"data.tokenizer={tokenizer}")
        changes = (f"model.vocab_size={self.vocab_size}", *self.overrides, *cell)
        last = {change.partition("=")[0]: change for change in changes}  # a later change of a key replaces an earlier
        return get(self.base, *last.values())


SCHEMES = ("nope", "sinusoidal", "rope", "alibi", "bam+ssmax", "path+fox(bias=5)")

# Half of the rows end in a passkey document. Its length varies, since documents of one length teach a place; it is a
# document of its own, so that positions count from its beginning as they will in the test; its answer weighs 20 times
# as much as other tokens, or the few digits would be lost among the words. With Muon and QK-norm a model of two layers
# then finds the keys after about a thousand steps. FoX's gates start at 0.993: at its default of 0.5 a key is forgotten
# within ten tokens and never learned.
RECIPE = (
    "model.qk_norm=true",
    "optim.name=muon",
    "optim.weight_decay=0.1",
    "optim.decay_embedding=false",
    "data.add_eos=false",
    "data.document_mask=true",
    "data.retrieval.share=0.5",
    "data.retrieval.isolated=true",
    "data.retrieval.answer_weight=20",
    "train.tensorboard=false",
)

CPU = Study(
    name="cpu",
    base="tiny",
    overrides=(
        *RECIPE,
        "optim.lr=0.0125",
        "optim.warmup_steps=70",
        "train.steps=1200",
        "train.log_every=20",
        "train.save_every=1200",
    ),
    schemes=SCHEMES,
    vocab_size=1024,
)

GPU = Study(
    name="gpu",
    base="l6",
    overrides=(
        *RECIPE,
        "model.heads=8",
        "optim.lr=0.002",
        "optim.warmup_steps=100",
        "data.batch_size=32",
        "train.accumulate=1",
        "train.steps=5000",
        "train.eval_every=0",
        "train.log_every=50",
        "train.save_every=1000",
    ),
    schemes=SCHEMES,
    vocab_size=8192,
    batch_tokens=131_072,
)

SIZES = {study.name: study for study in (CPU, GPU)}


def slug(spec: str) -> str:
    """A positional spec as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", spec.lower()).strip("-")
