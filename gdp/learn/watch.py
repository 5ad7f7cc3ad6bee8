"""Notices at once when another process of a training job is gone.

A collective operation whose partner was killed waits for minutes, and then ends the process with
pages of traces. Here every process holds a connection to the first one: the operating system closes
it when either end dies, and the other ends with one line.
"""

import atexit
import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

_BYE = b"bye"


def open_port() -> tuple[socket.socket, int]:
    """A listening socket of the first process, and its port."""
    server = socket.create_server(("", 0))
    return server, server.getsockname()[1]


def watch_others(server: socket.socket, count: int, lost: Callable[[str], None]) -> None:
    """The first process waits for `count` others, then watches them; `lost` gets what happened."""
    with server:
        server.settimeout(60.0)
        peers = [server.accept()[0] for _ in range(count)]
    _watch(peers, lambda: lost("another process ended"))


def watch_first(host: str, port: int, lost: Callable[[str], None]) -> None:
    """Another process watches the first."""
    peer = socket.create_connection((host, port), timeout=60.0)
    _watch([peer], lambda: lost("the first process ended"))


def _watch(peers: list[socket.socket], lost: Callable[[], None]) -> None:
    for peer in peers:
        peer.settimeout(None)
    atexit.register(_leave, peers)
    threading.Thread(target=_listen, args=(peers, lost), daemon=True).start()


def _listen(peers: list[socket.socket], lost: Callable[[], None]) -> None:
    """Until all have said goodbye; a connection that closes without is a process that died."""
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                try:
                    said = key.fileobj.recv(len(_BYE))  # type: ignore[union-attr]
                except OSError:
                    said = b""
                selector.unregister(key.fileobj)
                if said != _BYE:
                    lost()


def _leave(peers: list[socket.socket]) -> None:
    """Say that this end is no accident."""
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.sendall(_BYE)
