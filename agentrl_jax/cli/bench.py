"""`agentrl bench`: measures a part of the package on this machine, or compiles it for one that is not here."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import agentrl_jax
from agentrl_jax.errors import UserError

HERE_SIZES, THERE_SIZES = ["512x576x49152", "2048x256x8192"], ["32768x4096x151936"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `agentrl bench`."""
    parser.add_argument("part", choices=["loss", "sampler", "env"], help="the loss head, sampling, environments")
    parser.add_argument("--preset", metavar="NAME", help="sampler: the model, tiny, small (default) or smollm2-135m")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--sizes", nargs="+", metavar="TxDxV", help="tokens x width x vocabulary, such as 512x576x49152"
    )
    parser.add_argument("--actions", type=float, default=1.0, metavar="SHARE", help="share of tokens that are actions")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed calls of each contender, in turn")
    parser.add_argument(
        "--topology", metavar="NAME", help="compile ahead of time for this TPU, such as v5p:2x2x1 (needs libtpu)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints time ratios to the naive head, compiled temporary memory and matrix work of every contender.

    For the sampler: tokens a CPU second, and what a prompt that a group shares costs. For environments: what a step
    costs the host, and what a sandbox does.
    """
    if arguments.part == "sampler":
        return _sampler(arguments)
    if arguments.part == "env":
        return _env(arguments)
    if arguments.preset:
        raise UserError(f"--preset {arguments.preset}: bench loss takes --sizes; a preset is for bench sampler")
    names = arguments.sizes or (THERE_SIZES if arguments.topology else HERE_SIZES)
    sizes = [_size(name) for name in names]
    if not 0 <= arguments.actions <= 1:
        raise UserError(f"--actions {arguments.actions}: expected a share of the tokens, from 0 to 1")
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: expected at least 1")
    loss = _benchmark("loss", arguments.topology)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        if arguments.topology:
            measured = loss.measure_topology(loss.Size(*size), arguments.actions, arguments.topology)
        else:
            measured = loss.measure(loss.Size(*size), arguments.actions, arguments.rounds)
        for row in measured:
            print(f"{row['size']}: {row['what']}, {row['who']}", file=sys.stderr)  # a compilation may take a minute
            rows.append(row)
    print(json.dumps(rows, indent=2) if arguments.json else loss.table(rows))
    return 0


def _sampler(arguments: argparse.Namespace) -> int:
    for option in ("sizes", "topology"):
        if getattr(arguments, option):
            raise UserError(f"--{option}: bench sampler takes --preset and --rounds only")
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: expected at least 1")
    sampler, preset = _benchmark("sampler", None), arguments.preset or "small"
    if preset not in sampler.PRESETS:
        raise UserError(f"--preset {preset}: expected one of {', '.join(sampler.PRESETS)}")
    rows = sampler.measure(preset, arguments.rounds)
    print(json.dumps(rows, indent=2) if arguments.json else sampler.table(rows))
    return 0


def _env(arguments: argparse.Namespace) -> int:
    for option in ("preset", "sizes", "topology"):
        if getattr(arguments, option):
            raise UserError(f"--{option}: bench env takes --rounds only")
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: expected at least 1")
    env, sandbox = _benchmark("env", None), _benchmark("sandbox", None)
    steps, boxes = env.measure(arguments.rounds), sandbox.measure(arguments.rounds)
    print(json.dumps([*steps, *boxes], indent=2) if arguments.json else f"{env.table(steps)}\n\n{sandbox.table(boxes)}")
    return 0


def _size(name: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", name):
        raise UserError(f"--sizes {name}: expected tokens x width x vocabulary, such as 512x576x49152")
    return tuple(map(int, name.split("x")))


def _benchmark(name: str, topology: str | None) -> Any:
    """The module `benchmarks.NAME` of the checkout that this package runs from; it loads JAX."""
    checkout = Path(agentrl_jax.__file__).parent.parent
    if not (checkout / "benchmarks" / f"{name}.py").is_file():
        raise UserError(f"agentrl bench runs from a checkout: found no {checkout / 'benchmarks' / name}.py")
    if topology is not None:
        if importlib.util.find_spec("libtpu") is None:
            raise UserError(f"--topology {topology} needs the TPU's compiler, not a TPU: pip install -e '.[tpu]'")
        if not re.fullmatch(r"[\w-]+:\d+(x\d+){1,2}", topology):
            raise UserError(f"--topology {topology}: expected a name such as v5p:2x2x1 or v5e:4x4")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else JAX looks for a TPU when it is loaded
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(f"benchmarks.{name}")
