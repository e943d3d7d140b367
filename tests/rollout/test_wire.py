"""What the pool and its workers say to each other comes through whole; only plain data comes from a worker."""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace

import fake_suites
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import (
    Action,
    Check,
    EnvironmentRef,
    EnvStatus,
    Message,
    Observation,
    Snapshot,
    Status,
    StopReason,
    Task,
    ToolCall,
    Verdict,
)
from agentrl_jax.rollout.play import play
from agentrl_jax.rollout.records import observation_hash
from agentrl_jax.rollout.replay import replay
from agentrl_jax.rollout.wire import (
    Answer,
    Failure,
    Finish,
    Inbox,
    Note,
    Perform,
    Ready,
    Replay,
    Reset,
    decode_command,
    decode_reply,
    encode_command,
    encode_reply,
)

TEXT = st.text(st.characters(), max_size=30)  # lone surrogates too: a policy can write them
CALLS = st.builds(
    ToolCall, name=TEXT, arguments=st.dictionaries(TEXT, st.none() | st.booleans() | st.integers() | TEXT)
)
ACTIONS = st.builds(Action, text=TEXT, calls=st.lists(CALLS, max_size=3).map(tuple), error=st.none() | TEXT)
MESSAGES = st.builds(Message, role=st.sampled_from(["user", "tool"]), content=TEXT, name=TEXT, call_id=TEXT)
OBSERVATIONS = st.builds(
    Observation,
    content=st.lists(MESSAGES, max_size=3).map(tuple), status=st.sampled_from(list(Status)),
    latency_ms=st.floats(0, 1e6), terminated=st.booleans(), truncated=st.booleans(),
    env_status=st.builds(EnvStatus, service=TEXT, retryable=st.booleans()), evidence_gain=st.none() | st.floats(0, 1),
)  # fmt: skip
TASK = Task(id="t", split="train", data={"goal": 5})


@given(OBSERVATIONS, ACTIONS, st.integers(1, 40))
def test_messages_come_through_whole_however_they_are_cut(observation, action, piece):
    verdict = Verdict(outcome=0.5, constraints=(Check(name="kept", passed=True),), diagnostics={"calls": 3})
    replies = [
        Answer(observation, 1.5, 2), Answer((observation, observation), 0.0), Answer(verdict, 2.0), Note("verify"),
        Note("step", observation), Ready(pid=7, spec=fake_suites.counter().spec, verifier_version="2"),
        Failure(kind="garbage", phase="step", message="m", replayed=(observation,), value=verdict),
    ]  # fmt: skip
    data, inbox, found = b"".join(map(encode_reply, replies)), Inbox(), []
    for start in range(0, len(data), piece):
        found += inbox.feed(data[start : start + piece])
    assert found == replies
    commands = [Perform(action), Reset(TASK, 3), Finish(), Finish(StopReason.TOKEN_CAP), Replay(TASK, 3, (action,))]
    assert Inbox(decode_command).feed(b"".join(map(encode_command, commands))) == commands
    assert observation_hash(found[0].value) == observation_hash(observation)


@pytest.mark.parametrize(
    "said",
    [
        Snapshot(data=b"", hash=""),  # any class at all
        ("observation", print, 0.0, 0),
        ("observation", ([("user", 7, "", "")], "ok", 0.0, "ok", False, False, False, None), 0.0, 0),
        ("observation", ([], "fine", 0.0, "ok", False, False, False, None), 0.0, 0),
        ("verdict", {"outcome": 2.0}, 0.0, 0),
        ("nothing", 1),
        (),
        "observation",
    ],
)
def test_what_is_no_plain_reply_is_refused(said):
    data = pickle.dumps(said)
    with pytest.raises(ValueError, match="Error: "):
        decode_reply(data)
    with pytest.raises(ValueError, match="Error: "):
        Inbox().feed(struct.pack("!I", len(data)) + data)


def test_two_observations_that_read_alike_when_joined_have_two_hashes():
    def say(*texts: str) -> Observation:
        return Observation(content=tuple(Message(role="tool", content=text) for text in texts))

    assert len({observation_hash(say(*texts)) for texts in (("ab",), ("a", "b"), ("ab", ""), ("4:tool1:b",))}) == 4


def test_a_receipt_of_another_format_names_the_version_that_wrote_it(renderer):
    receipt = play(fake_suites.counter(), renderer, TASK, [ToolCall(name="finish")], 0).receipt
    old = replace(receipt, format=1, trainer_version="0.0.9", ref=EnvironmentRef(target="fake_suites:counter"))
    with pytest.raises(UserError, match=r"format 1 \(agentrl-jax 0\.0\.9\)"):
        replay(old)
