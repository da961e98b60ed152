"""What the study measures: one cell is one program on so many GPUs, in a process of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from bampath.config import Config, get
from bampath.positions import parse

What = Literal["losses", "trainer", "attention", "train"]
Strategy = Literal["fsdp", "tensor", "context"]
SCHEMES = ("bam+ssmax", "rope", "path+fox")
COUNTS = (1, 2, 4)

# Set in every process: matrix products go to cuBLAS, and nothing is tuned on GPUs that other processes prepare on.
BASE_FLAGS = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"
# PaTH's kernels for Hopper by name; its layers as a loop, since one of them takes as long to compile as a whole model.
FUSED_PATH = ["model.attention_impl=mosaic_gpu", "model.scan=true"]
# What a variant sets beside them. Collectives overlap with compute by default.
VARIANTS = {"": "", "no overlap": "--xla_gpu_enable_latency_hiding_scheduler=false", "portable kernels": ""}


@dataclass(frozen=True)
class Shape:
    """A named configuration with `heads` heads, trained on `rows` rows of `length` tokens."""

    name: str
    base: str
    heads: int
    rows: int
    length: int
    remat: str = "none"


# 432m and 1.1b are those of the bam_h200 study, so that one GPU is comparable.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("432m", "l14.2", 24, 16, 2048),
        Shape("1.1b", "llama1b", 32, 4, 4096),
        Shape("432m-32k", "l14.2", 24, 1, 32768),
        Shape("432m-131k", "l14.2", 24, 1, 131072, "attention"),
        Shape("smoke", "tiny", 4, 2, 128),
    )
}


@dataclass(frozen=True)
class Cell:
    """One program. scaling: "weak" has the shape's rows on every GPU, "strong" on all of them together."""

    what: What
    scheme: str
    gpus: int
    shape: str = ""
    strategy: Strategy = "fsdp"
    scaling: Literal["weak", "strong"] = "strong"
    variant: str = ""

    @property
    def name(self) -> str:
        if self.what != "train":
            return " ".join((self.what, *([self.shape] if self.shape else []), self.scheme, f"x{self.gpus}"))
        strategy = "one" if self.gpus == 1 else f"{self.strategy} {self.scaling}"
        extra = [self.variant] if self.variant else []
        return " ".join((self.what, self.shape, self.scheme, strategy, *extra, f"x{self.gpus}"))

    @property
    def timed(self) -> bool:
        """Does it need its GPUs to itself."""
        return self.what in ("attention", "train")

    @property
    def cost(self) -> float:
        """How long it takes to measure, about, in units of most cells'."""
        return 4.0 if self.what == "train" and SHAPES[self.shape].length > 65536 else 1.0

    @property
    def carries_keys(self) -> bool:
        """Has a layer of its scheme keys that change on the way (PaTH)."""
        return any(layer.carries_keys for layer in parse(self.scheme).layers)

    @property
    def rows(self) -> int:
        """Rows of a batch over all GPUs."""
        rows = SHAPES[self.shape].rows
        return rows * self.gpus if self.scaling == "weak" else rows

    @property
    def flags(self) -> str:
        """XLA_FLAGS of its process."""
        return f"{BASE_FLAGS} {VARIANTS[self.variant]}".strip()

    def config(self) -> Config:
        """What it trains: AdamW, rows of one document, all rows in one part."""
        shape = SHAPES[self.shape]
        own = [] if self.gpus == 1 else [f"mesh.{self.strategy}={self.gpus}"]
        own += ["model.attention_impl=pallas_triton"] if self.variant == "portable kernels" else []
        own += FUSED_PATH if self.carries_keys else []
        return get(
            shape.base,
            f"model.heads={shape.heads}",
            f"position={self.scheme}",
            f"model.remat={shape.remat}",
            f"data.sequence_length={shape.length}",
            f"data.batch_size={self.rows}",
            "data.document_mask=false",
            "train.accumulate=1",
            "optim.name=adamw",
            *own,
        )


def _ones(scheme: str) -> list[Cell]:
    shapes = ("432m-131k", "432m", "1.1b", "432m-32k")
    return [
        *(Cell("train", scheme, 1, shape) for shape in shapes),
        Cell("attention", scheme, 1, "432m-131k", "context"),
    ]


def _spread(scheme: str, n: int, full: bool) -> list[Cell]:
    """A scheme's cells on n GPUs, the most important ones first. full: all of them."""
    train = lambda *what: Cell("train", scheme, n, *what)
    found = [train("432m", "fsdp", "weak"), Cell("attention", scheme, n, "432m-131k", "context")]
    found += [train("1.1b", "fsdp", "weak"), train("432m-131k", "context"), train("432m-32k", "context")]
    found += [train("432m", "tensor"), train("432m", "fsdp"), train("432m", "fsdp", "weak", "no overlap")]
    found += [train("1.1b", "tensor")]
    if scheme == "bam+ssmax":
        return found if full else found[:-2]
    if scheme == "rope":
        return found[:-2] if full else found[:4]
    return found[:6] if full else [found[0], found[1], found[4]]


def cells(counts: Sequence[int] = COUNTS) -> list[Cell]:
    """Every cell for these numbers of GPUs, in the order of their turns.

    Checks first, then one GPU, since several such cells run side by side, then most GPUs to fewest; PaTH, which takes
    longest to compile, comes last.
    """
    several = sorted((n for n in counts if n > 1), reverse=True)
    most = max(counts)
    found = [Cell("losses", scheme, most) for scheme in SCHEMES if most > 1]
    found += [Cell("trainer", "bam+ssmax", most)] if most > 1 else []
    ones = [n for n in counts if n == 1]
    portable = [Cell("train", SCHEMES[0], n, "432m", "fsdp", "weak", "portable kernels") for n in sorted({most, *ones})]
    for schemes in (SCHEMES[:2], SCHEMES[2:]):
        if 1 in counts:
            found += _by_turns([_ones(scheme) for scheme in schemes])
        for n in several:
            found += _by_turns([_spread(scheme, n, n == most) for scheme in schemes])
        found += portable if schemes == SCHEMES[:2] else []
    return found


def _by_turns(lists: Sequence[Sequence[Cell]]) -> list[Cell]:
    """The first of each list, then the second of each, …"""
    return [cell for group in zip_longest(*lists) for cell in group if cell is not None]


def named(name: str) -> Cell:
    """The cell called `name`, for any number of GPUs. ValueError if there is none."""
    count = name.rpartition(" x")[2]
    counts = {1, int(count)} if count.isdigit() and int(count) > 0 else set(COUNTS)
    known = {cell.name: cell for cell in (*cells(sorted(counts)), *SMOKE)}
    if name not in known:
        raise ValueError(f"no cell is called {name!r}; --dry-run lists them")
    return known[name]


# Tiny cells of every kind, for tests.
SMOKE = (
    Cell("train", "bam+ssmax", 1, "smoke"),
    Cell("train", "bam+ssmax", 2, "smoke", "fsdp", "weak"),
    Cell("train", "bam+ssmax", 2, "smoke", "context"),
    Cell("attention", "bam+ssmax", 2, "smoke", "context"),
)
