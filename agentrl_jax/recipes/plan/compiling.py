"""The programs of a run compiled for a TPU slice that is not here, one after another, each kept in the user's cache.

Meant for a process of its own (`cli.plan` starts one): libtpu is loaded, wants settings of its own, and may be stopped.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from agentrl_jax.errors import UserError
from agentrl_jax.recipes.plan import hlo
from agentrl_jax.recipes.plan.memory import Host
from agentrl_jax.recipes.plan.programs import Program, programs
from agentrl_jax.recipes.plan.shapes import Request, with_settings
from agentrl_jax.recipes.plan.topology import Topology
from agentrl_jax.sharding import AXES, make_mesh

_FORMAT = 2  # of what is cached


def compile_all(wanted: Request, cache: Path, *, only: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Figures of every program by name, up to one that does not fit; those that the cache holds are not compiled."""
    mesh = topology_mesh(wanted.topology.name, wanted.mesh)
    host = Host(wanted.topology.host_devices, host_mesh(wanted.topology, wanted.config.rollout.tensor))
    found = {}
    for program in programs(wanted.config, wanted.model, mesh, host):
        if not only or program.name in only:
            found[program.name] = _cached(program, wanted, cache)
            if found[program.name]["oom"]:
                break
    return found


def try_each(wanted: Request, rows: list[dict[str, Any]], cache: Path, most: int = 3) -> list[dict[str, Any]]:
    """The update of the first rows of `shapes.search` compiled, up to one that the compiler takes; what does not fit is
    refused in seconds."""
    tried: list[dict[str, Any]] = []
    for row in rows[:most]:
        config = with_settings(wanted.config, row["micro_rows"], row["remat"])
        figures = compile_all(wanted._replace(config=config, mesh=row["mesh"]), cache, only=("update",))["update"]
        tried.append(row | {"figures": figures})
        if not figures["oom"]:
            break
    return tried


def topology_mesh(name: str, sizes: Mapping[str, int]) -> Mesh:
    """The mesh that training makes of the devices of a described slice.

    Where it has fewer devices, since others sample, it is of the first: libtpu 0.0.52 ends the process at a collective
    of any others ("Unexpected device_id"). What a device holds is the same; how far it is to the next is not.
    """
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    count = math.prod(sizes.values())
    found = devices if count == len(devices) else sorted(devices, key=lambda device: device.id)[:count]
    return make_mesh(**{axis: sizes.get(axis, 1) for axis in AXES}, devices=found)


def host_mesh(topology: Topology, tensor: int) -> Mesh:
    """A mesh of the first devices of one host of the slice, over which a copy of the sampler is spread."""
    from jax.experimental import topologies

    if topology.host_devices % tensor:
        raise UserError(f"rollout.tensor={tensor} does not divide the {topology.host_devices} devices of a host")
    name = f"{topology.kind if topology.kind != 'tpu7x' else 'TPU7x'}:{'2x2x1' if len(topology.shape) == 3 else '2x2'}"
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    shape = [tensor if axis == "tensor" else 1 for axis in AXES]
    return Mesh(np.asarray(devices[:tensor], dtype=object).reshape(shape), AXES)


def _cached(program: Program, wanted: Request, cache: Path) -> dict[str, Any]:
    lowered = program.traced.lower(lowering_platforms=("tpu",))
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "libtpu")]
    words = [lowered.as_text(), wanted.topology.name, str(wanted.mesh), str(program.loops), *versions, str(_FORMAT)]
    path = cache / f"{hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:32]}.json"
    if path.is_file():
        return json.loads(path.read_text()) | {"cached": True}
    figures = figures_of(lowered, wanted.learners, program.loops) | {"versions": versions}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(figures))
    whole.replace(path)
    return figures | {"cached": False}


def figures_of(lowered: Any, devices: int, loops: int) -> dict[str, Any]:
    """Memory of a device, collectives, matrix work and cycles of a program; or what it would have needed to fit."""
    started, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            executable = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            return too_large(str(error))
        text = _text(Path(folder))
    seconds = {"seconds": round(time.monotonic() - started, 1), "cpu_s": round(time.process_time() - cpu, 1)}
    return _memory(executable) | reading(text, devices, loops) | seconds


def reading(text: str, devices: int, loops: int) -> dict[str, Any]:
    """What the text of a compiled program says: of one device."""
    exchanged = hlo.exchanges(text, devices, loops)
    collectives: dict[tuple[str, int], list[int]] = {}
    for one in exchanged:
        row = collectives.setdefault((one.kind, one.group), [0, 0])
        row[0] += one.count
        row[1] += one.count * one.bytes
    return {
        "matmul_flops": hlo.matmul_flops(text, loops), "cycles": hlo.cycles(text, loops),
        "collectives": [
            {"kind": kind, "group": group, "count": count, "bytes": size}
            for (kind, group), (count, size) in collectives.items()
        ],
        "heaviest": [one._asdict() for one in sorted(exchanged, key=lambda one: -one.bytes * one.count)[:5]],
        "kernels": hlo.kernels(text, loops),
    }  # fmt: skip


_SIZE = r"([\d.]+)([KMGT])"


def too_large(message: str) -> dict[str, Any]:
    """What the compiler says of a program that does not fit, required and available bytes. Raises what it is given
    where that is something else."""
    pattern = rf"[Uu]sed {_SIZE} of {_SIZE} hbm|required[^()]*\({_SIZE}\) exceeds available[^()]*\({_SIZE}\)"
    found = re.search(pattern, " ".join(message.split()))
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        raise RuntimeError(message.splitlines()[0][:500])
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    said = [part for part in found.groups() if part is not None]
    required, available = (int(float(size) * scale[unit]) for size, unit in zip(said[::2], said[1::2], strict=True))
    return {"oom": True, "peak": required, "available": available, "arguments": 0, "temporaries": 0, "outputs": 0}


def _text(folder: Path) -> str:
    for pattern in ("*after_codegen.txt", "*after_optimizations.txt"):  # the first bears cycles
        for path in folder.rglob(pattern):
            return path.read_text()
    raise RuntimeError("the compiler left no text of the program")


def _memory(executable: Any) -> dict[str, int]:
    m = executable.memory_analysis()
    total = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return {
        "oom": False,
        "arguments": m.argument_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
        "outputs": m.output_size_in_bytes - m.alias_size_in_bytes,
        # What the compiler calls the peak counts other memories as well (the host's, those on the chip).
        "peak": min(getattr(m, "peak_memory_in_bytes", 0) or total, total),
    }
