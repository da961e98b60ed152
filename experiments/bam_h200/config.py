"""The study's sizes, schemes and cells: what is trained, and what is asked of the trained models."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from bampath.config import Config
from experiments.extrapolation.config import RECIPE, Study, slug

SCHEMES = (
    *("bam+ssmax", "rope", "alibi", "path+fox(bias=5)", "bam", "nope", "sinusoidal", "fox(bias=5)", "path"),
    *("path+bam+ssmax", "rope+ssmax", "alibi+ssmax", "nope+ssmax", "sinusoidal+ssmax"),
)
LOOKED_AT = ("bam+ssmax", "bam+ssmax(init=0.2)", "rope", "alibi")  # whose attention is kept, in any recipe
# Of the retrieval documents in the training text: every row ends in one, or there are none.
MIXES = {"retrieval": (), "text": ("data.retrieval.share=0",)}
# What a case may change of the text: how rows are made of it. The text, its tokens and the questions all cells share.
ROW_OPTIONS = ("batch_size", "sequence_length", "packing", "document_mask", "shuffle", "retrieval")
LOADING = ("workers", "prefetch")
NOT_OF_A_CASE = ("position", "model.position", "model.vocab_size", "train.seed")
CLAMPED = "clamped"  # in a case: theta_beta is put back to at least 0 after every step


@dataclass(frozen=True)
class Asked:
    """What a trained model is asked, in tokens. Lengths of one group are read in rows of one width.

    passkey: groups of prompt lengths, far: lengths beyond, for models that still find a key at the last of them;
    samples: prompts per length, far_samples beyond; niah: lengths of RULER's single needles;
    perplexity: length of a row of held-out text, perplexity_rows: how many, one per book; attention: lengths of the
    prompts whose attention is kept; chunk: the longest row that is read in one forward pass.
    """

    passkey: tuple[tuple[int, ...], ...] = ((512, 1024, 2048, 4096), (8192, 16384), (32768,))
    far: tuple[int, ...] = (131_072, 524_288)
    samples: int = 20
    far_samples: int = 5
    niah: tuple[tuple[int, ...], ...] = ((1024, 2048, 4096), (8192, 16384))
    niah_samples: int = 20
    perplexity: int = 32_768
    perplexity_rows: int = 16
    attention: tuple[int, ...] = (512, 8192)
    chunk: int = 40_960


@dataclass(frozen=True)
class Size:
    """A study with what is asked of its models."""

    study: Study
    asked: Asked = field(default_factory=Asked)


def _study(name: str, base: str, *overrides: str, vocab_size: int, batch_tokens: int = 131_072) -> Study:
    common = (
        "data.single_digits=true",
        "data.retrieval.share=1",
        "train.accumulate=1",
        "train.eval_every=0",
        "data.workers=0",
        "model.scan=true",
    )
    return Study(name, base, (*RECIPE, *common, *overrides), SCHEMES, vocab_size, batch_tokens=batch_tokens)


SIZES = {
    size.study.name: size
    for size in (
        Size(
            _study(
                *("small", "l6", "model.heads=8", "optim.lr=0.002", "optim.warmup_steps=100"),
                *("data.batch_size=32", "train.steps=2500"),
                vocab_size=16_384,
            )
        ),
        Size(
            _study(
                *("120m", "l12", "model.heads=12", "optim.lr=0.001", "optim.warmup_steps=200"),
                *("data.batch_size=64", "train.steps=3100", "optim.muon_dtype=bfloat16"),
                vocab_size=16_384,
            )
        ),
        Size(
            _study(
                *("tiny", "tiny", "optim.lr=0.0125", "optim.warmup_steps=5", "data.batch_size=2", "train.steps=50"),
                vocab_size=1024,
                batch_tokens=1024,
            ),
            Asked(
                passkey=((128, 256), (512,)),
                far=(1024,),
                samples=3,
                far_samples=2,
                niah=((640,),),
                niah_samples=2,
                perplexity=512,
                perplexity_rows=3,
                attention=(128,),
                chunk=2048,
            ),
        ),
    )
}


@dataclass(frozen=True)
class Cell:
    """What is trained and asked: a case, a seed, a mix of the text, at a size.

    A case is a scheme, perhaps with changes of its own behind an @: "bam+ssmax @ clamped", "rope @ optim.lr=0.004".
    """

    case: str
    seed: int
    mix: str = "retrieval"
    size: str = "small"

    @property
    def scheme(self) -> str:
        return self.case.partition("@")[0].strip()

    @property
    def changes(self) -> tuple[str, ...]:
        return tuple(self.case.partition("@")[2].split())

    @property
    def slug(self) -> str:
        """A name for files."""
        return f"{self.size}-{self.mix}-{slug(self.case)}-seed{self.seed}"

    @property
    def program(self) -> tuple[str, str, str]:
        """Cells that differ in the seed only share their compiled programs."""
        return (self.size, self.mix, self.case)

    def config(self, tokenizer: Path, source: str, overrides: tuple[str, ...] = ()) -> Config:
        """ValueError for a scheme, mix or override that is wrong, and for a change that is not a case's own."""
        if self.mix not in MIXES:
            raise ValueError(f"mix={self.mix!r} is not one of {', '.join(MIXES)}")
        study = SIZES[self.size].study
        own = [change for change in self.changes if change != CLAMPED]
        for change in own:
            _refuse_shared(self.case, change.partition("=")[0])
        changes = (*study.overrides, *MIXES[self.mix], f"data.source={source}", *overrides, *own)
        return replace(study, overrides=changes).config(self.scheme, self.seed, tokenizer)


def without_recipe(case: str) -> tuple[str, str]:
    """A case without what it changes of the data and of the heads' number, and that: ("rope @ optim.lr=0.004",
    "data.batch_size=16")."""
    cell = Cell(case, 0)
    recipe = [change for change in cell.changes if change.startswith(("data.", "model.heads="))]
    rest = [change for change in cell.changes if change not in recipe]
    return " @ ".join([cell.scheme, *([" ".join(rest)] if rest else [])]), " ".join(recipe)


def _refuse_shared(case: str, key: str) -> None:
    """ValueError for what a case may not change: it is another option's, or all cells of a study share it."""
    part, _, name = key.partition(".")
    own = name.split(".")[0] in (*ROW_OPTIONS, *LOADING)
    if key in NOT_OF_A_CASE or (part == "data" and not own):
        data = ", ".join(f"data.{option}" for option in ROW_OPTIONS)
        raise ValueError(
            f"case {case!r} changes {key}, which is the same for all its cells or set by --text, --seeds or the scheme;"
            f" of the data a case may change {data}"
        )
