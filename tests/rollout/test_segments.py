"""Episodes whose history is rendered anew, turns with several calls, and samples that cannot be used."""

from __future__ import annotations

import json

import fake_suites
import numpy as np
import pytest
import scripted
from small_tokenizers import family

from agentrl_jax.batch import Source
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import (
    Action,
    Cause,
    EnvironmentRef,
    Message,
    Observation,
    Status,
    StopReason,
    ToolCall,
)
from agentrl_jax.recipes.evaluate import measure
from agentrl_jax.recipes.guards import refuse_broken
from agentrl_jax.rollout.calls import QWEN
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.episode import Act, Ask, Done, Episode
from agentrl_jax.rollout.families import FAMILIES
from agentrl_jax.rollout.packing import pack, rows_needed
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.sampling import Sample
from agentrl_jax.rollout.template_renderer import TemplateRenderer

SUITE = fake_suites.counter()
TASK = SUITE.tasks("train", 5, 0)[4]
TURNS = ("<think>\nso\n</think>\n\nlook", "<think>\nand\n</think>\n\nis it", "<think>\non\n</think>\n\nthe answer")


def renderer(history: str = "keep") -> TemplateRenderer:
    return TemplateRenderer(family("qwen3"), FAMILIES["qwen3"], QWEN, SUITE.spec.tools, history=history)  # type: ignore[arg-type]


def sample(spoken: TemplateRenderer, text: str) -> Sample:
    ids = (*spoken._spell(text), spoken.end_id)
    return Sample(
        slot=0, ids=ids, logprobs=tuple(-0.1 * i for i in range(len(ids))), versions=(3,) * len(ids), stop="stop"
    )


def begun(spoken: TemplateRenderer, **options) -> Episode:
    episode = Episode(
        EpisodePlan(group=0, member=0, task=TASK, seed=1), SUITE.spec, spoken, max_turn_tokens=99, **options
    )
    assert isinstance(episode.begin(SUITE.make().reset(TASK, 1)), Ask)
    return episode


def finished(episode: Episode) -> Trajectory:
    return episode.trajectory(None, None, verifier_version="1")


def user(text: str = "go on") -> Observation:
    return Observation(content=(Message(role="user", content=text),))


def talk(history: str) -> tuple[Trajectory, list[Ask]]:
    """Three turns with reasoning, a user's words between them."""
    spoken = renderer(history)
    episode, asks = begun(spoken), []
    for index, text in enumerate(TURNS):
        assert isinstance(episode.on_sample(sample(spoken, text)), Act)
        if index < 2:
            move = episode.on_observation(user(), 0.0)
            assert isinstance(move, Ask)
            asks.append(move)
    assert episode.on_observation(Observation(content=(), terminated=True), 0.0) == Done(StopReason.COMPLETED)
    return finished(episode), asks


@pytest.mark.parametrize(("history", "segments"), [("keep", 1), ("template", 3)])
def test_p04_one_sample_or_three_and_each_token_trains_once(history, segments):
    trajectory, asks = talk(history)
    spoken = renderer()
    sampled = [i for text in TURNS for i in sample(spoken, text).ids]
    chosen = [i for i, m in zip(trajectory.tokens, trajectory.action_mask, strict=True) if m]
    assert trajectory.segments == segments and chosen == sampled
    assert [cut.reason for cut in trajectory.breaks] == ["reasoning_stripped"] * (segments - 1)
    assert [ask.fresh for ask in asks] == [segments == 3] * 2
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory
    for (start, prompt, end), turn in zip(trajectory.spans, range(segments), strict=True) if segments > 1 else ():
        assert not any(trajectory.action_mask[start:prompt]) and set(trajectory.turn_ids[prompt:end]) == {turn}
        text = family("qwen3").decode(trajectory.tokens[start:prompt], skip_special_tokens=False)
        assert "<think>" not in text and text.count("<|im_start|>assistant") == turn + 1


@pytest.mark.parametrize("history", ["keep", "template"])
def test_p04_packed_segments_are_branches_of_one_trajectory(history):
    """What the sampler saw before each token is what the learner sees: the ancestors of an action are its context."""
    trajectory, _ = talk(history)
    batch = pack([[trajectory]], rows=1, width=600, group_size=1, pad_id=0)
    found = np.argwhere(batch.action_mask[0])[:, 0]
    chosen = [i for i, m in enumerate(trajectory.action_mask) if m]
    assert len(found) == len(chosen) == sum(trajectory.action_mask)
    assert set(batch.trajectory_ids[0][batch.action_mask[0]]) == {0}
    for column, place in zip(found.tolist(), chosen, strict=True):
        ancestors = [j for j in range(column + 1) if column < batch.subtree_ends[0, j]]
        start = max(begin for begin, _, _ in trajectory.spans if begin <= place)
        assert tuple(batch.tokens[0, ancestors]) == trajectory.tokens[start : place + 1]
        assert batch.positions[0, column] == place - start
        assert batch.behavior_logprobs[0, column] == np.float32(trajectory.behavior_logprobs[place])
        assert batch.turn_ids[0, column] == trajectory.turn_ids[place]
    shared = int((batch.trajectory_ids[0] == 1).sum() - (batch.sources[0] == Source.PADDING).sum())
    assert shared == trajectory.prompt_length, "the first prompt is stored once"
    tight = max(end - start for start, _, end in trajectory.spans)
    assert rows_needed([[trajectory]], width=tight, group_size=1) == (1 if history == "keep" else 2)


def test_segments_are_limited():
    spoken = renderer("template")
    episode = begun(spoken, max_segments=1)
    episode.on_sample(sample(spoken, TURNS[0]))
    assert episode.on_observation(user(), 0.0) == Done(StopReason.BUDGET)
    assert finished(episode).segments == 1


def test_p03_a_re_rendered_turn_is_counted_on_the_trajectory_and_in_the_metrics():
    spoken = renderer("template")
    letters = tuple(i for c in "the answer" for i in spoken.encode(c))
    ids = (*spoken._spell("<think>\nso\n</think>\n\n"), *letters, spoken.end_id)
    episode = begun(spoken)
    episode.on_sample(Sample(slot=0, ids=ids, logprobs=(0.0,) * len(ids), versions=(1,) * len(ids), stop="stop"))
    episode.on_observation(user(), 0.0)
    episode.give_up(StopReason.BUDGET)
    trajectory = finished(episode)
    assert trajectory.retokenize_mismatch == 1 and sum(trajectory.action_mask) == len(ids)
    plain, _ = talk("keep")
    figures = measure([trajectory, plain])
    assert figures["retokenize_mismatch"] == 1 and figures["segments"] == 1.5
    assert figures["breaks"] == {"reasoning_stripped": 1} and figures["dropped/token_mismatch"] == 0


# -- several calls in a turn -----------------------------------------------------------------------------------

SLOW, FAST = ToolCall(name="add", arguments={"n": 1}), ToolCall(name="look")
CALLS = "plan " + QWEN.write(SLOW) + QWEN.write(FAST) + QWEN.write(ToolCall(name="steal"))


def results(*texts: str) -> Observation:
    return Observation(content=tuple(Message(role="tool", content=text) for text in texts))


def test_p06_p07_each_call_has_its_result_in_order_and_an_unknown_tool_gets_an_error():
    spoken = renderer()
    episode, turn = begun(spoken), sample(spoken, CALLS)
    move = episode.on_sample(turn)
    assert isinstance(move, Act) and move.action.calls == (SLOW, FAST), "the environment is asked for what it has"
    ask = episode.on_observation(results("one", "two"), 0.0)
    assert isinstance(ask, Ask)
    text = family("qwen3").decode(ask.ids, skip_special_tokens=False)
    error = "error: unknown tool 'steal'; there are: add, break, finish, look"
    blocks = "\n".join(f"<tool_response>\n{each}\n</tool_response>" for each in ("one", "two", error))
    assert text == f"\n<|im_start|>user\n{blocks}<|im_end|>\n<|im_start|>assistant\n"
    ids = [(m.name, m.call_id) for m in episode._talk if isinstance(m, Message) and m.role == "tool"]
    assert ids == [("add", "call_0_0"), ("look", "call_0_1"), ("steal", "call_0_2")]
    episode.give_up(StopReason.BUDGET)
    trajectory = finished(episode)
    place = trajectory.prompt_length
    assert trajectory.tokens[place : place + len(turn.ids)] == turn.ids, "text and calls as they were sampled"
    (step,) = trajectory.receipt.steps
    assert step.action.text.startswith("plan ") and len(step.observation.content) == 2, "the receipt is what happened"
    assert trajectory.receipt.ledger.retries == 1 and trajectory.receipt.breach() is None


def test_p07_the_error_stands_where_its_call_stood():
    spoken = renderer()
    episode = begun(spoken)
    episode.on_sample(sample(spoken, QWEN.write(ToolCall(name="steal")) + QWEN.write(FAST)))
    ask = episode.on_observation(results("two"), 0.0)
    assert isinstance(ask, Ask)
    text = spoken.decode(ask.ids)
    assert text.index("unknown tool") < text.index("two")


def test_a_turn_of_unknown_tools_only_is_an_error_of_the_turn():
    spoken = renderer()
    move = begun(spoken).on_sample(sample(spoken, QWEN.write(ToolCall(name="steal"))))
    assert isinstance(move, Act) and not move.action.calls and "unknown tool 'steal'" in str(move.action.error)


def test_results_that_do_not_match_the_calls_are_followed_by_the_errors():
    spoken = renderer()
    episode = begun(spoken)
    episode.on_sample(sample(spoken, CALLS))
    answer = Observation(content=(Message(role="tool", content="both"),), status=Status.DENIED)
    ask = episode.on_observation(answer, 0.0)
    assert isinstance(ask, Ask)
    text = spoken.decode(ask.ids)
    assert text.index("both") < text.index("unknown tool")


def test_p08_the_mask_is_the_assistant_spans_end_token_included():
    """[system, user, assistant(3), tool, assistant(4)]: seven ones."""
    spoken = renderer()
    episode = begun(spoken)
    for count in (3, 4):
        ids = (*[spoken.encode("a")[0]] * (count - 1), spoken.end_id)
        assert episode.on_sample(
            Sample(slot=0, ids=ids, logprobs=(-1.0,) * count, versions=(0,) * count, stop="stop")
        ) == Act(Action(text="a" * (count - 1)))
        episode.on_observation(results("t"), 0.0)
    episode.give_up(StopReason.BUDGET)
    trajectory = finished(episode)
    assert sum(trajectory.action_mask) == 7
    sources = {s for s, m in zip(trajectory.sources, trajectory.action_mask, strict=True) if m}
    assert sources == {int(Source.POLICY)}


# -- samples that cannot be used -------------------------------------------------------------------------------


class _Garbled(scripted.ScriptedSampler):
    """Gives member 2 a sample with a log-probability too few."""

    def _sample(self, request):
        found = super()._sample(request)
        if request.key[1] != 2:
            return found
        return Sample(
            slot=found.slot, ids=found.ids, logprobs=found.logprobs[:-1], versions=found.versions, stop=found.stop
        )


def test_p14_a_mismatched_sample_drops_its_rollout_alone_and_is_counted(tmp_path, request):
    words = request.getfixturevalue("renderer")
    ref = EnvironmentRef(target="fake_suites:counter", options={"scratch": str(tmp_path)})
    scripts = {m: [ToolCall(name="add", arguments={"n": 1}), ToolCall(name="finish")] for m in range(4)}
    plans = [EpisodePlan(group=0, member=m, task=TASK, seed=1, key=(0, m)) for m in range(4)]
    with Pool(ref, 4, Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)) as pool:
        sampler = _Garbled(words, scripted.by_turn(scripts), slots=4)
        found = list(collect(plans, sampler, pool, words, max_turn_tokens=16, temperature=1.0))
    (lost,) = [t for t in found if t.token_mismatch]
    assert lost.member == 2 and not lost.valid and lost.attribution.cause is Cause.ENVIRONMENT
    assert "log-probabilities" in lost.attribution.evidence and sum(t.valid for t in found) == 3
    assert measure(found)["dropped/token_mismatch"] == 1
    refuse_broken(found, 0.25)
    with pytest.raises(UserError, match=r"garbage in sample.*1 of 4 episodes"):
        refuse_broken(found, 0.2)
