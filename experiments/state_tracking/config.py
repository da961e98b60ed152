"""The study at its two sizes: which tasks, which schemes, one budget per task."""

import re
from dataclasses import dataclass, replace

from bampath.config import Config, get
from bampath.evaluation.state.__main__ import PREFIX
from bampath.evaluation.state.tasks import parse_task

SCHEMES = ("rope", "nope", "alibi", "bam+ssmax", "fox", "path", "path+fox")
SOLVED = 0.9  # share of rows without a wrong answer from which a word problem counts as solved, as published


@dataclass(frozen=True)
class Trial:
    """A task with its budget, the same for every scheme.

    task: spec of what is trained on; overrides: changes of `tiny`; depths: numbers of layers; a deeper model is only
    trained where no shallower one has solved the task; sequences: rows per test, by name, "" for all others.
    """

    task: str
    overrides: tuple[str, ...]
    depths: tuple[int, ...] = (1,)
    schemes: tuple[str, ...] = SCHEMES
    sequences: tuple[tuple[str, int], ...] = (("", 1000),)

    def config(self, scheme: str, layers: int) -> Config:
        """The configuration of a cell. ValueError for a wrong task, scheme or override."""
        task = parse_task(self.task)
        size = (f"model.vocab_size={task.vocab_size}", f"data.sequence_length={task.length}", f"model.layers={layers}")
        last = {change.partition("=")[0]: change for change in (*size, *self.overrides, f"position={scheme}")}
        config = get("tiny", *last.values())  # a later change of a key replaces an earlier
        return replace(config, data=replace(config.data, source=f"{PREFIX}{self.task}"))

    def rows_of(self, test: str) -> int:
        """How many rows a test has."""
        counts = dict(self.sequences)
        return counts.get(test, counts[""])


@dataclass(frozen=True)
class Study:
    """Trials in the order in which they are run; seeds train side by side."""

    name: str
    trials: tuple[Trial, ...]
    seeds: tuple[int, ...]


# Seeds are a batch axis of one program; the XLA implementations take it on every device.
RECIPE = (
    "model.attention_impl=xla",
    "data.document_mask=false",
    "optim.name=adamw",
    "optim.schedule=linear",
    "optim.lr_end=0",
    "train.tensorboard=false",
)
# The shape of PaTH's flip-flop experiment; MLP and everything about its optimiser are not published.
_FLIPFLOP = ("model.dim=64", "model.heads=2", "model.mlp_dim=128")

_QUICK = ("optim.lr=0.01", "optim.warmup_steps=20", "data.batch_size=16", "train.steps=200")

CPU = Study(
    name="cpu",
    trials=(
        Trial(
            task="fflm(pairs=64)",
            overrides=(*RECIPE, *_FLIPFLOP, *_QUICK),
            sequences=(("", 256), ("sparse", 1024)),
        ),
    ),
    seeds=(0, 1),
)

# Flip-flops: optimiser, batch and steps of the task's own paper (arXiv 2306.00946, for a model of 19M parameters).
_FLIPFLOP_BUDGET = (
    *("optim.lr=0.0003", "optim.b2=0.999", "optim.weight_decay=0.1", "optim.warmup_steps=50"),
    *("data.batch_size=16", "train.steps=10000"),
)
# Word problems and recall: budgets that fit the device time, the same for all.
_WORDS = (
    *("model.dim=128", "model.heads=4", "model.mlp_dim=256", "optim.lr=0.002", "optim.b2=0.999"),
    *("optim.weight_decay=0.01", "optim.warmup_steps=100", "data.batch_size=256", "train.steps=4000"),
)
# A quarter of the published keys and length, so that each key comes as often; two layers and two heads, as published.
_RECALL = (
    *("model.dim=128", "model.heads=2", "model.mlp_dim=256", "optim.lr=0.002", "optim.b2=0.999"),
    *("optim.weight_decay=0.01", "optim.warmup_steps=100", "data.batch_size=32", "train.steps=2500"),
)
_PUBLISHED = ("model.dim=256", "model.mlp_dim=512", "optim.lr=0.001", "data.batch_size=16", "train.steps=3000")
# 8,192 symbols in 1,500 steps ask for each key 375 times, too seldom to be learned; 256 in 2,000, 16,000 times.
_MQAR = ("data.batch_size=64", "train.steps=1500")
_FEW_SYMBOLS = ("data.batch_size=64", "train.steps=2000")
_FEW = ("path", "rope", "fox", "path+fox")


def _words(task: str, schemes: tuple[str, ...] = SCHEMES) -> Trial:
    return Trial(task, (*RECIPE, *_WORDS), depths=(1, 2, 4), schemes=schemes)


def _recall(task: str, schemes: tuple[str, ...] = SCHEMES, changes: tuple[str, ...] = ()) -> Trial:
    return Trial(task, (*RECIPE, *_RECALL, *changes), depths=(2,), schemes=schemes)


GPU = Study(
    name="gpu",
    trials=(
        Trial(
            task="fflm",
            overrides=(*RECIPE, *_FLIPFLOP, *_FLIPFLOP_BUDGET),
            sequences=(("", 1000), ("sparse", 20_000), ("dense", 3000)),
        ),
        _words("words(s5,over=swaps)", ("rope", "fox", "bam+ssmax", "path", "path+fox", "alibi", "nope")),
        _words("words(a5,over=cycles)", _FEW),
        _recall(
            "mqrar(back=2,keys=8,values=16,pairs=96)", ("path", "fox", "rope", "path+fox", "bam+ssmax", "alibi", "nope")
        ),
        _recall("mqrar(keys=8,values=16,pairs=96)", _FEW),
        _recall("mqrar(back=3,keys=8,values=16,pairs=96)", _FEW),
        _recall("mqrar(back=4,keys=8,values=16,pairs=96)", _FEW),
        _recall("mqar", _FEW, _MQAR),
        _recall("mqar(vocabulary=256)", _FEW, _FEW_SYMBOLS),
        _words("words(a5)", _FEW),
        _recall("mqrar(back=2)", _FEW, _PUBLISHED),
        _words("words(s5)", _FEW),
    ),
    seeds=(0, 1, 2),
)

SIZES = {study.name: study for study in (CPU, GPU)}


def slug(task: str, scheme: str, layers: int) -> str:
    """A name for the files of a cell."""
    return re.sub(r"[^a-z0-9]+", "-", f"{task}-{scheme}-{layers}l".lower()).strip("-")
