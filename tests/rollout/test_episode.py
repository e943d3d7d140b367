"""The episode as a state machine, its budgets, its records and the buffer they go to."""

from __future__ import annotations

import json
from dataclasses import replace

import fake_suites
import pytest

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Action, Attribution, Budget, Cause, Message, Observation, StopReason, ToolCall
from agentrl_jax.rollout.attribution import ReplayEvidence, attribute
from agentrl_jax.rollout.budgets import EvidenceRule, Meter
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.codec import from_json
from agentrl_jax.rollout.episode import Act, Ask, Done, Episode, EpisodePlan
from agentrl_jax.rollout.play import play
from agentrl_jax.rollout.records import Receipt, Trajectory
from agentrl_jax.rollout.sampling import Sample
from agentrl_jax.rollout.wire import Failure

SUITE = fake_suites.counter()
TASK = SUITE.tasks("train", 5, 0)[4]
ADD = ToolCall(name="add", arguments={"n": 5})
FINISH = ToolCall(name="finish")


def say(renderer, item, *, stop="stop", cut=None) -> Sample:
    ids = renderer.turn(item)[:cut]
    return Sample(slot=0, ids=ids, logprobs=(-1.0,) * len(ids), versions=(2,) * len(ids), stop=stop)


def begun(renderer, budget: Budget | None = None, **options) -> Episode:
    plan = EpisodePlan(group=3, member=1, task=TASK, seed=11, key=(1,))
    episode = Episode(plan, SUITE.spec, renderer, max_turn_tokens=16, budget=budget, **options)
    first = SUITE.make().reset(TASK, 11)
    assert isinstance(episode.begin(first), Ask)
    return episode


def tell(text: str = "now 5", **fields) -> Observation:
    return Observation(content=(Message(role="tool", content=text),), **fields)


def end(episode: Episode) -> Trajectory:
    return episode.trajectory(None, None, verifier_version="2")


def test_p08_only_sampled_tokens_are_actions(renderer):
    episode = begun(renderer)
    assert episode.on_sample(say(renderer, ADD)) == Act(renderer.parse(renderer.turn(ADD)))
    episode.on_observation(tell(), 1.0)
    episode.on_sample(say(renderer, FINISH))
    assert episode.on_observation(Observation(content=(), terminated=True), 1.0) == Done(StopReason.COMPLETED)
    t = end(episode)
    spoken = [token for token, chosen in zip(t.tokens, t.action_mask, strict=True) if chosen]
    assert tuple(spoken) == renderer.turn(ADD) + renderer.turn(FINISH)
    for chosen, source, logprob, version in zip(
        t.action_mask, t.sources, t.behavior_logprobs, t.policy_versions, strict=True
    ):
        assert (source == Source.POLICY, logprob, version) == ((True, -1.0, 2) if chosen else (False, 0.0, -1))
    assert t.turns == 2 and t.prompt_length == t.action_mask.index(True)
    assert t.receipt.policy_versions == (2,)


def test_p02_sampled_ids_are_kept_though_their_text_encodes_to_fewer(renderer):
    long = tuple(renderer.tokenizer.token_to_id(piece) for piece in ("a", "##d", "##d"))
    assert len(renderer.encode(renderer.decode(long))) == 1, "the text is the one word `add`"
    ids = (*long, renderer.end_id)
    episode = begun(renderer)
    episode.on_sample(Sample(slot=0, ids=ids, logprobs=(-1.0,) * 4, versions=(0,) * 4, stop="stop"))
    episode.on_observation(tell(), 0.0)
    episode.give_up(StopReason.BUDGET)
    t = end(episode)
    assert t.tokens[t.prompt_length : t.prompt_length + 4] == ids and sum(t.action_mask) == 4
    assert len(t.tokens) == len(t.action_mask) == len(t.behavior_logprobs)


def test_p17_a_cut_turn_ends_the_episode_as_token_cap(renderer):
    episode = begun(renderer)
    episode.on_sample(say(renderer, ADD))
    episode.on_observation(tell(), 0.0)
    assert episode.on_sample(say(renderer, ADD, stop="length", cut=3)) == Done(StopReason.TOKEN_CAP)
    t = end(episode)
    assert t.truncated and sum(t.action_mask) == len(renderer.turn(ADD)) + 3


def test_p11_every_masked_token_has_its_logprob(renderer):
    episode = begun(renderer)
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probabilities"):
        episode.on_sample(Sample(slot=0, ids=(5, 6), logprobs=(-1.0,), versions=(0, 0), stop="stop"))


def test_an_empty_answer_to_text_is_an_early_stop(renderer):
    episode = begun(renderer)
    assert episode.on_sample(say(renderer, "please")) == Act(Action(text="please"))
    assert episode.on_observation(Observation(content=()), 0.0) == Done(StopReason.EARLY_STOP)


def test_the_reserve_admits_finishing_calls_only(renderer):
    episode = begun(renderer, Budget(steps=2, min_steps_for_finalize=1, finishing=("finish",)))
    episode.on_sample(say(renderer, ADD))
    episode.on_observation(tell(), 0.0)
    answer = episode.on_sample(say(renderer, ADD))
    assert isinstance(answer, Ask), "refused without the environment, and the policy is told"
    assert isinstance(episode.on_sample(say(renderer, FINISH)), Act)
    episode.on_observation(Observation(content=(), terminated=True), 0.0)
    t = end(episode)
    assert [step.performed for step in t.receipt.steps] == [True, False, True]
    assert "budget steps" in t.receipt.steps[1].observation.content[0].content
    assert t.receipt.ledger.denied == 1 and t.receipt.ledger.steps == 2 and len(t.receipt.actions) == 2


@pytest.mark.parametrize(
    ("budget", "stop"),
    [
        (Budget(steps=2), StopReason.BUDGET),
        (Budget(tool_calls=2, min_tool_calls_for_commit=0), StopReason.BUDGET),
        (Budget(tokens=10), StopReason.TOKEN_CAP),
        (Budget(write_actions=1, retries=0), StopReason.BUDGET),
    ],
)
def test_each_budget_ends_an_endless_policy(renderer, budget, stop):
    episode, move = begun(renderer, budget), None
    for _ in range(30):
        move = episode.on_sample(say(renderer, ADD))
        if isinstance(move, Act):
            move = episode.on_observation(tell(), 0.0)
        if isinstance(move, Done):
            break
    assert move == Done(stop)


def test_a_reserve_that_is_reached_can_end_the_episode(renderer):
    budget = Budget(steps=2, reserve_reached="stop", finishing=("finish",))
    episode = begun(renderer, budget)
    episode.on_sample(say(renderer, ADD))
    episode.on_observation(tell(), 0.0)
    assert isinstance(episode.on_sample(say(renderer, "please")), Act), "text is heard in the reserve, to sum up or ask"
    episode = begun(renderer, budget)
    episode.on_sample(say(renderer, ADD))
    episode.on_observation(tell(), 0.0)
    assert episode.on_sample(say(renderer, ADD)) == Done(StopReason.BUDGET)
    t = end(episode)
    assert t.receipt.ledger.denied == 1 and "kept for finish" in t.receipt.steps[-1].observation.content[0].content


def test_a_write_without_a_reserve_to_commit_in_is_refused(renderer):
    for reserve in ({"min_steps_for_finalize": 0}, {"min_tool_calls_for_commit": 0}):
        meter = Meter(Budget(finishing=("finish",), **reserve), fake_suites.TOOLS)
        assert "no write is begun" in meter.admit(Action(text="", calls=(ADD,)))
        assert meter.admit(Action(text="", calls=(ToolCall(name="look"),))) is None
    assert Meter(Budget(finishing=("finish",)), fake_suites.TOOLS).admit(Action(text="", calls=(ADD,))) is None
    assert Meter(Budget(min_steps_for_finalize=0), fake_suites.TOOLS).admit(Action(text="", calls=(ADD,))) is None


def test_retries_and_wall_time_are_budgets(renderer):
    clock = [0.0]
    episode = begun(renderer, Budget(retries=1, wall_s=5.0), clock=lambda: clock[0])
    episode.on_sample(say(renderer, "add n=x"))
    assert isinstance(episode.on_observation(tell("bad", status="invalid_action"), 0.0), Ask)
    clock[0] = 5.0
    episode.on_sample(say(renderer, ADD))
    assert episode.on_observation(tell(), 0.0) == Done(StopReason.BUDGET)


def test_low_evidence_stops_and_is_off_by_default():
    action, dry = Action(text="look", calls=(ToolCall(name="look"),)), tell(evidence_gain=0.0)
    plain, strict = (
        Meter(Budget(), fake_suites.TOOLS),
        Meter(Budget(), fake_suites.TOOLS, evidence=EvidenceRule(threshold=0.1, patience=2)),
    )
    for meter in (plain, strict):
        for _ in range(2):
            meter.perform(action)
            meter.settle(dry)
    assert plain.exhausted() is None and strict.exhausted() is StopReason.LOW_EVIDENCE
    assert plain.ledger().exploration == 2 and plain.ledger().writes == 0


def test_the_teacher_goes_through_the_same_code(renderer):
    t = play(SUITE, renderer, TASK, [ToolCall(name="look"), ADD, FINISH, "more"], 4, group=2, member=1)
    assert t.success and t.stop is StopReason.COMPLETED and t.turns == 3
    assert {s for s, m in zip(t.sources, t.action_mask, strict=True) if m} == {Source.TEACHER}
    assert set(t.policy_versions) == {-1} and set(t.behavior_logprobs) == {0.0} and t.oldest_version is None
    short = play(SUITE, renderer, TASK, [ADD], 4)
    assert short.stop is StopReason.EARLY_STOP and short.verdict.outcome is True


def test_records_survive_json(renderer):
    t = play(SUITE, renderer, TASK, [ToolCall(name="look"), ADD, FINISH], 4)
    t = replace(t, attribution=Attribution(cause=Cause.UNKNOWN, evidence="x"))
    assert Trajectory.from_json(json.loads(json.dumps(t.to_json()))) == t
    assert Receipt.from_json(json.loads(json.dumps(t.receipt.to_json()))) == t.receipt
    with pytest.raises(ValueError, match=r"Receipt: fields missing: .*task"):
        from_json(Receipt, {"seed": 1})
    with pytest.raises(ValueError, match=r"Trajectory\.seed: expected int, got 'x'"):
        Trajectory.from_json({**t.to_json(), "seed": "x"})


def test_the_chain_shows_a_dropped_step(renderer):
    receipt = play(SUITE, renderer, TASK, [ToolCall(name="look"), ADD, FINISH], 4).receipt
    assert receipt.breach() is None
    assert replace(receipt, steps=receipt.steps[1:]).breach() == 0
    assert replace(receipt, steps=(receipt.steps[1], receipt.steps[0])).breach() == 0


@pytest.mark.parametrize(
    ("phase", "kind", "finding", "cause"),
    [
        ("step", "timeout", None, Cause.POLICY),
        ("step", "timeout", "reproduced", Cause.POLICY),
        ("step", "timeout", "not_reproduced", Cause.ENVIRONMENT),
        ("step", "timeout", "diverged", Cause.POLICY),
        ("step", "crash", None, Cause.UNKNOWN),
        ("step", "crash", "diverged", Cause.UNKNOWN),
        ("step", "crash", "broke", Cause.ENVIRONMENT),
        ("step", "exception", None, Cause.ENVIRONMENT),
        ("reset", "timeout", None, Cause.ENVIRONMENT),
        ("verify", "timeout", None, Cause.EVALUATOR),
        ("close", "exception", None, Cause.ENVIRONMENT),
    ],
)
def test_p21_the_rules_of_attribution(phase, kind, finding, cause):
    evidence = None if finding is None else ReplayEvidence(finding, "seen")
    found = attribute(Failure(kind=kind, phase=phase, message="m"), evidence)
    assert found.cause is cause
    assert found.leaves_batch == (cause in (Cause.ENVIRONMENT, Cause.EVALUATOR))


def test_the_buffer_groups_by_id_and_keeps_what_is_old(renderer):
    script, buffer = [ADD, FINISH], Buffer(2)
    order = ((5, 1), (2, 0), (5, 0), (2, 1), (9, 0))
    played = [play(SUITE, renderer, TASK, script, 1, group=g, member=m) for g, m in order]
    versions = tuple(3 if m else -1 for m in played[1].action_mask)
    pairs = zip(played[1].action_mask, played[1].sources, strict=True)
    sources = tuple(int(Source.POLICY) if chosen else source for chosen, source in pairs)
    played[1] = replace(played[1], policy_versions=versions, sources=sources)
    for t in played:
        buffer.add(t)
    assert buffer.ready() == [2, 5] and len(buffer) == 5
    assert buffer.complete([5, 2]) and not buffer.complete([2, 9]) and not buffer.complete([3])
    assert buffer.holds(9, 0) and not buffer.holds(9, 1) and not buffer.holds(3, 0)
    assert [(t.group, t.member) for t in buffer.held()] == sorted(order)
    for b in (Buffer.of(2, buffer.held(), buffer.counts), buffer):
        groups = b.pop([5, 2])
        assert [(t.group, t.member) for group in groups for t in group] == [(5, 0), (5, 1), (2, 0), (2, 1)]
        assert b.counts["added"] == 5 and b.counts["stop/completed"] == 5 and len(b) == 1
        with pytest.raises(ValueError, match="expected all 2 members"):
            b.pop([9])
        assert b.holds(9, 0), "a group that is not whole stays"
    with pytest.raises(ValueError, match="group 9: member 0"):
        buffer.add(played[4])
