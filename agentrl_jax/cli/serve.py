"""`agentrl serve`: an OpenAI-compatible server over a checkpoint."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_jax.errors import UserError
from agentrl_jax.rollout.calls import CALL_FORMATS

_KEY = "AGENTRL_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `agentrl serve`."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a Hugging Face directory, a .gguf file, a pulled model's name, or a run directory",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at; default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    parser.add_argument("--name", help="the model name that clients give; default: CHECKPOINT, or the run's name")
    parser.add_argument("--slots", type=int, default=16, metavar="Q", help="turns that are sampled together")
    parser.add_argument(
        "--context", type=int, metavar="T", help="tokens of a prompt and its answer; default: the model's"
    )
    parser.add_argument(
        "--queue", type=int, default=256, metavar="N", help="requests that may wait; more are answered 429"
    )
    parser.add_argument(
        "--calls",
        choices=sorted(CALL_FORMATS),
        help="how tool calls are written; default: as its chat template asks, else json, or the run's",
    )
    parser.add_argument(
        "--frame", help="how turns are written, such as chatml; default: the directory's chat template, or the run's"
    )
    parser.add_argument(
        "--constrained", action="store_true", help="serve response_format and tool_choice=required (more to compile)"
    )
    parser.add_argument("--seed", type=int, default=0, help="joins the seed of every request")
    parser.add_argument(
        "--drain-seconds", type=float, default=5.0, metavar="S", help="how long requests may go on after SIGTERM"
    )
    parser.epilog = f"With {_KEY} set in the environment, clients must send it as their API key."


def run(arguments: argparse.Namespace, resolved: Callable[[Path], Any]) -> int:
    """Serves until SIGTERM or Ctrl-C. `resolved` gives the config of a run directory."""
    for name, value, least in (
        ("slots", arguments.slots, 1),
        ("queue", arguments.queue, 1),
        ("port", arguments.port, 0),
    ):
        if value < least:
            raise UserError(f"--{name} {value}: expected at least {least}")
    if arguments.context is not None and arguments.context < 2:
        raise UserError(f"--context {arguments.context}: expected at least 2")
    from agentrl_jax.runtime.serve.server import check_installed, listen, serve

    check_installed()
    listener = listen(arguments.host, arguments.port)  # before the params: a taken port is known at once
    with listener:
        service = _service(arguments, resolved)
        serve(service, listener, drain_s=arguments.drain_seconds, ready=lambda url: _ready(service, url))
    return 0


def _service(arguments: argparse.Namespace, resolved: Callable[[Path], Any]) -> Any:
    from dataclasses import replace

    from agentrl_jax.recipes import serve as recipe

    path = Path(arguments.checkpoint)
    if recipe.is_run(path):
        for name, value, what in (("calls", arguments.calls, "calls"), ("frame", arguments.frame, "turns")):
            if value is not None:
                raise UserError(f"--{name} {value}: a run's policy writes {what} as it did in the run; leave it out")
        served = recipe.from_run(resolved(path), path)
    else:
        served = recipe.from_directory(arguments.checkpoint, calls=arguments.calls, frame=arguments.frame or "auto")
    if arguments.name:
        served = replace(served, name=arguments.name)
    bank = next(size for size in (4, 2, 1) if arguments.slots % size == 0)
    size = recipe.EngineSize(
        slots=arguments.slots,
        context=arguments.context,
        bank=bank,
        seed=arguments.seed,
        queue=arguments.queue,
        constrained=arguments.constrained,
    )
    return recipe.open_service(served, size, api_key=os.environ.get(_KEY) or None, resolved=resolved)


def _ready(service: Any, url: str) -> None:
    print(f"serving  {service.name}\nbase_url {url}/v1", flush=True)
