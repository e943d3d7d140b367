"""Does a run fit on a TPU slice, and how fast can it go? Said before the slice is rented, from any machine.

Three levels, each with all that the one before says: `shapes` (arithmetic on shapes and sharding rules), `traced` (the
programs as JAX traces them, their matrix products counted), `compiled` (by the TPU's own compiler, without a TPU).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.models.families import family_of
from agentrl_jax.recipes import meshes
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig
from agentrl_jax.recipes.plan import groups, memory, timing
from agentrl_jax.recipes.plan.memory import GIB
from agentrl_jax.recipes.plan.topology import AXES, Topology, parse_mesh, parse_topology, spans_torus
from agentrl_jax.runtime.tensor_files import read_json

LEVELS = ("shapes", "traced", "compiled")
_REMATS = (False, "full")
_HEAD_TOKENS = 1024  # of a device at once: enough for the matrix units of every chip


class Request(NamedTuple):
    """What is planned: a checked config, its model, a slice, and how the mesh lies on it."""

    config: RunConfig
    model: llama.LlamaConfig
    topology: Topology
    mesh: dict[str, int]

    @property
    def learners(self) -> int:
        """Devices of the mesh: all of the slice, but for those that sample where the run is split."""
        return math.prod(self.mesh.values())


def request(config: RunConfig, topology: str, mesh: str | None) -> Request:
    """`mesh` as in `parse_mesh`; None: the config's own. Of a pretrained policy only config.json is read.

    Raises `UserError` for a topology or a mesh that cannot be.
    """
    slice_ = parse_topology(topology)
    learners = slice_.devices - groups.sampling(config, slice_)
    sizes = meshes.sizes(config.mesh, learners) if mesh is None else parse_mesh(mesh, learners)
    shown = {axis: size for axis, size in sizes.items() if axis in AXES or size > 1}
    return Request(config, model_of(config), slice_, shown)


def model_of(config: RunConfig) -> llama.LlamaConfig:
    """The architecture of a config's policy; a pretrained one needs neither its weights nor its tokenizer here."""
    if not isinstance(config.policy, PretrainedPolicy):
        return policies.describe(config, config.environment.load()).model
    path = policies.pretrained_directory(config.policy) / "config.json"
    raw = read_json(path)
    family = family_of(raw.get("model_type"), str(path))
    dtypes = {"compute_dtype": config.policy.compute_dtype, "param_dtype": config.policy.param_dtype}
    return replace(family.config_from_json(raw, str(path)), **dtypes)


def by_shapes(wanted: Request, found: memory.Parts | None = None) -> dict[str, Any]:
    """The plan that shapes and sharding rules alone give. `found`: the arrays, where they are known already."""
    config, model, topology, sizes = wanted
    mesh = memory.abstract_mesh(sizes)
    _check_rows(wanted)
    host = memory.Host(topology.host_devices)
    found = found or memory.parts(config, model, mesh, host)
    resident = memory.resident(found)
    needs = memory.transient(config, model, mesh, found, host)
    on = partial(groups.on, config)
    base = {name: sum(part.bytes for part in resident if on(part.name) == name) for name in groups.names(config)}
    programs = [
        {"program": name, "on": on(name), "gib": round((base[on(name)] + extra) / GIB, 3),
         "own_gib": round(extra / GIB, 3), "by": "shapes"}
        for name, extra in needs.items()
    ]  # fmt: skip
    report = {
        "config": config.name, "topology": topology.name, "level": "shapes",
        "devices": topology.devices, "chips": topology.chips, "mesh": sizes,
        "parameters": llama.param_count(model),
        "groups": [{"on": name, "devices": count} for name, count in groups.counts(config, topology).items()],
        "resident": [{"what": p.name, "on": on(p.name), "gib": round(p.bytes / GIB, 3)} for p in resident],
        "host_gib": round(memory.offloaded(found) / GIB, 3),
        "programs": programs,
        "largest": [{"array": name, "gib": round(size / GIB, 3)} for name, size in memory.largest(resident)],
        "warnings": warnings(wanted),
    }  # fmt: skip
    report |= groups.fit(report, topology)
    return report | speed(wanted)


def speed(
    wanted: Request, executed: float | None = None, moved: dict[str, float] | None = None, cycles_s: float | None = None
) -> dict[str, Any]:
    """Work and time of a step whose rows are all full. `executed`: counted matmul operations, attention left out."""
    config, model, topology, _ = wanted
    shape = steps(config)
    tokens = shape.rows * shape.width
    remat = config.remat not in (False, "none")
    found = timing.work(model, tokens, shape.width, remat=remat, updates=shape.updates, scores=shape.scores)
    if executed is not None:
        found = found._replace(matmul=executed)
    link = timing.link_seconds(topology, moved or bytes_moved(wanted))
    bracket = timing.bracket(topology, wanted.learners, found, tokens, link, cycles_s)
    flops = {
        "executed_tflop": round(found.matmul / 1e12, 3), "attention_tflop": round(found.attention / 1e12, 3),
        "ideal_tflop": round(found.ideal / 1e12, 3),
        "executed_over_ideal": round((found.matmul + found.attention) / found.ideal, 3),
    }  # fmt: skip
    counted = {"flops_by": "formula" if executed is None else "counted", "link_s": round(link, 4)}
    return {"tokens_a_step": tokens, **flops, **counted, "step_s": timing.to_json(bracket)}


class Steps(NamedTuple):
    """What one step of the learner runs over: full rows, gradients and scores of each."""

    rows: int
    width: int
    micro: int  # micro-batches
    updates: int
    scores: int


def steps(config: RunConfig) -> Steps:
    stage, rows = memory.settings(config), memory.batch_rows(config)
    loop = config.loop
    if loop is None:
        return Steps(rows, stage.width, rows // stage.micro_rows, 1, 0)
    scores = memory.rescored(loop) + (loop.objective.kl is not None)
    return Steps(rows, stage.width, rows // stage.micro_rows, loop.updates_per_batch, scores)


def bytes_moved(wanted: Request) -> dict[str, float]:
    """Bytes a device takes part in moving during a step, by collective, from the sharding rules."""
    config, model, _, sizes = wanted
    shape, count = steps(config), llama.param_count(model) / sizes["tensor"]
    itemsize = 2 if model.compute_dtype == "bfloat16" else 4
    passes = shape.micro * shape.updates
    moved = {"all-reduce": 4.0 * count * passes if sizes["data"] * sizes["fsdp"] > 1 else 0.0, "all-gather": 0.0}
    if sizes["fsdp"] > 1:
        moved["all-gather"] = itemsize * count * (2 * passes + shape.micro * shape.scores)
    if sizes["tensor"] > 1:
        tokens = shape.rows * shape.width / (sizes["data"] * sizes["fsdp"])
        moved["all-reduce"] += 4.0 * tokens * model.width * itemsize * model.layers * shape.updates
    return moved


def warnings(wanted: Request) -> list[str]:
    """What is known to cost memory or time, found without compiling."""
    _, model, topology, mesh = wanted
    found = []
    if spans_torus(topology, mesh):
        data = topology.shape[0] if len(topology.shape) == 3 else 4
        found.append(
            f"one fsdp axis spans the whole torus: weights are gathered by all-reduces of twice the bytes; "
            f"take data={data},fsdp={topology.devices // data}"
        )
    if model.kv_heads % mesh["tensor"]:
        found.append(f"tensor={mesh['tensor']} does not divide kv_heads={model.kv_heads}")
    width = memory.settings(wanted.config).width
    if wanted.config.mesh.sequence and (mesh["tensor"] == 1 or width % mesh["tensor"]):
        found.append(
            f"mesh.sequence=True needs a tensor axis of at least 2 that divides the width {width} of rows, not "
            f"tensor={mesh['tensor']}: agentrl train refuses it, and this plan is without"
        )
    columns, chunks = memory.head_chunks(wanted.config, memory.abstract_mesh(mesh))
    if chunks > 1 and columns < 1e3 * topology.chip.tflops / topology.chip.gbytes:  # operations for each byte read
        found.append(
            f"logprob_chunk={wanted.config.logprob_chunk}: to read the head from memory takes longer than to multiply "
            f"so few tokens of a device by it; set logprob_chunk={_HEAD_TOKENS}"
        )
    if model.compute_dtype == "float32":
        found.append("policy.compute_dtype='float32': matrix units work in bfloat16, f32 takes several passes")
    if model.head_width <= 128 and topology.kind in ("v6e", "tpu7x"):
        found.append(
            f"heads {model.head_width} wide fill at most half of this chip's 256-wide matrix units in attention"
        )
    return found


def _check_rows(wanted: Request) -> None:
    stage, shares = memory.settings(wanted.config), wanted.mesh["data"] * wanted.mesh["fsdp"]
    name = "loop" if wanted.config.loop is not None else "sft"
    if stage.micro_rows % shares:
        raise UserError(
            f"{name}.micro_rows={stage.micro_rows} does not divide over data x fsdp = {shares} devices, which would "
            f"repeat each other's work: set {name}.micro_rows={shares * max(1, stage.micro_rows // shares)}, or --mesh"
        )


def search(wanted: Request, count: int = 8) -> list[dict[str, Any]]:
    """Meshes, micro-batches and remat policies, by shapes: those that fit, fastest first, then what is nearest to it.

    Rows of a step stay as they are.
    """
    rows, host = [], memory.Host(wanted.topology.host_devices)
    for mesh in _meshes(wanted.learners, wanted.model.kv_heads):
        try:  # micro-batches and remat change no array that stays
            arrays = memory.parts(wanted.config, wanted.model, memory.abstract_mesh(mesh), host)
        except UserError:
            continue
        for config in _settings(wanted.config, mesh["data"] * mesh["fsdp"]):
            found = by_shapes(wanted._replace(config=config, mesh=mesh), arrays)
            row = {"mesh": mesh, "micro_rows": memory.settings(config).micro_rows, "remat": config.remat}
            row |= {name: found[name] for name in ("fits", "peak_gib", "headroom_gib")}
            rows.append(
                row | {"step_s": round(found["step_s"]["point"], 4), "torus": spans_torus(wanted.topology, mesh)}
            )
    rows.sort(key=lambda r: (not r["fits"], r["torus"], r["step_s"] if r["fits"] else r["peak_gib"], r["peak_gib"]))
    return rows[:count]


def _settings(config: RunConfig, shares: int) -> Iterator[RunConfig]:
    """Micro-batches that give each of `shares` devices whole rows, with and without remat."""
    total = memory.batch_rows(config)
    for micro in (n for n in range(shares, total + 1, shares) if total % n == 0):
        for remat in _REMATS:
            yield with_settings(config, micro, remat)


def with_settings(config: RunConfig, micro_rows: int, remat: Any) -> RunConfig:
    """The config with other micro-batches and remat."""
    parts = {"loop": config.loop} if config.loop is not None else {"sft": config.sft}
    changed = {name: replace(part, micro_rows=micro_rows) for name, part in parts.items() if part is not None}
    return replace(config, remat=remat, **changed)


def _meshes(devices: int, most_tensor: int) -> Iterator[dict[str, int]]:
    for tensor in (n for n in (1, 2, 4, 8) if n <= most_tensor and devices % n == 0):
        rest = devices // tensor
        for fsdp in (n for n in range(1, rest + 1) if rest % n == 0):
            yield {"data": rest // fsdp, "fsdp": fsdp, "tensor": tensor}


def advice(wanted: Request, report: dict[str, Any], found: list[dict[str, Any]]) -> list[str]:
    """What to change where it does not fit; nothing where it does."""
    if report["fits"]:
        return []
    fitting = [row for row in found if row["fits"]]
    if fitting:
        best = fitting[0]
        stage = "loop" if wanted.config.loop is not None else "sft"
        mesh = ",".join(f"{axis}={size}" for axis, size in best["mesh"].items() if size > 1) or "data=1"
        return [f"--mesh {mesh} {stage}.micro_rows={best['micro_rows']} remat={best['remat']}: {best['peak_gib']} GiB"]
    tight = min(report["groups"], key=lambda group: group["headroom_gib"])["on"]
    whole = max((row for row in report["resident"] if row["on"] == tight), key=lambda row: row["gib"])
    if whole["what"] in ("sampler weights", "KV pages"):
        return [text] if (text := _smaller_sampler(wanted)) else _hopeless(report, whole)
    return _hopeless(report, whole)


def _hopeless(report: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    return [
        f"nothing tried fits: {whole['what']} takes {whole['gib']} GiB of {report['limit_gib']}; more or larger chips"
    ]


def _smaller_sampler(wanted: Request) -> str | None:
    """The first that fits: the same slots with more devices to a copy of the weights, else fewer slots."""
    rollout, devices = wanted.config.rollout, wanted.config.sampler_devices or wanted.topology.host_devices
    counts = [n for n in (1, 2, 4, 8) if rollout.tensor <= n and devices % n == 0 and wanted.model.kv_heads % n == 0]
    most = -(-rollout.slots // devices) * devices
    for slots in range(most, 0, -devices):
        for tensor in counts:
            tried = replace(wanted.config, rollout=replace(rollout, tensor=tensor, slots=slots))
            found = by_shapes(wanted._replace(config=tried))
            if found["fits"]:
                return f"rollout.tensor={tensor} rollout.slots={slots}: {found['peak_gib']} GiB"
    return None
