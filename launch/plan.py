"""What a launch does, as data: files to write and commands to run, so that it can be shown before it is done.

A plan printed by `script` is a shell script that does the same but for the restarts, which it describes in comments.
"""

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NAME_LENGTH = 40  # the longest name that GKE's workloads may have


@dataclass(frozen=True)
class Command:
    """A command and what it is for. to: a file for its output, instead of the terminal."""

    what: str
    argv: tuple[str, ...]
    to: str = ""

    def shell(self) -> str:
        """The command as one would type it."""
        return shlex.join(self.argv) + (f" > {shlex.quote(self.to)}" if self.to else "")


@dataclass(frozen=True)
class File:
    """A file that is written first."""

    what: str
    path: str
    text: str


@dataclass(frozen=True)
class Plan:
    """files, then `before`, then `run` until it is done, then `after`, which also runs when it failed.

    run: its last command's status counts. again: statuses of it after which everything is tried again, at most
    `restarts` times (None: all but 0 and those in final); healthy: a command that fails if the machines are gone, which
    `rebuild` brings back before the next try.
    """

    name: str
    files: tuple[File, ...] = ()
    before: tuple[Command, ...] = ()
    run: tuple[Command, ...] = ()
    after: tuple[Command, ...] = ()
    restarts: int = 0
    final: tuple[int, ...] = ()
    healthy: Command | None = None
    rebuild: tuple[Command, ...] = field(default=())


def run_name(config: str, position: str, now: time.struct_time) -> str:
    """`bam-1-1b-path-fox-20261129-1952`: configuration, scheme and date in at most 40 letters that clusters accept."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{config}-{position}".lower()).strip("-")
    date = time.strftime("%Y%m%d-%H%M", now)
    return f"{words[: NAME_LENGTH - len(date) - 1].strip('-')}-{date}"


def check_name(name: str) -> None:
    """ValueError for a name that some cluster would refuse."""
    if len(name) > NAME_LENGTH or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(
            f"--name {name!r} must be at most {NAME_LENGTH} of a-z, 0-9 and dashes, and start with a letter"
        )


def script(plan: Plan) -> str:
    """Exactly what would be written and run."""
    lines = [f"# {plan.name}"]
    for file in plan.files:
        lines += ["", f"# {file.what}", f"mkdir -p {shlex.quote(str(Path(file.path).parent))}"]
        end = _end_of(file.text)
        lines += [f"cat > {shlex.quote(file.path)} <<'{end}'", file.text.rstrip("\n"), end]
    for command in (*plan.before, *plan.run):
        lines += ["", f"# {command.what}", command.shell()]
    if plan.restarts:
        final = f", unless it is {', '.join(map(str, plan.final))}" if plan.final else ""
        lines += ["", f"# if that ends with a status other than 0{final}: again, at most {plan.restarts} times"]
    if plan.healthy is not None:
        lines += [f"#   {plan.healthy.what}:", f"#   {plan.healthy.shell()}", "#   if that fails, first"]
        lines += [f"#   {command.shell()}" for command in plan.rebuild]
    for command in plan.after:
        lines += ["", f"# {command.what}", command.shell()]
    return "\n".join(lines)


def _end_of(text: str) -> str:
    """A line that the text does not have."""
    end = "END_OF_FILE"
    while end in text.split("\n"):
        end += "_"
    return end


def execute(plan: Plan, call: Callable[[Command], int], say: Callable[[str], None] = print) -> int:
    """Do it. `call` runs a command and returns its status. Returns the status of the run, or of the command before it
    that failed."""
    for file in plan.files:
        Path(file.path).parent.mkdir(parents=True, exist_ok=True)
        Path(file.path).write_text(file.text, encoding="utf-8")
    status = _all(plan.before, call, say)
    if status:
        return status
    for attempt in range(plan.restarts + 1):
        status = _all(plan.run, call, say)
        if status == 0 or status in plan.final or attempt == plan.restarts:
            break
        say(f"# status {status}: again ({attempt + 1} of at most {plan.restarts})")
        if plan.healthy is not None and call(plan.healthy) != 0 and _all(plan.rebuild, call, say):
            break
    for command in plan.after:
        say(f"# {command.what}")
        call(command)
    return status


def _all(commands: Sequence[Command], call: Callable[[Command], int], say: Callable[[str], None]) -> int:
    """Run commands one after the other, up to the first that fails; its status."""
    for command in commands:
        say(f"# {command.what}\n{command.shell()}")
        status = call(command)
        if status:
            say(f"# ended with {status}")
            return status
    return 0


def call(command: Command) -> int:
    """Run a command, output to the terminal or its file. OSError as a status: 127 if there is no such program."""
    try:
        if not command.to:
            return subprocess.run(command.argv, check=False).returncode
        Path(command.to).parent.mkdir(parents=True, exist_ok=True)
        with open(command.to, "wb") as file:
            return subprocess.run(command.argv, check=False, stdout=file).returncode
    except FileNotFoundError:
        print(f"there is no program {command.argv[0]!r} on this machine")
        return 127
