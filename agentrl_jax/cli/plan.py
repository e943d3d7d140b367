"""`agentrl plan`: whether a config fits a TPU slice and how fast it can go, before the slice is rented."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_jax.errors import UserError

_SECONDS = 600
# libtpu is to describe a slice, not to look for one; and a second process may have loaded it.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `agentrl plan`."""
    parser.add_argument("config", metavar="CONFIG", help="a Python file that defines config()")
    parser.add_argument("--topology", metavar="NAME", required=True, help="a TPU slice, such as v5p:4x4x4 or v5e:4x4")
    parser.add_argument(
        "--mesh", metavar="AXES", help="such as data=4,fsdp=16,tensor=1; default: the config's mesh, as in train"
    )
    parser.add_argument(
        "--level", choices=["shapes", "traced", "compiled"],
        help="arithmetic (milliseconds), traced (seconds), compiled (minutes; needs libtpu, and is then the default)",
    )  # fmt: skip
    parser.add_argument("--search", action="store_true", help="try meshes, micro-batches and remat policies")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", metavar="FILE", help="where to keep the JSON; default: the user's cache")
    parser.add_argument("--timeout", type=int, default=_SECONDS, metavar="S", help="of all compilations, in seconds")


def run(arguments: argparse.Namespace, resolved: Callable[[argparse.Namespace], Any]) -> int:
    """Prints the plan; exit code 0 where the run fits, 1 where it does not."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else JAX looks for an accelerator when it is loaded
    level = arguments.level or ("compiled" if _has_libtpu() else "shapes")
    if level == "compiled" and not _has_libtpu():
        raise UserError("--level compiled needs the TPU's compiler, not a TPU: pip install -e '.[tpu]'")
    if arguments.timeout < 1:
        raise UserError(f"--timeout {arguments.timeout}: expected at least 1 second")
    from agentrl_jax.recipes.plan import levels, shapes

    wanted = shapes.request(resolved(arguments), arguments.topology, arguments.mesh)
    report = shapes.by_shapes(wanted)
    if level == "traced":
        report = levels.traced(wanted, report)
    elif level == "compiled":
        report = levels.compiled(wanted, report, _compiled(arguments, [])["programs"])
    found = shapes.search(wanted) if arguments.search or not report["fits"] else []
    if level == "compiled" and arguments.search:
        found = [*levels.tried(wanted, _compiled(arguments, found)["tried"]), *found]
    report |= {"search": found if arguments.search else [], "advice": shapes.advice(wanted, report, found)}
    path = Path(arguments.save) if arguments.save else _default_path(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(table(report))
        print(f"saved: {path}", file=sys.stderr)
    return 0 if report["fits"] else 1


def _compiled(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the programs, or of the updates of these rows of a search, from a process of its own."""
    asked = {name: getattr(arguments, name) for name in ("config", "overrides", "topology", "mesh")}
    asked |= {"cache": str(_cache() / "compiled"), "rows": rows}
    command = [sys.executable, "-m", "agentrl_jax.cli.plan_worker"]
    print(f"compiling for {arguments.topology}: minutes, unless it is in the cache", file=sys.stderr)
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=arguments.timeout, check=False,
            env=os.environ | ENVIRONMENT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--timeout {arguments.timeout}: not done; programs that were are kept, so run it again, or --level traced"
        ) from None
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the compiler's process ended with code {done.returncode}: {last[:300]}")
    found = json.loads(done.stdout)
    if "error" in found:
        raise UserError(found["error"])
    return found


def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def _default_path(report: dict[str, Any]) -> Path:
    return _cache() / f"{report['config']}-{report['topology'].replace(':', '-')}.json"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "plans"


def table(report: dict[str, Any]) -> str:
    """The plan for a person to read."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    verdict = "fits" if report["fits"] else "does NOT fit"
    lines = [
        f"{report['config']} on {report['topology']} ({report['devices']} devices; {mesh}), by {report['level']}",
        f"{verdict}: peak {report['peak_gib']:.2f} of {report['limit_gib']:.2f} GiB a device, "
        f"headroom {report['headroom_gib']:.2f}",
        *_groups(report),
        "",
        *_resident(report),
        *(
            _columns("GiB of the host for each", [("optimizer state", report["host_gib"])])
            if report["host_gib"]
            else []
        ),
        "",
        *_columns("peak while running", [(_named(r), r["gib"]) for r in report["programs"]]),
        "",
        *_columns("largest arrays", [(row["array"], row["gib"]) for row in report["largest"]]),
        "",
        *_speed(report),
    ]
    if report.get("collectives"):
        lines += ["", "collectives of a step, a device:"]
        lines += [
            f"  {r['kind']:<20} {r['axis']:<14} {r['count']:>6}x {r['mib']:>10.1f} MiB" for r in report["collectives"]
        ]
    lines += [f"warning: {text}" for text in report["warnings"]]
    lines += [f"change: {text}" for text in report["advice"]]
    lines += _search(report["search"])
    return "\n".join(lines)


def _groups(report: dict[str, Any]) -> list[str]:
    """Of a split run, how each of the two kinds of devices fares."""
    return [
        f"  {group['devices']} {group['on']}: peak {group['peak_gib']:.2f}, headroom {group['headroom_gib']:.2f}"
        for group in report["groups"]
        if len(report["groups"]) > 1
    ]


def _resident(report: dict[str, Any]) -> list[str]:
    lines = []
    for group in report["groups"]:
        title = "GiB a device" if len(report["groups"]) == 1 else f"GiB a device of the {group['on']}"
        held = [(row["what"], row["gib"]) for row in report["resident"] if row["on"] == group["on"]]
        lines += _columns(title, held)
    return lines


def _named(row: dict[str, Any]) -> str:
    on = "" if row["on"] == "all" else f"{row['on']}, "
    return f"{row['program']} ({on}{row['by']})"


def _speed(report: dict[str, Any]) -> list[str]:
    step = report["step_s"]
    return [
        f"a step of {report['tokens_a_step']} tokens: {step['floor']:.3f} / {step['point']:.3f} / "
        f"{step['ceiling']:.3f} s (floor / point / ceiling), "
        f"{step['tokens_per_s']:.0f} tokens/s, MFU {100 * step['mfu']:.0f} %",
        f"  calibrated on {step['calibrated_on']}; sampling and environments are not in it",
        f"  matmuls {report['executed_tflop']:.1f} TFLOP ({report['flops_by']}) + attention "
        f"{report['attention_tflop']:.1f}, {report['executed_over_ideal']:.2f}x of the model's "
        f"{report['ideal_tflop']:.1f}",
    ]


def _search(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "tried, by shapes but where it says otherwise:",
        "  data fsdp tensor micro_rows  remat  peak GiB  step s",
    ]
    for row in rows:
        data, fsdp, tensor = row["mesh"].values()
        fits = "" if row["fits"] else "  does not fit"
        lines.append(
            f"  {data:>4} {fsdp:>4} {tensor:>6} {row['micro_rows']:>10}  {row['remat'] or 'none'!s:>5}  "
            f"{row['peak_gib']:>8.2f}  {row['step_s']:.3f}{fits} {row.get('by', '')}".rstrip()
        )
    return lines


def _columns(title: str, rows: list[tuple[str, float]]) -> list[str]:
    wide = max([len(title), *(len(name) + 2 for name, _ in rows)])
    return [title, *(f"  {name:<{wide}} {value:>9.3f}" for name, value in rows)]
