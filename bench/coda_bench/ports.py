"""Ports of this machine for the processes of a benchmark."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens on now."""
    with contextlib.ExitStack() as sockets:
        ports = []
        for _ in range(count):
            listener = sockets.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
        return ports
