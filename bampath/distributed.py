"""Several processes as one run: joining, agreeing on what is run and when to stop, and noticing that one is gone.

Every process runs the same program on its own devices; one mesh spans all of them. Process 0 alone writes logs, the
configuration and a checkpoint's description; the arrays of a checkpoint are written by whoever holds them.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bampath.watch import Watch

HEARTBEAT_SECONDS = 100  # JAX's own default

# What the errors of collectives (gloo, NCCL, the coordination service) have in common when a process is gone.
_LOST = re.compile(
    r"gloo|nccl|coordination|heartbeat|barrier|unavailable|connection|peer|socket|deadline_exceeded|another task died",
    re.IGNORECASE,
)


class LostError(RuntimeError):
    """Another process of the run is gone, so nothing that needs all of them can be finished."""


class DisagreementError(ValueError):
    """The processes of a run were started differently; every one of them raises this."""


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    wanted: bool | None = None,
    heartbeat: int = HEARTBEAT_SECONDS,
) -> bool:
    """Call `jax.distributed.initialize` if this process is one of several; returns whether it was. Before any array.

    coordinator (HOST:PORT of process 0), processes and process: all three or none; their defaults are
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. wanted: true joins with what JAX finds out by itself
    (TPU pods, SLURM, Open MPI, GKE), false never joins; None joins if the environment names several processes.
    heartbeat: seconds of silence after which a process counts as dead and JAX ends the others (see `bampath.watch` for
    what is noticed at once).

    ValueError for options that do not go together, or if JAX finds nothing to join.
    """
    given = _given(coordinator, processes, process)
    if wanted is False:
        if coordinator is not None or processes is not None or process is not None:
            raise ValueError("--no-distributed does not go together with --coordinator, --processes and --process")
        return False
    if not (given or wanted or environment()):
        return False
    # Signals are this program's business (see Vote): JAX's own service would swallow SIGTERM until it is asked.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        address, count, index = given or (None, None, None)
        jax.distributed.initialize(
            address, count, index, heartbeat_timeout_seconds=heartbeat, shutdown_timeout_seconds=heartbeat
        )
    except ValueError as error:
        raise ValueError(
            f"no processes to join were found ({error}): give --coordinator HOST:PORT --processes N --process I"
        ) from None
    except RuntimeError as error:  # JAX's own words for a process that does not come, or two that have one number
        raise ValueError(f"joining the other processes failed: {str(error).splitlines()[0]}") from None
    _watch_others(address)
    return True


_watch: Watch | None = None


def _watch_others(coordinator: str | None) -> None:
    """Watch over the other processes, where the host of process 0 is known."""
    global _watch
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or _found_by_jax()
    if address is not None and several():
        _watch = Watch(address.rsplit(":", 1)[0].strip("[]"), jax.process_index(), jax.process_count())


def _found_by_jax() -> str | None:
    """The coordinator that JAX found by itself. It tells no one in public: without it the heartbeat has to do."""
    from jax._src import distributed as private

    return getattr(getattr(private, "global_state", None), "coordinator_address", None)


def _given(coordinator: str | None, processes: int | None, process: int | None) -> tuple[str, int, int] | tuple[()]:
    """The three options, from the environment where none is given. ValueError unless all or none are known."""
    names = ("--coordinator", "--processes", "--process")
    values: tuple[Any, ...] = (coordinator, processes, process)
    if all(value is None for value in values):
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        values = tuple(os.environ.get(name) or None for name in names)
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if len(missing) == len(names) or (names[0].startswith("JAX") and missing == list(names[1:])):
        return ()  # JAX_COORDINATOR_ADDRESS alone is for JAX, which learns the rest from the cluster
    if missing:
        raise ValueError(f"{', '.join(names)} belong together: {' and '.join(missing)} is missing")
    try:
        address, count, index = str(values[0]), int(values[1]), int(values[2])
    except ValueError:
        raise ValueError(f"{names[1]}={values[1]!r} and {names[2]}={values[2]!r} must be whole numbers") from None
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{names[0]}={address!r} must be HOST:PORT of process 0, with a port of 1 to 65535")
    if not 0 <= index < count:
        raise ValueError(f"{names[2]}={index} must be in [0, {names[1]}={count})")
    return address, count, index


def environment() -> str | None:
    """The variable that says that this process is one of several, and None if none does.

    A Cloud TPU VM without such a variable has to be told (`wanted`): its metadata server is not asked unbidden.
    """
    names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
    for name in names:
        value = os.environ.get(name, "")
        count = len(value.split(",")) if name.startswith("TPU") else int(value) if value.isdigit() else 1
        if count > 1:
            return name
    return None


def several() -> bool:
    """Whether this run has more than one process."""
    return jax.process_count() > 1


def lead() -> bool:
    """Whether this is process 0, the one that writes."""
    return jax.process_index() == 0


def check_joined() -> None:
    """ValueError if there are other processes that cannot be talked to: a TPU pod whose processes did not join."""
    if several() and not jax.distributed.is_initialized():
        raise ValueError(
            f"the devices belong to {jax.process_count()} processes, which have not joined each other: "
            "start with --distributed (bampath.distributed.join)"
        )


def agree(facts: Mapping[str, Any]) -> None:
    """DisagreementError, in every process, unless all have the same facts (JSON values), naming what differs."""
    if not several():
        return
    from jax.experimental import multihost_utils

    texts = [json.dumps(value, sort_keys=True, default=str) for value in facts.values()]
    mine = np.stack([np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u4") for text in texts])
    with losses_in_words():
        everyone = np.asarray(multihost_utils.process_allgather(mine))
    for place, (name, text) in enumerate(zip(facts, texts, strict=True)):
        others = [i for i in range(len(everyone)) if (everyone[i, place] != everyone[0, place]).any()]
        if others:
            shown = text if len(text) <= 200 else f"{text[:200]}…"
            raise DisagreementError(
                f"the processes disagree about {name}: {', '.join(map(str, others))} of {len(everyone)} differ from "
                f"process 0; process {jax.process_index()} has {shown}. All need the same command, the same text and "
                "the same --run-dir on a file system that they share"
            )


def decided_by_lead(question: Callable[[], bool]) -> bool:
    """What process 0 finds, in every process; the others do not look. All have to call this, and wait for process 0."""
    if not several():
        return question()
    from jax.experimental import multihost_utils

    with losses_in_words():
        return bool(multihost_utils.broadcast_one_to_all(np.int32(lead() and question())))


class Vote:
    """Whether any process wants to stop, known to all at the same step.

    In a run of several processes an answer belongs to the question before: it is computed behind the step that is under
    way, so that nobody waits for it. Every process must ask equally often.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh if several() else None
        self._pending: jax.Array | None = None
        if self._mesh is not None:
            self._one_each = NamedSharding(self._mesh, P(self._mesh.axis_names))
            self._any = jax.jit(jax.numpy.any, out_shardings=NamedSharding(self._mesh, P()))

    def ask(self, mine: bool) -> bool:
        """This process's wish; returns whether any process wished so (one question ago, if there are several)."""
        if self._mesh is None:
            return mine
        before = self._pending
        wish: Any = lambda index: np.full((1,), mine)
        self._pending = self._any(jax.make_array_from_callback((self._mesh.size,), self._one_each, wish))
        return bool(before) if before is not None else False


@contextmanager
def losses_in_words() -> Iterator[None]:
    """Turns the errors of a collective whose partner is gone into LostError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several() or not _LOST.search(str(error)):
            raise
        raise LostError(
            f"process {jax.process_index()} of {jax.process_count()} has lost another one: see what that one printed "
            "last, then start all of them again with --resume "
            f"(from here it looked like this: {str(error).splitlines()[0][:300]})"
        ) from error


def describe() -> str:
    """Which process this is, in a line."""
    mine = len(jax.local_devices())
    return f"process {jax.process_index()} of {jax.process_count()}, {mine} of {jax.device_count()} devices"


def part() -> None:
    """Leave the run after an end that all processes come to, together with them. Nothing if there are no others."""
    if not jax.distributed.is_initialized():
        return
    if _watch is not None:
        _watch.close()
    jax.distributed.shutdown()


def leave(status: int) -> NoReturn:
    """End this process with an exit status at once, without waiting for others or for anything in the background.

    After an error in one of several processes an ordinary exit would wait for the others, which wait for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
