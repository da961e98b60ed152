"""Noticing at once that a process of a run has ended: a connection of every process to process 0, closed by the system.

A collective whose partner is gone may wait for ever (gloo and NCCL do), and JAX notices only when its heartbeat is
missed. Here the connection of a process that ends, in whatever way, tells process 0, which tells the others; all end
with a message. A machine that loses its power closes nothing: that is still left to the heartbeat.
"""

import os
import socket
import struct
import sys
import threading
import time
from secrets import token_bytes
from typing import NoReturn

import numpy as np

LOST = 4  # exit status
_TOKEN = 16
_BYE, _GONE = b"B", b"L"
_CONNECT_SECONDS = 20


class Watch:
    """One end of the connections: all others' in process 0, the one to process 0 elsewhere.

    Made by all processes together, after they have joined; `close` before an end that all come to.
    """

    def __init__(self, host: str, index: int, count: int) -> None:
        self._index, self._count = index, count
        self._peers: dict[int, socket.socket] = {}
        self._lock, self._closed = threading.Lock(), False
        if index == 0:
            server = socket.create_server(("", 0))
            token = token_bytes(_TOKEN)
            _from_lead(struct.pack("<I", server.getsockname()[1]) + token)
            threading.Thread(target=self._accept, args=(server, token), daemon=True).start()
            return
        received = _from_lead(bytes(4 + _TOKEN))
        (port,), token = struct.unpack("<I", received[:4]), received[4:]
        try:
            link = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            link.settimeout(None)
            link.sendall(token + struct.pack("<I", index))
        except OSError as error:
            print(
                f"process {index} cannot reach {host}:{port} of process 0 ({error}): that a process is gone will be "
                "noticed by its heartbeat only",
                file=sys.stderr,
            )
            return
        self._watch(0, link)

    def close(self) -> None:
        """Say goodbye: from here on this process may end."""
        with self._lock:
            self._closed = True
            self._tell(_BYE)

    def _accept(self, server: socket.socket, token: bytes) -> None:
        while len(self._peers) < self._count - 1:
            link, _ = server.accept()
            link.settimeout(_CONNECT_SECONDS)
            try:
                hello = _receive(link, _TOKEN + 4)
            except OSError:
                hello = b""
            if hello[:_TOKEN] != token:  # somebody else who knocks at ports
                link.close()
                continue
            link.settimeout(None)
            self._watch(struct.unpack("<I", hello[_TOKEN:])[0], link)
        server.close()

    def _watch(self, peer: int, link: socket.socket) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self._lock:
            self._peers[peer] = link
        threading.Thread(target=self._listen, args=(peer, link), daemon=True).start()

    def _listen(self, peer: int, link: socket.socket) -> None:
        try:
            said = _receive(link, 1)
            gone = struct.unpack("<I", _receive(link, 4))[0] if said == _GONE else peer
        except (OSError, struct.error):
            said, gone = b"", peer
        if said != _BYE and not self._closed:
            self._end(gone)

    def _end(self, gone: int) -> NoReturn:
        """End this process because another one is gone; process 0 first tells the others which."""
        print(
            f"stopped: process {gone} of {self._count} is gone (what it printed last says why, unless it was killed). "
            "Start all of them again with --resume",
            file=sys.stderr,
        )
        if self._index == 0:
            with self._lock:
                self._tell(_GONE + struct.pack("<I", gone))
            time.sleep(1)  # when process 0 ends, JAX ends the others: let them say the same thing first
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOST)

    def _tell(self, message: bytes) -> None:
        for link in self._peers.values():
            try:
                link.sendall(message)
            except OSError:  # it has ended as well
                continue


def _receive(link: socket.socket, size: int) -> bytes:
    """`size` bytes, fewer if the connection ends."""
    found = b""
    while len(found) < size and (more := link.recv(size - len(found))):
        found += more
    return found


def _from_lead(message: bytes) -> bytes:
    """Process 0's message, in every process; the others give one of the same length."""
    from jax.experimental import multihost_utils

    sent = multihost_utils.broadcast_one_to_all(np.frombuffer(message, np.uint8))
    return np.asarray(sent, np.uint8).tobytes()
