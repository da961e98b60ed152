"""How a process learns that it is one of several; what needs several real ones is in tests/scale/test_processes.py."""

import socket
import struct
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from bampath import distributed, watch
from bampath.distributed import DisagreementError, Vote, environment, join

JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@pytest.fixture
def joined(monkeypatch):
    """What `jax.distributed.initialize` was called with, instead of calling it."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: calls.append((args, options)))
    before = jax.config.jax_enable_preemption_service
    for name in JAX:
        monkeypatch.delenv(name, raising=False)
    yield calls
    jax.config.update("jax_enable_preemption_service", before)


def test_options_and_variables_say_which_process_this_is(joined, monkeypatch):
    limits = {"heartbeat_timeout_seconds": 100, "shutdown_timeout_seconds": 100}
    assert join() is False
    assert join("host:9911", 4, 3) is True
    for name, value in zip(JAX, ("other:1", "2", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert join() is True
    assert join(wanted=False) is False
    assert joined == [(("host:9911", 4, 3), limits), (("other:1", 2, 1), limits)]


def test_clusters_are_recognised_by_their_variables(joined, monkeypatch):
    for name, one, many in (
        ("SLURM_STEP_NUM_TASKS", "1", "8"),
        ("OMPI_COMM_WORLD_SIZE", "1", "2"),
        ("TPU_WORKER_HOSTNAMES", "localhost", "a,b"),
        ("TPU_PROCESS_ADDRESSES", "", "a:1,b:1"),
    ):
        monkeypatch.setenv(name, one)
        assert environment() is None
        assert join() is False
        monkeypatch.setenv(name, many)
        assert environment() == name
        assert join(heartbeat=7) is True
        assert joined.pop() == ((None,) * 3, {"heartbeat_timeout_seconds": 7, "shutdown_timeout_seconds": 7})
        assert join(wanted=False) is False
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("host:1", 2, None), {}, "belong together: --process is missing"),
        (("host", 2, 0), {}, "--coordinator='host' must be HOST:PORT of process 0"),
        (
            ("host:99999", 2, 0),
            {},
            "--coordinator='host:99999' must be HOST:PORT of process 0, with a port of 1 to 65535",
        ),
        ((":80", 2, 0), {}, "--coordinator=':80' must be HOST:PORT"),
        (("host:1", 2, 2), {}, r"--process=2 must be in \[0, --processes=2\)"),
        (("host:1", 2, 0), {"wanted": False}, "--no-distributed does not go together with --coordinator"),
    ],
)
def test_options_that_do_not_go_together(joined, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        join(*arguments, **options)
    assert not joined


def test_variables_that_are_no_numbers(joined, monkeypatch):
    for name, value in zip(JAX, ("host:1", "two", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES='two' and JAX_PROCESS_ID='0' must be whole numbers"):
        join()


def test_where_nothing_is_found_the_options_are_named(monkeypatch, joined):
    def nothing(*args, **options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nothing)
    with pytest.raises(ValueError, match=r"no processes to join were found .*--coordinator HOST:PORT --processes N"):
        join(wanted=True)


def test_one_process_needs_nobody(monkeypatch):
    distributed.agree({"anything": 1})
    distributed.check_joined()
    assert distributed.decided_by_lead(lambda: True) is True
    vote = Vote(None)
    assert [vote.ask(wish) for wish in (False, True, False)] == [False, True, False]
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match="belong to 4 processes, which have not joined each other: start with --dist"):
        distributed.check_joined()


def test_only_errors_of_collectives_are_losses(monkeypatch):
    def fail(text):
        with distributed.losses_in_words():
            raise jax.errors.JaxRuntimeError(text)

    gloo = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:4711"
    with pytest.raises(jax.errors.JaxRuntimeError):
        fail(gloo)  # one process has nobody to lose
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(distributed.LostError, match=r"process 0 of 2 has lost another .*--resume.*Gloo all-reduce"):
        fail(gloo)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        fail("RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes")


def test_all_processes_refuse_what_they_do_not_share(monkeypatch):
    def everyone(mine):
        theirs = mine.copy()
        theirs[1:] += 1
        return np.stack([mine, theirs, mine])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", everyone)
    distributed.agree({"the first": 1})
    message = r'disagree about the second: 1 of 3 differ from process 0; process 0 has \{"a": 2\}'
    with pytest.raises(DisagreementError, match=message):
        distributed.agree({"the first": 1, "the second": {"a": 2}})


PEER = """
import sys, time
import numpy as np
from jax.experimental import multihost_utils
message = bytes.fromhex(sys.argv[2])
multihost_utils.broadcast_one_to_all = lambda mine: np.frombuffer(message, np.uint8)
from bampath.watch import Watch
watch = Watch("127.0.0.1", int(sys.argv[1]), 3)
print("watching", flush=True)
if sys.stdin.readline() == "bye\\n":
    watch.close()
else:
    time.sleep(60)
"""


def test_a_closed_connection_ends_the_others_and_a_goodbye_does_not():
    """Process 0 is played by this test: it tells two others that process 2 is gone, after one has said goodbye."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        token = bytes(range(16))
        message = (struct.pack("<I", server.getsockname()[1]) + token).hex()
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running = [subprocess.Popen([sys.executable, "-c", PEER, str(i), message], **options) for i in (1, 2)]
        links = {}
        for _ in running:
            link, _ = server.accept()
            hello = link.recv(20, socket.MSG_WAITALL)
            assert hello[:16] == token
            links[struct.unpack("<I", hello[16:])[0]] = link
        assert set(links) == {1, 2}
        _, said = running[0].communicate("bye\n", timeout=60)
        assert running[0].returncode == 0, said
        assert links[1].recv(1) == b"B"
        since = time.monotonic()
        links[2].sendall(b"L" + struct.pack("<I", 1))
        _, said = running[1].communicate("stay\n", timeout=60)
        assert time.monotonic() - since < 30
        assert running[1].returncode == watch.LOST
        assert "stopped: process 1 of 3 is gone" in said
        for link in links.values():
            link.close()
