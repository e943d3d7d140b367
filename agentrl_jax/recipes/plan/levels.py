"""What tracing and compiling add to a plan by shapes."""

from __future__ import annotations

import itertools
import math
from typing import Any

from agentrl_jax.models.config import layer_parameters, top_parameters
from agentrl_jax.recipes.plan import flops, groups, memory, shapes
from agentrl_jax.recipes.plan.memory import GIB
from agentrl_jax.recipes.plan.programs import DECODED_LAYERS, programs
from agentrl_jax.recipes.plan.shapes import Request

_DECODE_ROOM = 256 << 20  # of logits, and of weights on their way
# Of what is resident, what a program is given: it is in the program's own peak already.
_GIVEN = {
    "update": ("parameters", "batch"),
    "apply": ("parameters", "optimizer state"),
    "score": ("parameters", "batch"),
}


def traced(wanted: Request, report: dict[str, Any]) -> dict[str, Any]:
    """The plan with matrix work counted in the programs that JAX traces."""
    mesh = memory.abstract_mesh(wanted.mesh)
    listed = [program for program in programs(wanted.config, wanted.model, mesh) if program.learns]
    executed = sum(p.times * flops.count(p.traced, p.loops).weights for p in listed)
    return report | shapes.speed(wanted, executed) | {"level": "traced", "flops_by": "traced"}


def compiled(wanted: Request, report: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The plan with the figures of `compiling.compile_all`; a program without figures keeps those by shapes."""
    times = {"update": shapes.steps(wanted.config).micro * shapes.steps(wanted.config).updates}
    times |= {"apply": shapes.steps(wanted.config).updates}
    times |= {"score": shapes.steps(wanted.config).micro * shapes.steps(wanted.config).scores}
    learned = {name: figures for name, figures in found.items() if name in times and not figures["oom"]}
    report = report | {"level": "compiled", "programs": _programs(wanted, report, found)}
    report |= groups.fit(report, wanted.topology)
    report["fits"] = report["fits"] and not any(figures["oom"] for figures in found.values())
    report["warnings"] = [*report["warnings"], *_refused(found), *_copied(wanted, report, found)]
    if learned.keys() != found.keys() - {"decode"}:
        return report
    rows = _collectives(learned, times, wanted.mesh)
    moved: dict[str, float] = {}
    for row in rows:
        moved[row["kind"]] = moved.get(row["kind"], 0.0) + row["mib"] * (1 << 20)
    executed = sum(times[name] * figures["matmul_flops"] for name, figures in learned.items())
    cycles = sum(times[name] * figures["cycles"] for name, figures in learned.items()) / wanted.topology.chip.clock
    report |= shapes.speed(wanted, executed * wanted.learners, moved, cycles or None)
    report |= {"flops_by": "compiled", "collectives": rows, "versions": next(iter(learned.values()))["versions"]}
    return report | {"warnings": [*report["warnings"], *traps(wanted, learned), *_elsewhere(wanted)]}


def _elsewhere(wanted: Request) -> list[str]:
    """Whether the programs were compiled for other devices than they will run on; see `compiling.topology_mesh`."""
    if wanted.learners == wanted.topology.devices:
        return []
    return [
        f"placement='split': compiled for {wanted.learners} devices side by side; those that learn have others between "
        "them, and exchange more slowly"
    ]


def _refused(found: dict[str, dict[str, Any]]) -> list[str]:
    """What the compiler says of programs that do not fit by themselves."""
    return [
        f"{name}: the compiler refuses it: {figures['peak'] / GIB:.2f} GiB required, "
        f"{figures['available'] / GIB:.2f} available"
        for name, figures in found.items()
        if figures["oom"]
    ]


def _copied(wanted: Request, report: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[str]:
    """Whether decoding keeps copies of the pages: of the layers that are compiled, and so of all others, too."""
    pages = sum(row["gib"] for row in report["resident"] if row["what"] == "KV pages") * GIB
    temporaries, some = found.get("decode", {}).get("temporaries", 0), _compiled_layers(wanted) / wanted.model.layers
    if temporaries - _DECODE_ROOM < pages * some / 2:
        return []
    return [f"decode: {temporaries / GIB:.2f} GiB beside {pages * some / GIB:.2f} of pages: they are copied"]


def _compiled_layers(wanted: Request) -> int:
    return min(wanted.model.layers, DECODED_LAYERS)


def tried(wanted: Request, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `compiling.try_each` found, as rows of `shapes.search`."""
    found = []
    for row in rows:
        config = shapes.with_settings(wanted.config, row["micro_rows"], row["remat"])
        changed = wanted._replace(config=config, mesh=row["mesh"])
        report = compiled(changed, shapes.by_shapes(changed), {"update": row["figures"]})
        kept = {name: value for name, value in row.items() if name != "figures"}
        found.append(kept | {name: report[name] for name in ("fits", "peak_gib", "headroom_gib")} | {"by": "compiled"})
    return found


def _programs(wanted: Request, report: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    resident, rows = {row["what"]: row["gib"] for row in report["resident"]}, []
    for row in report["programs"]:
        base = sum(part["gib"] for part in report["resident"] if part["on"] == row["on"])
        figures = found.get(row["program"])
        if figures is None:
            rows.append(row)
            continue
        if figures["oom"]:  # what the compiler says is of temporaries alone
            own = figures["peak"] / GIB
        elif row["program"] == "decode":  # of few layers: its arguments are known better from shapes
            own = (figures["temporaries"] + figures["outputs"]) / GIB
            if _copied(wanted, report, found):
                own *= wanted.model.layers / _compiled_layers(wanted)
        else:
            own = figures["peak"] / GIB - sum(resident[name] for name in _GIVEN[row["program"]] if name in resident)
        made = {"program": row["program"], "on": row["on"], "by": "compiled"}
        made |= {"gib": round(base + own, 3), "own_gib": round(own, 3)}
        made |= {name: round(figures[name] / GIB, 3) for name in ("arguments", "temporaries", "outputs", "peak")}
        if row["program"] == "decode":
            made["by"] = f"compiled, {DECODED_LAYERS} layers"
        told = ("seconds", "cpu_s", "cached", "oom", "available", "kernels")
        made |= {name: figures[name] for name in told if name in figures}
        rows.append(made)
    return rows


def _collectives(
    learned: dict[str, dict[str, Any]], times: dict[str, int], mesh: dict[str, int]
) -> list[dict[str, Any]]:
    """Of a whole step, by kind and mesh axes."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name, figures in learned.items():
        for one in figures["collectives"]:
            axis = axes_named(one["group"], mesh)
            row = rows.setdefault(
                (one["kind"], axis), {"kind": one["kind"], "axis": axis, "group": one["group"], "count": 0, "mib": 0.0}
            )
            row["count"] += times[name] * one["count"]
            row["mib"] += times[name] * one["bytes"] / (1 << 20)
    return sorted((row | {"mib": round(row["mib"], 1)} for row in rows.values()), key=lambda row: -row["mib"])


def axes_named(group: int, mesh: dict[str, int]) -> str:
    """The mesh axes whose sizes multiply to a group's chips; several answers are joined by `or`."""
    used = [axis for axis, size in mesh.items() if size > 1]
    found = [
        "x".join(axes)
        for count in range(1, len(used) + 1)
        for axes in itertools.combinations(used, count)
        if math.prod(mesh[axis] for axis in axes) == group
    ]
    return " or ".join(found) or f"{group} chips"


def traps(wanted: Request, learned: dict[str, dict[str, Any]]) -> list[str]:
    """What a compiled program does that costs time and can be avoided."""
    found, mesh, model = [], wanted.mesh, wanted.model
    itemsize = 2 if model.compute_dtype == "bfloat16" else 4
    layer = sum(math.prod(shape) for shape, _ in layer_parameters(model).values())
    top = sum(math.prod(shape) for shape, _ in top_parameters(model).values())
    for name, figures in learned.items():
        count = dict.fromkeys(("all-gather", "all-reduce", "collective-permute"), 0)
        moved = dict(count)
        for one in figures["collectives"]:
            if one["kind"] in count:
                count[one["kind"]] += one["count"]
                moved[one["kind"]] += one["bytes"]
        if count["collective-permute"]:
            found.append(
                f"{name}: {count['collective-permute']} collective-permutes: products are split into rings, as where "
                "weights are not gathered explicitly"
            )
        again = name == "update" and wanted.config.remat in (True, "full")  # gathered once more backward
        needed = (layer * model.layers * (2 if again else 1) + top) * itemsize / mesh["tensor"]
        missing = 1 - moved["all-gather"] / needed
        if name in ("update", "score") and mesh["fsdp"] > 1 and missing > 0.01:
            found.append(
                f"{name}: {100 * missing:.0f} % of what has to be gathered is gathered by all-reduces, of twice the "
                "bytes: give fsdp fewer chips, and data the others"
            )
        for one in figures["heaviest"]:
            if one["kind"] == "all-gather" and one["bytes"] > max(layer, top) * itemsize:
                found.append(f"{name}: one all-gather of {one['bytes'] / GIB:.2f} GiB: more than a layer at a time")
    return found
