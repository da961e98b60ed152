"""The study at its two sizes: which tasks, which schemes, one budget per task."""

from dataclasses import dataclass, replace

from bampath.config import Config, get

SCHEMES = ("rope", "nope", "alibi", "bam+ssmax", "fox", "path", "path+fox")


@dataclass(frozen=True)
class Trial:
    """A task with its budget, the same for every scheme.

    task: spec of what is trained on; overrides: changes of `tiny`; layers: depths that are tried; test_sequences:
    rows per test, for tests that are not named the number under "".
    """

    task: str
    overrides: tuple[str, ...]
    layers: tuple[int, ...] = (1,)
    schemes: tuple[str, ...] = SCHEMES
    test_sequences: tuple[tuple[str, int], ...] = (("", 1000),)

    def config(self, scheme: str, layers: int) -> Config:
        """The configuration of a cell; train.seed is the first seed's. ValueError for what is wrong."""
        from bampath.evaluation.state.tasks import parse_task

        task = parse_task(self.task)
        size = (f"model.vocab_size={task.vocab_size}", f"data.sequence_length={task.length}", f"model.layers={layers}")
        config = get("tiny", *size, *self.overrides, f"position={scheme}")
        return replace(config, data=replace(config.data, source=f"state:{self.task}"))

    def sequences(self, test: str) -> int:
        counts = dict(self.test_sequences)
        return counts.get(test, counts[""])


@dataclass(frozen=True)
class Study:
    """Trials in the order in which they are run, and how many seeds train side by side."""

    name: str
    trials: tuple[Trial, ...]
    seeds: int


_RECIPE = ("model.attention_impl=xla", "train.tensorboard=false", "data.document_mask=false", "optim.clip_norm=1.0")
