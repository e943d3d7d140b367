"""Episodes through real worker processes: failures become data, siblings go on, and timing changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_suites
import pytest
import scripted

import agentrl_jax
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Cause, EnvironmentRef, StopReason, Task, ToolCall
from agentrl_jax.recipes.guards import refuse_broken
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.replay import replay
from agentrl_jax.rollout.sampling import Sample

DEADLINES = Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)  # no test waits for these
HASTY = replace(DEADLINES, step=1.0, verify=1.0)  # where a hang is to meet them
ADD2, ADD3 = ToolCall(name="add", arguments={"n": 2}), ToolCall(name="add", arguments={"n": 3})
FINISH = ToolCall(name="finish")
GOOD = [ADD2, ADD3, FINISH]


def _break(how: str) -> list[ToolCall | str]:
    return [ADD2, ToolCall(name="break", arguments={"how": how}), ADD3, FINISH]


def _plan(group: int, member: int, fault: str = "") -> EpisodePlan:
    task = Task(id=f"t{group}-{fault}", split="train", data={"goal": 5, "fault": fault})
    return EpisodePlan(group=group, member=member, task=task, seed=9, key=(group, member))


def _run(pool, renderer, scripts, plan, *, slots=8, shuffle=None, healing=True) -> dict[int, Trajectory]:
    sampler = scripted.ScriptedSampler(renderer, scripted.by_turn(scripts), slots=slots, shuffle=shuffle)
    found = collect(plan, sampler, pool, renderer, max_turn_tokens=16, temperature=1.0, healing=healing)
    return {t.group * 100 + t.member: t for t in found}


@pytest.fixture
def ref(tmp_path) -> EnvironmentRef:
    return EnvironmentRef(target="fake_suites:counter", options={"scratch": str(tmp_path)})


@pytest.fixture
def pool(ref):
    with Pool(ref, 8, DEADLINES) as pool:
        yield pool


@pytest.fixture
def hasty(ref):
    with Pool(ref, 8, HASTY) as pool:
        yield pool


def test_p45_one_exception_leaves_the_fifteen_siblings_alone(pool, renderer):
    scripts = {m: _break("raise") if m == 7 else GOOD for m in range(16)}
    done = _run(pool, renderer, scripts, [_plan(0, m) for m in range(16)], slots=16)
    assert sorted(done) == list(range(16))
    assert all(done[m].success for m in range(16) if m != 7)
    lost = done[7]
    assert lost.stop is StopReason.FAILURE and not lost.valid and lost.verdict is None
    assert lost.attribution.cause is Cause.ENVIRONMENT
    assert "ValueError" in lost.attribution.evidence and "the database is locked" in lost.attribution.evidence
    assert lost.receipt.steps[-1].exception == "ValueError"


def test_p47_p21_hang_is_bounded_and_stays_a_policy_failure(hasty, renderer):
    """The hang itself goes on for longer than a test may."""
    done = _run(hasty, renderer, {0: _break("hang"), 1: GOOD}, [_plan(0, 0), _plan(0, 1)])
    hung = done[0]
    assert hung.stop is StopReason.TIMEOUT and hung.attribution.cause is Cause.POLICY
    assert hung.valid and hung.verdict.outcome is False, "a hang the policy can cause is never forgiven"
    assert "within 1 s" in hung.attribution.evidence and hung.receipt.limits["deadlines"]["step"] == 1.0
    assert done[1].success


@pytest.mark.parametrize("limit", [0.25, 20.0])
def test_p20_a_tool_slower_than_its_limit_ends_the_episode_and_the_limit_is_told(ref, renderer, limit):
    """What is too long is the setting's to say: the same work goes through under a longer limit."""
    with Pool(ref, 2, replace(DEADLINES, step=limit)) as pool:
        (done,) = _run(pool, renderer, {0: _break("count")}, [_plan(0, 0)]).values()
    assert done.receipt.limits["deadlines"]["step"] == limit and done.receipt.breach() is None
    if limit > 1.0:
        assert done.success and done.attribution is None and done.receipt.steps[1].wall_ms >= 1000
        return
    assert done.stop is done.receipt.stop is StopReason.TIMEOUT and done.verdict.outcome is False
    assert done.attribution == done.receipt.attribution and done.attribution.cause is Cause.POLICY
    assert done.attribution.evidence.startswith("timeout in step: ") and "0.25 s" in done.attribution.evidence
    assert "the same actions fail again" in done.attribution.evidence
    late = done.receipt.steps[-1]
    assert late.exception == "timeout" and late.observation is None and late.performed and late.wall_ms >= 250


@pytest.mark.parametrize("how", ["once_crash", "once_hang"])
def test_a_flaky_environment_is_healed_by_replay(hasty, renderer, how):
    (done,) = _run(hasty, renderer, {0: _break(how)}, [_plan(0, 0)]).values()
    assert done.success and done.receipt.healed == 1 and done.attribution is None
    assert done.receipt.breach() is None


def test_without_replay_a_hang_is_the_policys_and_a_crash_unknown(tmp_path, renderer):
    ref = EnvironmentRef(target="fake_suites:counter", options={"fork": "none", "scratch": str(tmp_path)})
    with Pool(ref, 4, HASTY) as pool:
        done = _run(pool, renderer, {0: _break("once_hang"), 1: _break("once_crash")}, [_plan(0, 0), _plan(0, 1)])
    assert done[0].attribution.cause is Cause.POLICY and done[1].attribution.cause is Cause.UNKNOWN
    assert all(t.valid and t.verdict.outcome is False for t in done.values())


def test_reproduced_crash_is_the_policys(pool, renderer):
    (done,) = _run(pool, renderer, {0: _break("crash")}, [_plan(0, 0)]).values()
    assert done.attribution.cause is Cause.POLICY and "SIGKILL" in done.attribution.evidence


@pytest.mark.parametrize("how", ["none", "text", "unpicklable", "exit"])
def test_garbage_is_the_environments(pool, renderer, how):
    done = _run(pool, renderer, {0: _break(how), 1: GOOD}, [_plan(0, 0), _plan(0, 1)])
    assert done[0].attribution.cause is Cause.ENVIRONMENT and not done[0].valid
    assert done[1].success


def test_messages_that_cannot_be_rendered_end_their_episode_alone(pool, renderer):
    plan = [_plan(0, 0), _plan(0, 1, "role"), _plan(0, 2)]
    done = _run(pool, renderer, {0: _break("role"), 1: GOOD, 2: GOOD}, plan)
    assert done[2].success
    for member, evidence in ((0, "garbage in step: the answer to turn 1"), (1, "garbage in reset: the first messages")):
        lost = done[member]
        assert lost.attribution.cause is Cause.ENVIRONMENT and lost.stop is StopReason.FAILURE and not lost.valid
        assert lost.attribution.evidence.startswith(f"{evidence} cannot be rendered: ")
        assert "oracle" in lost.attribution.evidence and lost.receipt.breach() is None
    assert done[0].receipt.steps[-1].observation.content[0].role == "oracle", "the receipt has what was said"


@pytest.mark.parametrize("turn", [0, 1])
def test_a_prompt_that_leaves_no_room_is_not_the_policys_failure(pool, renderer, turn):
    """A context that is full later on is: the policy's own turns filled it."""

    class Full(scripted.ScriptedSampler):
        def _sample(self, request):
            if request.key[1:] != (0, turn):
                return super()._sample(request)
            message = "96 tokens leave no room to sample in context=96"
            return Sample(slot=request.slot, ids=(), logprobs=(), versions=(), stop="context", message=message)

    sampler = Full(renderer, scripted.by_turn({0: GOOD, 1: GOOD}), slots=2)
    found = collect([_plan(0, 0), _plan(0, 1)], sampler, pool, renderer, max_turn_tokens=16, temperature=1.0)
    full, good = sorted(found, key=lambda t: t.member)
    assert good.success
    if turn:
        assert full.stop is StopReason.TOKEN_CAP and full.valid and full.attribution is None
    else:
        assert full.stop is StopReason.FAILURE and not full.valid and full.attribution.cause is Cause.ENVIRONMENT
        assert "the prompt is too long: 96 tokens" in full.attribution.evidence and not any(full.action_mask)
        with pytest.raises(UserError, match=r"context=96.*1 of 2 episodes"):
            refuse_broken([full, good], 0.25)


def test_p22_the_verifier_sees_the_whole_rollout_and_both_states(pool, renderer):
    """Every turn in order, with its text, its calls and what could not be read; the state before and after: from
    which, under the task's seed, every tool result follows (the receipt replays). Not the last string alone."""
    script = [ADD2, ToolCall(name="look"), ADD3, FINISH]
    (done,) = _run(pool, renderer, {0: script}, [_plan(0, 0, "witness")]).values()
    told = done.verdict.diagnostics
    assert (told["initial"], told["final"]) == ("0", "5")
    assert [a["calls"] for a in told["actions"]] == [
        [["add", {"n": 2}]], [["look", {}]], [["add", {"n": 3}]], [["finish", {}]],
    ]  # fmt: skip
    assert all(a["text"] and a["error"] is None for a in told["actions"])
    assert len(told["actions"]) == len(done.receipt.steps)


@pytest.mark.parametrize("fault", ["verify_raise", "verify_hang", "verify_crash", "verify_nan", "verify_garbage"])
def test_a_broken_verifier_leaves_the_episode_unscored(hasty, renderer, fault):
    done = _run(hasty, renderer, {0: GOOD, 1: GOOD}, [_plan(0, 0, fault), _plan(1, 1)])
    lost = done[0]
    assert lost.attribution.cause is Cause.EVALUATOR and lost.verdict is None and not lost.valid
    assert lost.stop is StopReason.COMPLETED
    assert done[101].success


def test_p41_unscored_is_not_zero(pool, renderer):
    (done,) = _run(pool, renderer, {0: GOOD}, [_plan(0, 0, "unscored")]).values()
    assert done.unscored and not done.valid and done.verdict.outcome is None and done.attribution is None


@pytest.mark.parametrize("fault", ["reset", "snapshot", "close"])
def test_reset_snapshot_and_close_failures_are_the_environments(pool, renderer, fault):
    done = _run(pool, renderer, {0: GOOD, 1: GOOD}, [_plan(0, 0, fault), _plan(0, 1)])
    assert done[0].attribution.cause is Cause.ENVIRONMENT and not done[0].valid
    assert done[1].success
    assert (fault == "reset") == (done[0].tokens == ())


def test_p50_what_an_environment_prints_and_says_is_bounded(pool, renderer):
    done = _run(pool, renderer, {0: _break("loud"), 1: GOOD}, [_plan(0, 0, "print"), _plan(0, 1)])
    step = done[0].receipt.steps[1]
    assert step.status == "truncated" and len(step.observation.content[0].content) < 21_000
    assert "80000 characters cut" in step.observation.content[0].content
    assert done[1].success


def test_kill_9_between_turns_is_healed(pool, renderer):
    killed = []

    def script(request):
        turn = request.key[2]
        if turn == 1 and request.key[1] == 0 and not killed:
            killed.extend(pool.pids().values())
            os.kill(killed[0], signal.SIGKILL)
        return GOOD[turn]

    sampler = scripted.ScriptedSampler(renderer, script, slots=4)
    done = list(collect([_plan(0, m) for m in range(2)], sampler, pool, renderer, max_turn_tokens=16, temperature=1.0))
    assert killed and all(t.success for t in done)
    assert sum(t.receipt.healed for t in done) == 1


def test_timing_and_worker_count_change_nothing(ref, renderer):
    scripts = {m: [ADD2, "hello"] if m == 3 else GOOD for m in range(4)}
    plan = [_plan(g, m) for g in range(5) for m in range(4)]
    runs = []
    for workers, shuffle in ((2, 1), (8, 2), (8, None)):
        with Pool(ref, workers, DEADLINES) as pool:
            done = _run(pool, renderer, scripts, plan, slots=6, shuffle=shuffle)
        fields = ("tokens", "sources", "action_mask", "behavior_logprobs", "turn_ids", "stop", "verdict")
        runs.append({key: [getattr(t, name) for name in fields] for key, t in done.items()})
    assert len(runs[0]) == 20 and runs[0] == runs[1] == runs[2]


def test_members_of_a_group_share_their_prompt(pool, renderer):
    sampler = scripted.ScriptedSampler(renderer, scripted.by_turn(dict.fromkeys(range(4), GOOD)), slots=8)
    plan = [_plan(g, m) for g in range(4) for m in range(4)]
    list(collect(plan, sampler, pool, renderer, max_turn_tokens=16, temperature=1.0))
    fresh = [request for request in sampler.requests if request.fresh]
    assert len(fresh) == 16
    leaders = {r.key[0]: r.slot for r in fresh if r.share_with is None}
    assert sorted(leaders) == [0, 1, 2, 3], "one of each group"
    assert all(r.share_with == leaders[r.key[0]] for r in fresh if r.share_with is not None)
    assert len({request.key for request in sampler.requests}) == len(sampler.requests)


def test_the_receipt_replays_and_divergence_is_named(pool, ref, renderer):
    (done,) = _run(pool, renderer, {0: GOOD}, [_plan(0, 0)]).values()
    assert replay(done.receipt) is None
    other = replace(done.receipt, task=replace(done.receipt.task, data={"goal": 4, "fault": ""}))
    found = replay(other)
    assert found is not None and found.where == "reset" and found.cause == "unexplained"
    assert "recorded versions" in found.why
    step = replace(done.receipt.steps[1], wall_ms=0.0)
    altered = replace(done.receipt, steps=(done.receipt.steps[0], step, *done.receipt.steps[2:]))
    found = replay(altered)
    assert found is not None and found.step == 1 and found.cause == "altered receipt"


def test_a_hang_replays_as_a_hang(hasty, renderer):
    (done,) = _run(hasty, renderer, {0: _break("hang")}, [_plan(0, 0)]).values()
    assert replay(done.receipt) is None


def test_closing_early_frees_the_workers(pool, renderer):
    sampler = scripted.ScriptedSampler(renderer, scripted.by_turn({0: _break("hang"), 1: GOOD}), slots=2)
    running = collect([_plan(0, 0), _plan(0, 1)], sampler, pool, renderer, max_turn_tokens=16, temperature=1.0)
    assert next(running).member == 1
    running.close()
    assert [pool.acquire() for _ in range(8)].count(None) == 0


def test_an_environment_that_cannot_be_built_says_so(renderer):
    broken, stuck = (EnvironmentRef(target=f"fake_suites:{name}") for name in ("broken", "stuck"))
    missing = r"fake_suites:broken.*the index file is missing"
    with Pool(broken, 2, DEADLINES) as pool, pytest.raises(UserError, match=missing):
        _ = pool.spec
    with Pool(stuck, 2, Deadlines(start=1.0)) as pool, pytest.raises(UserError, match=r"deadlines\.start"):
        _ = pool.spec


def test_the_worker_module_loads_no_jax():
    code = "import sys, agentrl_jax.rollout.worker, agentrl_jax.rollout.collect; print('jax' in sys.modules)"
    root = Path(agentrl_jax.__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert out.stdout.strip() == "False"


def test_no_process_is_left_and_no_worker_imports_jax(ref, renderer):
    with Pool(ref, 4, DEADLINES) as pool:
        _run(pool, renderer, dict.fromkeys(range(4), GOOD), [_plan(0, m) for m in range(4)])
        pids = list(pool.pids().values())
        assert len(pids) == 4
        for pid in pids:
            with open(f"/proc/{pid}/maps") as maps:
                assert "jaxlib" not in maps.read()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


assert fake_suites.TOOLS  # the module the workers import by name is the one this test sees
