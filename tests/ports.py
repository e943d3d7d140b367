"""A port that a process of a test can be told to listen at."""

import random
import socket

# The kernel gives out ports from 32768 on to whoever asks for any, and to every connection: one that was free a moment
# ago may be a connection's by the time a coordinator wants it. Nobody is given these.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """One that nobody listens at on this host."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
