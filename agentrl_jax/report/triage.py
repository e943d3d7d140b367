"""Takes the newest episodes of a run apart: what the policy did wrong, what the environment broke, what the verifier
got wrong, and what nobody can tell. It reads receipts.jsonl and runs nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Cause, StopReason

Receipt = Mapping[str, Any]
MAX_UNKNOWN = 0.05
_ENDS = {
    StopReason.BUDGET: "used up its budget",
    StopReason.TOKEN_CAP: "reached a token limit",
    StopReason.EARLY_STOP: "stopped before the task was over",
    StopReason.LOW_EVIDENCE: "went on without learning anything",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a table: what went wrong, how often, in which tasks, and a receipt to replay."""

    what: str
    count: int
    tasks: tuple[str, ...]
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """`tables` and `rates` by cause; a rate is a share of the episodes. `mended`: went on after a retry or a replay."""

    episodes: int
    of: int
    succeeded: int
    mended: int
    rates: Mapping[str, float]
    tables: Mapping[str, tuple[Finding, ...]]
    warning: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Group:
    count: int = 0
    tasks: dict[str, None] = field(default_factory=dict)
    example: str = ""


def triage(run_dir: Path, last: int = 100, max_unknown: float = MAX_UNKNOWN) -> Triage:
    """The newest `last` episodes of a run, training's and evaluations', sorted by who is answerable.

    Raises `UserError` where the run has no receipts, or names the line that is none.
    """
    rows, total = _newest(run_dir, last)
    doubted = _doubted([receipt for _, receipt in rows])
    groups: dict[str, dict[str, _Group]] = {str(cause): defaultdict(_Group) for cause in Cause}
    succeeded = 0
    for place, receipt in rows:
        cause, what = doubted.get(receipt.get("replay_id", "")) or _judge(receipt)
        if cause is None:
            succeeded += 1
            continue
        group = groups[str(cause)][what]
        group.count += 1
        group.tasks[str(receipt["task"]["id"])] = None
        group.example = place
    tables = {cause: _table(found) for cause, found in groups.items()}
    rates = {cause: sum(finding.count for finding in table) / len(rows) for cause, table in tables.items()}
    unknown = rates[Cause.UNKNOWN]
    warning = None
    if unknown > max_unknown:
        warning = (
            f"nobody can tell what went wrong in {100 * unknown:.1f} % of the episodes (more than "
            f"{100 * max_unknown:g} %): mend what is observed and recorded before training on"
        )
    mended = sum(_mended(receipt) for _, receipt in rows)
    return Triage(
        episodes=len(rows), of=total, succeeded=succeeded, mended=mended, rates=rates, tables=tables, warning=warning
    )


def table(found: Triage, run_dir: Path) -> str:
    """The four tables as text."""
    failed = found.episodes - found.succeeded
    lines = [
        f"{found.episodes} episodes of {run_dir} (the newest of {found.of}): {found.succeeded} succeeded, {failed} did "
        f"not; {found.mended} went on after a retry or a replay"
    ]
    for cause, findings in found.tables.items():
        lines += ["", f"{cause}  {100 * found.rates[cause]:.1f} %"]
        for finding in findings:
            tasks = f"{len(finding.tasks)} tasks" if len(finding.tasks) > 1 else next(iter(finding.tasks))
            lines.append(f"{finding.count:6d}  {finding.what}  ({tasks}; agentrl replay {finding.example})")
    return "\n".join(lines)


def _newest(run_dir: Path, last: int) -> tuple[list[tuple[str, Receipt]], int]:
    """The newest receipts, each with the place that `agentrl replay` takes, and how many there are; those of a run on
    several hosts lie in a file a process, and equally far from the ends of these is equally new."""
    paths = [run_dir / "receipts.jsonl", *sorted(run_dir.glob("hosts/*/receipts.jsonl"))]
    found = [(path, *_read(path, last)) for path in paths if path is paths[0] or path.stat().st_size]
    rows = [(total - line, f"{path}:{line}", receipt) for path, read, total in found for line, receipt in read]
    rows.sort(key=lambda row: -row[0])
    return [(place, receipt) for _, place, receipt in rows[-last:]], sum(total for _, _, total in found)


def _read(path: Path, last: int) -> tuple[list[tuple[int, Receipt]], int]:
    if not path.is_file():
        raise UserError(
            f"{path}: no receipts; expected a run directory that `agentrl train` wrote, such as runs/quickstart"
        )
    newest: deque[tuple[int, bytes]] = deque(maxlen=last)
    with path.open("rb") as file:
        newest.extend((number, line) for number, line in enumerate(file, 1) if line.endswith(b"\n"))  # else torn
    if not newest:
        raise UserError(f"{path}: holds no receipt yet; let the run come to its first episode")
    found = []
    for number, line in newest:
        try:
            receipt = json.loads(line)
            _ = receipt["task"]["id"], receipt["stop"], receipt["verdict"], receipt["steps"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a receipt ({type(error).__name__}: {error})") from error
        found.append((number, receipt))
    return found, found[-1][0]


def _judge(receipt: Receipt) -> tuple[Cause | None, str]:
    """Who is answerable for an episode that did not succeed, and for what; (None, "") for one that did."""
    attribution, verdict = receipt.get("attribution"), receipt["verdict"]
    if attribution is not None:
        return Cause(attribution["cause"]), str(attribution["evidence"]).partition(";")[0][:100]
    if verdict is None or verdict["outcome"] is None:
        return Cause.UNKNOWN, "left unscored by the verifier"
    broken = [check["name"] for check in verdict["constraints"] if not check["passed"]]
    if broken:
        return Cause.POLICY, f"broke a constraint: {', '.join(sorted(broken))}"
    if float(verdict["outcome"]) >= 1.0:
        if not any(step["performed"] for step in receipt["steps"]):
            return Cause.EVALUATOR, "scored as a success without one action"
        return None, ""
    if receipt["stop"] in _ENDS:
        return Cause.POLICY, _ENDS[StopReason(receipt["stop"])]
    if receipt.get("ledger", {}).get("retries", 0):
        return Cause.POLICY, "made calls that could not be read or performed, and missed the goal"
    return Cause.POLICY, "finished without reaching the goal"


def _doubted(receipts: Iterable[Receipt]) -> dict[str, tuple[Cause, str]]:
    """By replay id: same task, seed and actions, and yet two answers (the environment's doing) or two verdicts."""
    seen: dict[str, list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        if receipt.get("attribution") is None and receipt.get("replay_id"):
            seen[receipt["replay_id"]].append(receipt)
    found: dict[str, tuple[Cause, str]] = {}
    for name, same in seen.items():
        if len({_measured(receipt) for receipt in same}) == 1:
            continue
        answers = {tuple(step["observation_hash"] for step in receipt["steps"]) for receipt in same}
        verdicts = {(receipt["stop"], _measured(receipt)) for receipt in same}
        if len(answers) > 1:
            found[name] = (
                Cause.ENVIRONMENT,
                "the same actions met two answers and two verdicts: it is not deterministic",
            )
        elif len(verdicts) > len({stop for stop, _ in verdicts}):  # a verifier is told why an episode stopped
            found[name] = Cause.EVALUATOR, "the same actions and answers were given two verdicts"
    return found


def _measured(receipt: Receipt) -> str:
    verdict = receipt["verdict"] or {}
    return json.dumps([verdict.get("outcome"), verdict.get("constraints")], sort_keys=True)


def _mended(receipt: Receipt) -> bool:
    return bool(receipt.get("healed") or receipt.get("ledger", {}).get("infrastructure_retries"))


def _table(groups: Mapping[str, _Group]) -> tuple[Finding, ...]:
    ordered: Sequence[tuple[str, _Group]] = sorted(groups.items(), key=lambda item: (-item[1].count, item[0]))
    return tuple(
        Finding(what=what, count=group.count, tasks=tuple(group.tasks), example=group.example)
        for what, group in ordered
    )
