"""Proves a slice before anything is trained on it: the devices, the collectives between them, one step of a config.

    python tpu/smoke.py                                     # one host
    python tpu/smoke.py --multihost                         # every host of a TPU slice, or srun on every node
    python tpu/smoke.py --coordinator HOST:PORT --processes 2 --process 0     # anywhere else

Runs the same on all hosts at once. Every line begins with [process/processes]; the last is `ok`, or names what failed
(exit code 1). A phase that does not end, because a host is missing or a link is down, is named with its process
(exit code 3) instead of waiting for ever.

The step is the supervised step of the config: its model, its demonstrations, its loss and optimizer. The same rows go
to every number of devices (repeated where there are more devices than rows), so the loss must be the loss that one CPU
device of the same host computes, on every slice.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax import sharding
from agentrl_jax.batch import TokenBatch
from agentrl_jax.cli.configs import apply_overrides, load
from agentrl_jax.errors import UserError
from agentrl_jax.learner.optimizers import adamw
from agentrl_jax.learner.state import LearnerState
from agentrl_jax.learner.update import make_update
from agentrl_jax.recipes import demonstrations
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import RunConfig, Shown
from agentrl_jax.recipes.sft import select
from agentrl_jax.rl.imitation import imitation_loss

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.py"
SHOWN = 48  # demonstrations played: enough rows, quickly
STUCK = 3  # exit code
CLOSE = {"cpu": 1e-5}  # relative error of the loss against one CPU device
CLOSE_ELSEWHERE = 2e-3  # matmuls of full precision, kernels and reductions in another order


_me = ["0/1"]  # this process and the number of processes


class Failed(Exception):
    """What is wrong with the slice, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    # A slice is compared with a CPU: f32 matmuls in one bf16 pass, the default of a TPU, would blur what is compared.
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        with phase("join", arguments.timeout):
            join(arguments)
        with phase("devices", arguments.timeout):
            check_devices(arguments)
        with phase("collectives", arguments.timeout):
            check_collectives()
        with phase("step", arguments.timeout):
            check_step(apply_overrides(load(arguments.config, RunConfig), arguments.overrides))
        with phase("leave", arguments.timeout):
            leave()
    except (Failed, UserError) as error:
        say(f"FAILED: {error}")
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="smoke.py", description="Proves a slice: devices, collectives, one step.")
    parser.add_argument("--config", default=str(QUICKSTART), help="whose supervised step to take")
    parser.add_argument("--multihost", action="store_true", help="join the hosts that TPU, GKE or Slurm name")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="join by hand, with --processes and --process")
    parser.add_argument("--processes", type=int, metavar="N")
    parser.add_argument("--process", type=int, metavar="I")
    parser.add_argument("--platform", choices=["tpu", "gpu", "cpu"], help="fail on any other")
    parser.add_argument("--devices", type=int, metavar="N", help="fail on any other number of devices in all")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for each phase (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings of the config")
    arguments = parser.parse_args(argv)
    by_hand = [arguments.coordinator, arguments.processes, arguments.process]
    if any(x is not None for x in by_hand) and (None in by_hand or arguments.multihost):
        parser.error("--coordinator, --processes and --process go together, without --multihost")
    return arguments


def join(arguments: argparse.Namespace) -> None:
    """Make the processes one program. On CPU they meet over gloo."""
    if arguments.coordinator is not None:
        _me[0] = f"{arguments.process}/{arguments.processes}"
    if not arguments.multihost and arguments.coordinator is None:
        return
    if (jax.config.jax_platforms or "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            arguments.coordinator, arguments.processes, arguments.process,
            # Longer than the phase may last: JAX ends the process without a word of its own, `phase` names it.
            initialization_timeout=math.ceil(arguments.timeout) + 60,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise Failed(f"the processes did not find each other: {error}") from error
    _me[0] = f"{jax.process_index()}/{jax.process_count()}"


def leave() -> None:
    """Wait for all processes, so that none ends while another still needs it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("smoke")
    say("ok")
    if jax.process_count() > 1:
        jax.distributed.shutdown()


def check_devices(arguments: argparse.Namespace) -> None:
    found, local = jax.devices(), jax.local_devices()
    kinds = sorted({f"{d.platform} {d.device_kind}" for d in found})
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    memory = "" if limit is None else f", {limit / 2**30:.2f} GiB each"
    say(f"{len(local)} of {len(found)} devices here: {', '.join(kinds)}{memory}; jax {jax.__version__}")
    require(len(kinds) == 1, f"expected devices of one kind, found {kinds}")
    require(
        arguments.platform in (None, found[0].platform),
        f"expected platform {arguments.platform}, found {found[0].platform}: see JAX_PLATFORMS in tpu/flags.md",
    )
    require(
        arguments.devices in (None, len(found)),
        f"expected {arguments.devices} devices, found {len(found)}: hosts that did not join, or no --multihost",
    )
    require(
        arguments.processes in (None, jax.process_count()),
        f"expected {arguments.processes} processes, found {jax.process_count()}",
    )
    shares = np.bincount([d.process_index for d in found], minlength=jax.process_count()).tolist()
    require(len(set(shares)) == 1, f"expected as many devices on every host, found {shares}")


def check_collectives() -> None:
    """Sum, gather, scatter and shift over all devices, against their values in closed form."""
    n = jax.device_count()
    mesh = Mesh(np.asarray(jax.devices(), dtype=object), ("all",))
    split = NamedSharding(mesh, PartitionSpec("all"))
    mine = jax.make_array_from_callback((n,), split, lambda index: np.arange(n, dtype=np.float32)[index])
    ring = [(i, (i + 1) % n) for i in range(n)]
    i = np.arange(n, dtype=np.float32)
    total = n * (n - 1) / 2
    for name, function, expected in (
        ("all-reduce", lambda x: jax.lax.psum(x, "all"), np.full(n, total)),
        ("all-gather", lambda x: jnp.sum(jax.lax.all_gather(x, "all") ** 2, axis=0), np.full(n, np.sum(i**2))),
        ("reduce-scatter", lambda x: jax.lax.psum_scatter(x * i, "all", tiled=True), total * i),
        ("collective-permute", lambda x: jax.lax.ppermute(x, "all", ring), np.roll(i, 1)),
    ):  # fmt: skip
        spread = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False))
        for shard in spread(mine).addressable_shards:
            got, wanted = np.asarray(shard.data), expected[shard.index]
            close = np.allclose(got, wanted, rtol=1e-5)
            require(close, f"{name} on device {shard.device.id}: expected {wanted.tolist()}, got {got.tolist()}")
        say(f"{name} over {n} devices: right on {len(mine.addressable_shards)}")


def check_step(config: RunConfig) -> None:
    """Two supervised steps of the config on all devices: the losses that one CPU device finds, and the second lower."""
    if config.sft is None:
        raise UserError(f"config {config.name!r}: has no `sft` section, whose step the smoke test takes")
    suite = config.environment.load()
    policy = policies.describe(config, suite)
    sft = replace(config.sft, demonstrations=(Shown(count=SHOWN),), drills=0)
    data = demonstrations.packed(config.environment, policy.renderer, sft, config.seed)
    batch = repeated(select(data, sft, config.seed, 0, np.zeros(0, np.int32)), jax.device_count())
    steps = partial(two_steps, config, policy, batch)
    began = time.perf_counter()
    losses, norm = steps(sharding.make_mesh())
    say(f"step on {jax.device_count()} devices: loss {losses[0]:.6f}, then {losses[1]:.6f}; gradient norm {norm:.6f}; "
        f"{time.perf_counter() - began:.1f} s with compilation")  # fmt: skip
    require(losses[1] < losses[0], f"expected a lower loss after the step, got {losses[0]:.6f}, then {losses[1]:.6f}")
    alone, _ = steps(sharding.make_mesh(devices=jax.local_devices(backend="cpu")[:1]))
    say(f"step on one CPU device: loss {alone[0]:.6f}, then {alone[1]:.6f}")
    bound = CLOSE.get(jax.devices()[0].platform, CLOSE_ELSEWHERE)
    for name, here, there in zip(("first", "second"), losses, alone, strict=True):
        require(
            abs(here - there) <= bound * abs(there),
            f"{name} loss {here:.6f}, one CPU device finds {there:.6f}: further apart than {bound:g} of it",
        )


def repeated(batch: TokenBatch, devices: int) -> TokenBatch:
    """The rows as often as every device needs to have some, with the same loss: weights are shared out."""
    rows = len(batch.tokens)
    times = math.lcm(rows, devices) // rows
    tiled = jax.tree.map(lambda field: np.concatenate([field] * times), batch)
    return tiled._replace(weights=tiled.weights / np.float32(times))


def two_steps(config: RunConfig, policy: policies.Policy, host: TokenBatch, mesh: Mesh) -> tuple[list[float], float]:
    """Losses of two updates on the same rows, and the first gradient norm."""
    everywhere, rows = sharding.replicated(mesh), sharding.rows(mesh)
    assert config.sft is not None
    optimizer = adamw(config.sft.learning_rate, max_grad_norm=config.sft.max_grad_norm)
    count = len(host.tokens)
    update = make_update(policies.scorer(config, policy), imitation_loss, optimizer, micro_rows=count)
    with jax.default_device(mesh.local_devices[0]):
        params = policies.initial_params(config, policy, everywhere)
        opt_state = jax.jit(optimizer.init, out_shardings=everywhere)(params)
        state = LearnerState(params, opt_state, placed(np.int32(0), everywhere))
        batch = jax.tree.map(lambda field: placed(field, rows), host)
        start = placed(np.int32(0), everywhere)
        state, first = update.step(state, batch, [start])
        state, second = update.step(state, batch, [start])
        figures = [first.to_host(), second.to_host()]
    return [f["loss"] for f in figures], figures[0]["grad_norm"]


def placed(array: Any, where: NamedSharding) -> jax.Array:
    """A host array that every process has, spread as told: each process gives its own devices their part."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


@contextmanager
def phase(name: str, seconds: float) -> Iterator[None]:
    """Names the phase; one that lasts too long ends the process, since nothing can interrupt a collective."""

    def stuck() -> None:
        print(f"FAILED: process {who()}: phase `{name}` did not end within {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(STUCK)

    timer = threading.Timer(seconds, stuck)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Failed(message)


def who() -> str:
    """This process; before it has met the others, what it was told to be: asking JAX then would end the process."""
    return _me[0]


def say(line: str) -> None:
    print(f"[{who()}] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
