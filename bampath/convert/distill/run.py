"""A distillation from beginning to end: folders of a run each, `start`, then one per stage.

    OUT/distill.json    the teacher and the stages, to continue the same thing only
    OUT/start           the student as surgery makes it, a checkpoint of step 0
    OUT/stage1 …        ordinary runs: config.json, metrics.jsonl, checkpoints

A stage begins with the last checkpoint of the folder before it and continues from its own; the text stage is
`bampath.train.fit`. A killed distillation continues bit for bit.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from bampath import checkpoint, startup
from bampath.checkpoint import CheckpointError, Info
from bampath.config import Config, Dtype, from_json
from bampath.convert.distill.loop import run_stage
from bampath.convert.distill.options import Stage, refuse_other_architecture, stages_of
from bampath.convert.distill.step import Teacher, teacher_of
from bampath.convert.surgery import transplant, write_start
from bampath.data import Tokenizer, tokenizer_of
from bampath.evaluation.results import write_json
from bampath.load import TOKENIZER_NAMES, load
from bampath.model import check_length, scan_period
from bampath.overrides import to_dict
from bampath.train import fit

NAME = "distill.json"
After = Callable[[str, Path], None]


@dataclass(frozen=True)
class Plan:
    """What is to be done, checked. teacher: its checkpoint; student: the checkpoint that the student begins as, None
    for surgery on the teacher; dtype: the teacher's compute type, None for the student's."""

    teacher: Path
    student: Path | None
    stages: tuple[Stage, ...]
    dtype: Dtype | None = None

    @property
    def position(self) -> str:
        """The student's scheme."""
        return self.stages[0].config.model.position

    def record(self) -> dict[str, Any]:
        """As plain values, for distill.json."""
        stages = [{**vars(stage), "config": to_dict(stage.config)} for stage in self.stages]
        values = {"teacher": self.teacher, "student": self.student, "dtype": self.dtype, "stages": stages}
        return json.loads(json.dumps(values, default=str))


def plan(
    teacher: Path | str, words: Sequence[str], student: Path | str | None = None, dtype: Dtype | None = None
) -> Plan:
    """Read what the checkpoints say of themselves and check everything that can be known before arrays are read.

    words: see `stages_of`. CheckpointError if there is no checkpoint or its tokenizer is another one; ValueError for
    unknown words and schemes, for a student of another vocabulary or shape, and for lengths a scheme is not made for.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} of the teacher is not one of float32, bfloat16")
    theirs = checkpoint.describe(teacher)
    config = config_of(theirs)
    start = None if student is None else checkpoint.describe(student)
    if start is not None:
        words = _like_student(words, config, start)
    stages = stages_of(config, words)
    for stage in stages:
        _check_stage(stage, config)
    _check_tokenizer(tokenizer_of(stages[0].config.data), stages[0].config, [theirs, *([start] if start else [])])
    return Plan(theirs.path, start.path if start else None, stages, dtype)


def config_of(info: Info) -> Config:
    """The configuration that a checkpoint was saved with, with its own copy of the tokenizer."""
    config = from_json(json.dumps(info.config))
    copy = next((str(file) for name in TOKENIZER_NAMES if (file := info.path / name).is_file()), None)
    return replace(config, data=replace(config.data, tokenizer=copy or config.data.tokenizer))


def _like_student(words: Sequence[str], teacher: Config, start: Info) -> list[str]:
    """The words with the scheme of a student that is there."""
    model = config_of(start).model
    refuse_other_architecture(teacher.model, model, f"{start.path}")
    if any(word.startswith(("position=", "model.position=")) for word in words):
        raise ValueError(f"position: {start.path} has {model.position} already; leave the word out")
    return [*words, f"position={model.position}"]


def _check_stage(stage: Stage, teacher: Config) -> None:
    model = stage.config.model
    for which in (model, replace(teacher.model, scan=model.scan)):
        check_length(which, stage.config.data.sequence_length)
        if model.scan:
            scan_period(which)


def _check_tokenizer(tokenizer: Tokenizer, config: Config, infos: Sequence[Info]) -> None:
    for info in infos:
        if info.tokenizer != tokenizer.fingerprint:
            raise CheckpointError(
                f"{info.path} was trained with the tokenizer of fingerprint {info.tokenizer}, but data.tokenizer="
                f"{config.data.tokenizer!r} has {tokenizer.fingerprint}: the same ids would mean other words"
            )
    startup.check_vocabulary(config, tokenizer)


def distill(
    plan: Plan,
    out: Path | str,
    *,
    resume: bool = False,
    after: After = lambda name, folder: None,
    should_stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = print,
    log: TextIO | None = None,
) -> Path | None:
    """Run the stages that are not done in `out`; returns the last folder, None if `should_stop` ended it before.

    resume: continue what is there, which must be the same plan. after(name, folder): called when "start" and when each
    stage is complete, also for those that were complete before. log: where progress is shown, default standard output.
    FileExistsError, ValueError for another plan, and what `bampath.train.fit` raises.
    """
    out = Path(out).absolute()
    _claim(plan, out, resume)
    folder = out / "start"
    if checkpoint.latest(folder, lambda _: None) is None:
        _begin(plan, folder, say)
    after("start", folder)
    theirs: Teacher | None = None
    for stage in plan.stages:
        before, folder = folder, out / stage.name
        if not _complete(stage, folder):
            say(f"{stage.name}: {_describe(stage)}")
            if stage.kind == "text":
                theirs = None  # its memory is for training
                train = replace(stage.config.train, init_from=str(before), init_positional=True)
                config = replace(stage.config, train=train)
                stopped = fit(config, folder, resume=folder.exists(), should_stop=should_stop, out=log).stopped
            else:
                theirs = theirs or _teacher(plan)
                stopped = run_stage(stage, folder, before, theirs, should_stop, log)
            if stopped:
                return None
        after(stage.name, folder)
    return folder


def _claim(plan: Plan, out: Path, resume: bool) -> None:
    """Make the folder, or compare what it holds with the plan."""
    kept, record = out / NAME, plan.record()
    if out.exists() and any(out.iterdir()) and not (resume and kept.is_file()):
        raise FileExistsError(f"{out} is not empty; continue a distillation with --resume, or choose another folder")
    if kept.is_file():
        try:
            before = json.loads(kept.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{kept} is damaged ({error}): restore it, or choose another folder") from None
        if before != record:
            raise ValueError(f"{out} is another distillation: {_first_difference(before, record)}")
        return
    write_json(kept, record)


def _first_difference(before: Any, now: Any, at: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(key, before.get(key), now.get(key)) for key in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(f"stage{i + 1}", a, b) for i, (a, b) in enumerate(zip(before, now, strict=True))]
    else:
        return f"{at.removesuffix('.')} was {before!r}, now {now!r}"
    key, old, new = next((key, a, b) for key, a, b in pairs if a != b)
    return _first_difference(old, new, f"{at}{key}.")


def _describe(stage: Stage) -> str:
    data, optim = stage.config.data, stage.config.optim
    steps, rest = stage.config.train.steps, 0.0 if stage.kind == "attention" else stage.rest
    whom = {0.0: "attention layers and positions train, the rest is frozen", 1.0: "everything trains"}
    what = {
        "attention": f"attention outputs on the teacher's hidden states ({stage.error})",
        "logits": f"KL of distributions at temperature {stage.temperature:g}",
        "text": "loss of the text",
    }[stage.kind]
    return (
        f"{what}, {steps:,} steps of {data.batch_size} × {data.sequence_length} tokens at {optim.lr:g} "
        f"({optim.schedule}); {whom.get(rest, f'everything trains, the rest at {rest:g} of the rate')}"
    )


def _begin(plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
    """Write the student's first checkpoint."""
    loaded, config = load(plan.student or plan.teacher), plan.stages[0].config
    params = loaded.params
    if plan.student is None:
        model = loaded.config.model
        _, params, report = transplant(model, params, plan.position, seed=config.train.seed)
        say(f"{model.position} → {plan.position}\n{report}")
    write_start(folder, config, params, loaded.tokenizer)


def _complete(stage: Stage, folder: Path) -> bool:
    last = checkpoint.latest(folder, lambda _: None)
    return last is not None and int(last.name) == stage.config.train.steps


def _teacher(plan: Plan) -> Teacher:
    loaded = load(plan.teacher)
    return teacher_of(loaded.config.model, loaded.params, plan.stages[0].config.model, plan.dtype)
