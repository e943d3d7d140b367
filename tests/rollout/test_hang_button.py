"""P21: hanging is an action. It must not become a way out, and its timeouts are told apart from the machine's."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import scripted
from agentrl_envs.conformance import case, check, hang_button

from agentrl_jax.protocol import Attribution, Cause, EnvironmentRef, StopReason, ToolCall
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.tokenizer import build

GROUP, UPDATES = 6, 2
ACTIONS = ("right", "wrong", "hang")


def test_without_its_hang_it_is_a_sound_environment():
    ref = EnvironmentRef(target="agentrl_envs.conformance.hang_button:suite", options={"hang_s": 0.0})
    findings = list(check(case(ref, 4)))
    assert [finding for finding in findings if finding.result != "holds"] == []


def _call(action: str, button: int) -> ToolCall:
    if action == "hang":
        return ToolCall(name="hang")
    return ToolCall(name="press", arguments={"button": button if action == "right" else (button + 1) % 10})


def _updated(logits: dict[str, float], found: list[tuple[str, float | None]]) -> dict[str, float]:
    """One policy-gradient step: advantages over the members that count, as `Trajectory.valid` has it."""
    rewards = [reward for _, reward in found if reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    shares = _shares(logits)
    gradient = dict.fromkeys(ACTIONS, 0.0)
    for action, reward in found:
        for name in ACTIONS if reward is not None else ():
            gradient[name] += (reward - mean) * ((name == action) - shares[name]) / len(found)
    return {name: logits[name] + 4.0 * gradient[name] for name in ACTIONS}


def _shares(logits: dict[str, float]) -> dict[str, float]:
    whole = sum(math.exp(value) for value in logits.values())
    return {name: math.exp(value) / whole for name, value in logits.items()}


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    made = hang_button.suite()
    return ChatRenderer(build(list(made.vocabulary()), vocab_size=400), TINY, tools=made.spec.tools)


def test_p21_the_policy_does_not_learn_to_hang(renderer):
    """Real workers, real deadlines. Were hangs left out of the batch, their share would grow."""
    ref = EnvironmentRef(target="agentrl_envs.conformance.hang_button:suite")
    (task,) = hang_button.tasks("train", 1, 0)
    logits, forgiving = dict.fromkeys(ACTIONS, 0.0), dict.fromkeys(ACTIONS, 0.0)
    hangs, buffer = [_shares(logits)["hang"]], Buffer(GROUP)
    with Pool(ref, GROUP, Deadlines(start=60.0, reset=30.0, step=1.0, verify=30.0)) as pool:
        for update in range(UPDATES):
            chosen = list(ACTIONS) + random.Random(update).choices(ACTIONS, k=GROUP - len(ACTIONS))
            scripts = {member: [_call(action, task.data["button"])] for member, action in enumerate(chosen)}
            plan = [EpisodePlan(group=update, member=m, task=task, seed=m, key=(update, m)) for m in range(GROUP)]
            sampler = scripted.ScriptedSampler(renderer, scripted.by_turn(scripts), slots=GROUP)
            done = sorted(
                collect(plan, sampler, pool, renderer, max_turn_tokens=16, temperature=1.0), key=lambda t: t.member
            )
            for trajectory in done:
                buffer.add(trajectory)
            rewards = [float(t.success) if t.valid else None for t in done]
            logits = _updated(logits, list(zip(chosen, rewards, strict=True)))
            forgiven = [None if action == "hang" else reward for action, reward in zip(chosen, rewards, strict=True)]
            forgiving = _updated(forgiving, list(zip(chosen, forgiven, strict=True)))
            hangs.append(_shares(logits)["hang"])
            for action, trajectory in zip(chosen, done, strict=True):
                assert trajectory.success is (action == "right") and trajectory.valid
                assert (trajectory.stop is StopReason.TIMEOUT) is (action == "hang")
                cause = None if trajectory.attribution is None else trajectory.attribution.cause
                assert cause is (Cause.POLICY if action == "hang" else None)
    assert hangs[-1] < hangs[0] and hangs == sorted(hangs, reverse=True)
    ratio = {name: _shares(values)["hang"] / _shares(values)["wrong"] for name, values in
             (("kept", logits), ("forgiven", forgiving))}  # fmt: skip
    assert ratio["forgiven"] > 1.2 > ratio["kept"], "forgiven, hanging would be the better way to fail"
    timeouts = Counter(t.attribution.cause for group in buffer.pop(range(UPDATES)) for t in group if t.attribution)
    assert set(timeouts) == {Cause.POLICY} and timeouts[Cause.POLICY] == buffer.counts["policy_timeout"]
    assert buffer.counts["infra_timeout"] == 0
    blamed = Attribution(cause=Cause.ENVIRONMENT, evidence="the disk was gone")
    buffer.add(replace(done[0], group=9, stop=StopReason.TIMEOUT, attribution=blamed))
    assert buffer.counts["infra_timeout"] == 1 and timeouts[Cause.POLICY] == buffer.counts["policy_timeout"]
