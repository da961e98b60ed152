"""Cells in processes: compiled side by side, on each device a few at a time, in the order of the list."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from bampath.evaluation.results import environment, write_json
from experiments.bam_h200 import kept
from experiments.bam_h200.cells import FAR_LOST, Materials, finished, identity, work
from experiments.bam_h200.config import Cell

TICK = 0.25


class Clock:
    """Seconds since it was made, without those during which this process was stopped."""

    def __init__(self) -> None:
        self._last, self._passed = time.monotonic(), 0.0

    def tick(self) -> float:
        """To be called at least every few seconds: a longer gap counts as a stop."""
        now = time.monotonic()
        gap = now - self._last
        self._last = now
        self._passed += gap if gap < 20 * TICK else TICK
        return self._passed


@dataclass
class _Process:
    cells: list[Cell]
    process: Any
    pipe: Connection
    gpu: str | None = None
    wants: Cell | None = None
    at: Cell | None = None  # the one that it has asked for last
    last: bool = False
    busy: bool = False


@dataclass
class Board:
    """Who waits, who works, what is done."""

    cells: Sequence[Cell]
    materials: Materials
    jobs: Sequence[Future[None]]
    minutes: float
    together: int
    processes: int
    far: bool
    gpus: Sequence[str | None] = (None,)
    rows: dict[Cell, list[dict[str, Any]]] = field(default_factory=dict)
    failed: list[Cell] = field(default_factory=list)
    open: list[_Process] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)


def run_cells(
    cells: Sequence[Cell], materials: Materials, jobs: Sequence[Future[None]], options: argparse.Namespace
) -> dict[Cell, list[Any]]:
    """Read what is finished, run the rest, write results.json after each cell; returns the rows.

    jobs: what must be done before any cell begins; their errors are raised. Where a cell fails the other programs go
    on, and the process ends with status 1.
    """
    processes = options.processes or os.cpu_count() or 1
    gpus = gpus_of(options.gpus)
    board = Board(cells, materials, jobs, options.minutes, options.together, processes, options.far, gpus)
    for cell in cells:
        own = finished(cell, materials)
        if own is not None:
            board.rows[cell] = own
    left = [cell for cell in cells if cell not in board.rows]
    programs = [[cell for cell in left if cell.program == p] for p in dict.fromkeys(cell.program for cell in left)]
    given = dict.fromkeys(board.gpus, 0)  # cells that each GPU has been given so far
    while programs or board.open:
        while programs and len(board.open) < board.processes and not _over(board):
            gpu = min(given, key=lambda name: given[name])
            given[gpu] += len(programs[0])
            board.open.append(_start(board, programs.pop(0), gpu))
        if programs and _over(board) and not board.open:
            break
        _serve(board)
    missing = [cell.slug for cell in cells if cell not in board.rows]
    late = f"; {board.minutes:g} minutes are over, --resume goes on" if missing and _over(board) else ""
    print(f"{len(board.rows)} of {len(cells)} cells" + (f"; missing: {', '.join(missing)}" if missing else "") + late)
    if board.failed:
        failed = ", ".join(dict.fromkeys(cell.slug for cell in board.failed))
        sys.exit(f"error: failed: {failed}; --resume runs what is missing again")
    return board.rows


def _over(board: Board) -> bool:
    return board.clock.tick() > 60 * board.minutes


def gpus_of(count: int | None) -> tuple[str | None, ...]:
    """Names of the first `count` GPUs that this process may use; (None,) for None: whatever JAX takes."""
    if count is None:
        return (None,)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in seen.split(",")] if seen else [str(number) for number in range(count)]
    if count > len(names):
        raise ValueError(f"--gpus {count} is more than CUDA_VISIBLE_DEVICES={seen} has")
    return tuple(names[:count])


def _start(board: Board, cells: list[Cell], gpu: str | None) -> _Process:
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(cells, board.materials, board.far, theirs, gpu), daemon=True)
    process.start()
    theirs.close()
    return _Process(cells, process, mine, gpu)


def _serve(board: Board) -> None:
    """Hear the processes once, then let those work that come first in the list."""
    for pipe in wait([p.pipe for p in board.open], TICK):
        one = next(p for p in board.open if p.pipe is pipe)
        try:
            message = one.pipe.recv()
        except (EOFError, OSError):  # OSError: it died with something unread, or while it sent
            _close(board, one)
        else:
            _hear(board, one, message)
    if _over(board):
        for one in board.open:
            if one.wants:
                _tell(one, "stop")
        return
    if not all(job.done() for job in board.jobs):
        return
    for job in board.jobs:
        job.result()
    for one in turns(board):
        _tell(one, "go")
        one.busy = True


def _tell(one: _Process, word: str) -> None:
    """Answer what it wants. One that has died meanwhile is found when it is heard next."""
    one.wants = None
    with suppress(OSError):
        one.pipe.send(word)


def _close(board: Board, one: _Process) -> None:
    """A process has ended; if it did not say why it died, its cell has failed."""
    one.process.join()
    cell, code = one.at or one.cells[0], one.process.exitcode
    board.open.remove(one)
    if code:
        print(f"{cell.slug}: process ended with status {code}", flush=True)
        lost = f"{cell.slug}: {FAR_LOST}killed" if cell in board.rows else f"{cell.slug}: killed"
        print(lost, flush=True)
        board.failed.append(cell)


def turns(board: Board) -> list[_Process]:
    """Those that may work now: on each GPU the first in the list, `together` of them at a time."""
    found = []
    for gpu in board.gpus:
        mine = [p for p in board.open if p.gpu == gpu]
        waiting = sorted((p for p in mine if p.wants), key=lambda p: (p.last, board.cells.index(p.wants)))
        found += waiting[: max(0, board.together - sum(p.busy for p in mine))]
    return found


def _hear(board: Board, one: _Process, message: tuple[Any, ...]) -> None:
    kind = message[0]
    if kind == "want":
        _, one.wants, one.last = message
        one.at = one.wants
    elif kind == "free":
        one.busy = False
    elif kind == "rows":
        _keep(board, message[1], message[2])
    elif kind == "say":
        print(f"[{board.clock.tick():6.1f}] {message[1]}", flush=True)
    elif kind == "failed":
        print(f"[{board.clock.tick():6.1f}] {message[1].slug}: {message[2]}", flush=True)
        board.failed.append(message[1])
        one.busy = False


def _keep(board: Board, cell: Cell, rows: list[dict[str, Any]]) -> None:
    """Write a finished cell, and what there is of the study."""
    board.rows[cell] = rows
    out = board.materials.out
    write_json(out / "cells" / cell.slug / "rows.json", {"identity": identity(cell, board.materials), "rows": rows})
    write_all(board)
    keys = "  ".join(f"{r['length']}: {r['accuracy']:.2f}" for r in rows if r["benchmark"] == "passkey")
    first = rows[0]
    print(
        f"[{board.clock.tick():6.1f}] {cell.slug}: loss {first['loss']:.3f}, {first['training_seconds']:.0f} + "
        f"{first['evaluation_seconds']:.0f} s, {first['tokens_per_second']:,.0f} tokens/s; passkey {keys}",
        flush=True,
    )


def write_all(board: Board) -> None:
    """results.json with the rows of all finished cells, those of earlier calls included."""
    path = board.materials.out / "results.json"
    mine = [row for cell in board.cells for row in board.rows.get(cell, [])]
    done = {cell.slug for cell in board.rows}
    there = kept.read(path)["rows"] if path.exists() else []
    name = lambda row: Cell(row["case"], row["seed"], row["mix"], row["size"]).slug
    kept.write(path, {"env": environment(), "rows": [*(row for row in there if name(row) not in done), *mine]})
