"""Faults injected into `workflow`: every episode ends with a cause, the right one, and leaves nothing behind."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import faults
import pytest
import scripted

from agentrl_jax.protocol import Cause, EnvironmentRef, StopReason
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.tokenizer import build

GROUP = 4
DEADLINES = Deadlines(start=60.0, reset=2.0, step=2.0, verify=2.0)


def play(scratch: Path, count: int, *, workers: int = 8) -> tuple[list[Trajectory], list[int], list[int]]:
    """`count` episodes of the reference solution, a fault in each by turns; the workers' pids, and the trainer's
    resident KiB after each quarter."""
    suite = faults.suite(str(scratch))
    renderer = ChatRenderer(build(suite.vocabulary(), vocab_size=512), TINY, tools=suite.spec.tools)
    tasks = suite.tasks("train", count // GROUP, 0)
    names = list(faults.FAULTS) * (1 + count // len(faults.FAULTS))
    random.Random(0).shuffle(names)
    plan, scripts = [], {}
    for index in range(count):
        group, member = divmod(index, GROUP)
        task = replace(tasks[group], data={**tasks[group].data, "fault": names[index], "member": member})
        plan.append(EpisodePlan(group=group, member=member, task=task, seed=group, key=(group, member)))
        scripts[group, member] = suite.solve(task)
    sampler = scripted.ScriptedSampler(renderer, lambda r: scripts[r.key[0], r.key[1]][r.key[2]], slots=workers * 2)
    found, pids, sizes = [], set(), []
    ref = EnvironmentRef(target="faults:suite", options={"scratch": str(scratch)})
    with Pool(ref, workers, DEADLINES) as pool:
        for t in collect(plan, sampler, pool, renderer, max_turn_tokens=64, temperature=1.0):
            pids.update(pool.pids().values())
            found.append((t.group, t.member, t.task.data["fault"], t) if count < 200 else _small(t))
            if len(found) % (count // 4) == 0:
                sizes.append(_resident())
    return [item[-1] for item in sorted(found, key=lambda item: item[:2])], sorted(pids), sizes


def _small(t: Trajectory) -> tuple:
    """The record without its tokens: a run keeps no thousand trajectories either."""
    none = dict.fromkeys(("tokens", "sources", "action_mask", "behavior_logprobs", "policy_versions", "turn_ids"), ())
    return t.group, t.member, t.task.data["fault"], replace(t, **none, receipt=replace(t.receipt, steps=()))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def check(found: list[Trajectory], pids: list[int], count: int) -> Counter[str]:
    """Every property that holds at any size; returns (fault: cause) pairs that came out otherwise than injected."""
    assert len({(t.group, t.member) for t in found}) == count, "an episode was lost"
    wrong: Counter[str] = Counter()
    for t in found:
        fault = t.task.data["fault"]
        cause = None if t.attribution is None else t.attribution.cause
        if cause is not faults.FAULTS[fault]:
            wrong[f"{fault}: {t.attribution}"] += 1
        if cause is None:
            assert t.success, (fault, t.stop, t.verdict)
        else:
            assert t.attribution.evidence and t.receipt.attribution == t.attribution
        if cause in (Cause.ENVIRONMENT, Cause.EVALUATOR):
            assert not t.valid, "an infrastructure failure counts in a baseline"
        if cause is Cause.POLICY:
            assert t.valid and t.verdict.outcome is False, "a hang or crash that it can cause stays"
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not left, f"processes are left: {left}"
    return wrong


def test_every_injected_fault_is_attributed_and_none_costs_another_episode(tmp_path):
    count = 2 * len(faults.FAULTS) // GROUP * GROUP
    found, pids, _ = play(tmp_path, count)
    assert not check(found, pids, count)
    by_fault = {t.task.data["fault"]: t for t in found}
    assert set(by_fault) == set(faults.FAULTS)
    assert by_fault["once_kill"].receipt.healed == 1 and by_fault["once_hang"].receipt.healed == 1
    for name, retries in (("once_down", 1), ("once_down_reset", 1), ("once_kill_reset", 1), ("down", 2), ("raise", 0)):
        assert by_fault[name].receipt.ledger.infrastructure_retries == retries, name
    down = by_fault["down"]
    assert down.stop is StopReason.FAILURE and down.receipt.steps[-1].exception == "unavailable"
    assert "asked again 2 times" in down.attribution.evidence and "503" in down.attribution.evidence
    assert by_fault["hang"].stop is StopReason.TIMEOUT
    buffer = Buffer(GROUP)
    for t in found:
        assert t.receipt.breach() is None
        buffer.add(t)
    dropped = sum(faults.FAULTS[t.task.data["fault"]] in (Cause.ENVIRONMENT, Cause.EVALUATOR) for t in found)
    assert buffer.counts["valid"] == count - dropped


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_episodes_with_faults(tmp_path):
    found, pids, sizes = play(tmp_path, 1000, workers=16)
    wrong = check(found, pids, 1000)
    print(f"{len(pids)} processes, resident KiB by quarter {sizes}, attributed otherwise: {dict(wrong)}")
    assert sum(wrong.values()) <= 10, wrong
    assert sizes[-1] < sizes[0] + 30_000, "memory grows with the episodes"
