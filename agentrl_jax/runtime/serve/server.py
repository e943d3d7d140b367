"""Serving an application on a socket: in the foreground until a signal comes, or in a thread beside other work."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agentrl_jax.errors import UserError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from agentrl_jax.runtime.serve.service import Service

_STARTED_S = 60.0
_POLL_S = 0.01


def check_installed() -> None:
    """Raises `UserError` with what to type where the libraries of the extra `serve` are absent."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {' and '.join(missing)}; type: pip install 'agentrl-jax[serve]'")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises `UserError` where the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise UserError(f"--host {host} --port {port}: cannot listen there ({reason}); give another --port") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(service: Service, listener: socket.socket, *, drain_s: float, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; then requests have `drain_s` to end, what is left is cancelled, none is taken.

    A second Ctrl-C does not wait. `ready(url)` is called once requests are answered.
    """
    server = _server(service, drain_s)
    # uvicorn raises the signals that it took once more at its end, for whoever had them before: nobody needs them.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(_run(server, listener, ready))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def beside(service: Service, *, host: str = "127.0.0.1", port: int = 0, drain_s: float = 1.0) -> Iterator[str]:
    """Serve from a thread while the block runs; yields the URL. Signals stay with the program."""
    listener = listen(host, port)
    server = _server(service, drain_s)
    started = threading.Event()
    failure: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(_run(server, listener, lambda _: started.set()))
        except BaseException as error:
            failure.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=work, name="agentrl-serve", daemon=True)
    thread.start()
    try:
        if not started.wait(_STARTED_S) or failure:
            raise RuntimeError(f"the server did not start: {failure or f'{_STARTED_S} s went by'}")
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


async def _run(server: Any, listener: socket.socket, ready: Callable[[str], None]) -> None:
    url = url_of(listener)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not (server.started or task.done()):
        await asyncio.sleep(_POLL_S)
    if server.started:
        ready(url)
    await task


def _server(service: Service, drain_s: float) -> Any:
    check_installed()
    import uvicorn

    from agentrl_jax.runtime.serve.app import build

    app: Starlette = build(service)
    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", ws="none", http="h11",
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
    )  # fmt: skip
