"""What a state-tracking task is, and how one is written: `fflm`, `words(s5,length=12)`, `mqrar(back=3)`."""

import difflib
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from bampath.positions import options
from bampath.positions.grammar import parse_pattern


@dataclass(frozen=True)
class Rows:
    """A batch of a task, all arrays [B, T].

    tokens int32; targets int32: the answer after each place; weights float32: 1 where the answer is asked for, else 0;
    depth int32: how far back the evidence stands (or how much of it there is), 0 where nothing is asked.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    depth: np.ndarray


class StateTask(Protocol):
    """A distribution of rows. Frozen dataclasses whose fields are the options (`bampath.positions.options`) do this.

    NAME, MAIN: how a spec names the task and the option that needs no name.
    """

    NAME: ClassVar[str]
    MAIN: ClassVar[str | None]

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of a row."""
        ...

    @property
    def asked(self) -> int:
        """The most places of a row that are asked."""
        ...

    @property
    def answers(self) -> range:
        """The ids that can be an answer; one of them at random is chance."""
        ...

    def draw(self, draws: np.random.Generator, rows: int) -> Rows: ...

    def tests(self) -> dict[str, "StateTask"]:
        """What a model trained on this task is tested on, by name."""
        ...


def parse_task(spec: str) -> Any:
    """The task of a spec such as `words(s5,length=12)`. ValueError for an unknown name, option or value."""
    from bampath.evaluation.state import flipflop, recall, words

    kinds = {kind.NAME: kind for kind in (flipflop.FlipFlop, words.Words, recall.Mqrar, recall.Mqar)}
    layers = parse_pattern(spec)
    if len(layers) != 1 or len(layers[0]) != 1 or layers[0][0].name not in kinds:
        raise ValueError(
            f"{spec!r} is not a state-tracking task: {', '.join(kinds)}, with options as in fflm(pairs=64)"
        )
    term = layers[0][0]
    kind: Any = kinds[term.name]
    accepted = options.hints(kind)
    if term.main is not None and kind.MAIN is None:
        raise ValueError(f"{term.name}({term.main}): write its options as name=value; they are {', '.join(accepted)}")
    values = {}
    for name, text in [*([(kind.MAIN, term.main)] if term.main is not None else []), *term.options]:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=1) or list(accepted)
            raise ValueError(f"{term.name} has no option {name!r}; did you mean {', '.join(near)}?")
        try:
            values[name] = options.parse_value(text, accepted[name])
        except ValueError as error:
            raise ValueError(f"{term.name}: option {name} {error}") from None
    return kind(**values)


def spec_of(task: StateTask) -> str:
    """The spec that `parse_task` reads back as an equal task: only options that differ from their defaults."""
    return options.canonical(task)
