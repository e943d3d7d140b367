"""The trajectory store: exact, append-only, and never read beyond its last commit, whatever kills the writer."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import uuid
from dataclasses import replace
from pathlib import Path

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import (
    Action,
    Attribution,
    Cause,
    Check,
    EnvironmentRef,
    EnvStatus,
    Message,
    Observation,
    Status,
    StopReason,
    Task,
    ToolCall,
    Verdict,
)
from agentrl_jax.rollout.records import Break, Ledger, Receipt, Step, Trajectory
from agentrl_jax.runtime import store as stores
from agentrl_jax.runtime.store import Store, Writer, committed

ROOT = Path(__file__).parents[2]
TEXT = st.text(max_size=12) | st.just("lone \udfff surrogate")
COUNT = st.integers(0, 10**6)
REAL = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | REAL | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
DATA = st.dictionaries(TEXT, JSON, max_size=2)
CALLS = st.lists(st.builds(ToolCall, name=TEXT, arguments=DATA), max_size=2).map(tuple)
ACTION = st.builds(Action, text=TEXT, calls=CALLS, error=st.none() | TEXT)
MESSAGES = st.lists(st.builds(Message, role=st.sampled_from(["user", "tool"]), content=TEXT), max_size=2).map(tuple)
OBSERVATION = st.builds(
    Observation, content=MESSAGES, status=st.sampled_from(Status), latency_ms=REAL, evidence_gain=st.none() | REAL,
    env_status=st.builds(EnvStatus, service=TEXT, retryable=st.booleans()), terminated=st.booleans(),
)  # fmt: skip
STEP = st.builds(
    Step, turn=COUNT, action=ACTION, observation=st.none() | OBSERVATION, observation_hash=TEXT, wall_ms=REAL
)
TASK = st.builds(Task, id=TEXT, split=TEXT, data=DATA)
VERDICT = st.builds(
    Verdict, constraints=st.lists(st.builds(Check, name=TEXT, passed=st.booleans()), max_size=2).map(tuple),
    outcome=st.none() | st.booleans() | st.floats(0, 1), quality=st.none() | st.floats(0, 1), diagnostics=DATA,
)  # fmt: skip
BLAME = st.none() | st.builds(Attribution, cause=st.sampled_from(Cause), evidence=TEXT)
RECEIPT = st.builds(
    Receipt, environment=TEXT, environment_version=TEXT, verifier_version=TEXT, tools=st.just(("look",)), task=TASK,
    ref=st.none() | st.builds(EnvironmentRef, target=TEXT, options=DATA), seed=COUNT, reset_hash=TEXT,
    steps=st.lists(STEP, max_size=2).map(tuple), ledger=st.builds(Ledger, wall_s=REAL),
    stop=st.sampled_from(StopReason), verdict=st.none() | VERDICT, attribution=BLAME, limits=st.none() | DATA,
)  # fmt: skip


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 6))

    def each(of: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(of, min_size=length, max_size=length)))

    return Trajectory(
        group=draw(COUNT), member=draw(COUNT), task=draw(TASK), seed=draw(COUNT),
        tokens=each(st.integers(0, 2**31 - 1)), sources=each(st.integers(0, 5)), action_mask=each(st.booleans()),
        behavior_logprobs=each(st.floats(allow_nan=False)), policy_versions=each(st.integers(-1, 2**31 - 1)),
        turn_ids=each(COUNT), prompt_length=draw(st.integers(0, length)), stop=draw(st.sampled_from(StopReason)),
        verdict=draw(st.none() | VERDICT), attribution=draw(BLAME), receipt=draw(RECEIPT),
        breaks=tuple(draw(st.lists(st.builds(Break, start=COUNT, prompt_length=COUNT, reason=TEXT), max_size=2))),
        retokenize_mismatch=draw(COUNT), kept=each(st.binary(max_size=5)) if draw(st.booleans()) else None,
        token_mismatch=draw(st.booleans()),
    )  # fmt: skip


def made(number: int, length: int = 5) -> Trajectory:
    """A trajectory that says its number in every column."""
    task = Task(id=f"t{number}", split="train")
    receipt = Receipt(
        environment="e", environment_version="1", verifier_version="1", tools=(), ref=None, task=task, seed=number,
        reset_hash="", steps=(), ledger=Ledger(), stop=StopReason.COMPLETED,
    )  # fmt: skip
    return Trajectory(
        group=number, member=0, task=task, seed=number, tokens=(number,) * length, sources=(3,) * length,
        action_mask=(True,) * length, behavior_logprobs=(-float(number),) * length, policy_versions=(number,) * length,
        turn_ids=(1,) * length, prompt_length=0, stop=StopReason.COMPLETED, verdict=Verdict(outcome=number % 2 == 0),
        attribution=None, receipt=receipt, kept=(bytes([number % 256]),) * length,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few trajectories fill several chunks."""
    monkeypatch.setattr(stores, "_CHUNK", dict.fromkeys(stores._CHUNK, 16))


@given(batches=st.lists(st.lists(trajectories(), max_size=3), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_trajectories_come_back_exactly(batches: list[list[Trajectory]]) -> None:
    place = f"memory://{uuid.uuid4().hex}"
    with Writer(place) as writer:
        for batch in batches:
            writer.append(batch)
        flat = [t for batch in batches for t in batch]
        if flat:
            store = Store(place)
            assert list(store) == flat
            assert [repr(t) for t in store] == [repr(t) for t in flat], "types and all: 1 is not True"
            assert store[-1] == flat[-1]


def test_grain_reads_it_in_any_order_and_in_another_process(place: str) -> None:
    with Writer(place) as writer:
        writer.append([made(n, length=n % 4) for n in range(20)])
    store = Store(place)
    read = list(grain.MapDataset.source(store).shuffle(seed=3).to_iter_dataset(grain.ReadOptions(num_threads=2)))
    assert sorted(t.seed for t in read) == list(range(20)) and [t.seed for t in read] != list(range(20))
    assert all(t == made(t.seed, length=t.seed % 4) for t in read)
    assert pickle.loads(pickle.dumps(store))[7] == store[7], "grain's worker processes take it by pickle"
    with pytest.raises(IndexError):
        store[20]


def test_columns_are_as_long_as_what_was_committed(place: str, small_chunks: None) -> None:
    with Writer(place) as writer:
        for step in (1, 2):
            writer.append([made(n) for n in range(6)], step=step)
    store = Store(place)
    tokens, ends, steps, success = (
        store.column(name).read().result() for name in ("tokens", "token_ends", "steps", "success")
    )
    np.testing.assert_array_equal(tokens, np.tile(np.repeat(np.arange(6), 5), 2))
    np.testing.assert_array_equal(ends, np.arange(5, 61, 5))
    np.testing.assert_array_equal(steps, np.repeat([1, 2], 6))
    np.testing.assert_array_equal(success, np.arange(12) % 2 == 0)


def test_a_reader_sees_what_was_committed_when_it_opened(place: str, small_chunks: None) -> None:
    writer = Writer(place)
    writer.append([made(0)])
    early = Store(place)
    for number in range(1, 9):
        writer.append([made(number)])
        assert [t.seed for t in Store(place)] == list(range(number + 1))
        assert list(early) == [made(0)] and len(early.column("tokens").read().result()) == 5
    assert list(Store(place).first(3)) == [made(n) for n in range(3)]


class Died(BaseException):
    pass


@pytest.mark.parametrize("survives", range(5))
def test_what_was_not_committed_is_never_read_and_is_written_over(
    place: str, small_chunks: None, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    """The process dies between the writes of an append: after the columns, before the commit."""
    writer = Writer(place)
    writer.append([made(n) for n in range(3)])

    def die(commit: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_commit", die)
        with pytest.raises(Died):
            writer.append([made(n) for n in range(90, 90 + survives + 1)])
    assert list(Store(place)) == [made(n) for n in range(3)]
    again = Writer(place)
    again.append([made(3)])
    assert list(Store(place)) == [made(n) for n in range(4)]


def test_it_goes_back_and_on(place: str, small_chunks: None) -> None:
    writer = Writer(place)
    writer.append([made(n) for n in range(8)])
    assert writer.truncate(3) == 5 and writer.truncate(3) == 0
    assert list(Store(place)) == [made(n) for n in range(3)]
    writer.append([made(n, length=3) for n in range(40, 44)])
    assert list(Store(place)) == [*(made(n) for n in range(3)), *(made(n, length=3) for n in range(40, 44))]
    with pytest.raises(UserError, match=r"has 7 trajectories, expected at least 9: was it replaced\?"):
        writer.truncate(9)
    assert writer.truncate(0) == 7 and not list(Store(place))


def test_the_latest_writer_has_the_store(place: str) -> None:
    first = Writer(place, {"run": "a"})
    first.append([made(0)])
    second = Writer(place)
    with pytest.raises(UserError, match="another writer opened this trajectory store"):
        first.append([made(1)])
    second.append([made(2)])
    assert list(Store(place)) == [made(0), made(2)] and Store(place).commit.about == {"run": "a"}


def test_a_writer_that_wrote_nothing_leaves_nothing(place: str) -> None:
    with Writer(place):
        assert len(Store(place)) == 0
    assert committed(place) is None and not [f for _, _, files in os.walk(place) for f in files]
    taken = Writer(place)
    with Writer(place) as other:
        taken.close()
        other.append([made(0)])
    assert list(Store(place)) == [made(0)]


WRITE = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from test_store import made
from agentrl_jax.runtime.store import Writer
writer = Writer(sys.argv[1])
while True:
    writer.append([made(len(writer) + n, length=40) for n in range(7)])
    print(len(writer), flush=True)
"""


def test_a_killed_writer_leaves_every_commit_and_a_reader_reads_on(place: str) -> None:
    """Killed at three moments; each next writer goes on, and a reader beside it sees only whole trajectories."""
    told = 0
    for kill_after in (1, 2, 3):
        command = [sys.executable, "-c", textwrap.dedent(WRITE), place, str(ROOT), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(kill_after):
                told = int(process.stdout.readline())
                store = Store(place)
                assert len(store) >= told and store[told - 1] == made(told - 1, length=40)
            process.send_signal(signal.SIGKILL)
            told = int((process.stdout.read().split() or [told])[-1])
        store = Store(place)
        assert len(store) in (told, told + 7), "committed and not yet said, at most"
        assert list(store) == [made(n, length=40) for n in range(len(store))]


def test_where_there_is_no_store_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trajectory store"):
        Store(str(tmp_path))
    with pytest.raises(UserError, match="cannot be used") as caught:
        Store("nowhere://x")
    assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        Writer(str(tmp_path / "file" / "store"))
    for text in (json.dumps({"format": 99}), "[]", "{"):
        (tmp_path / "commit.json").write_text(text)
        with pytest.raises(UserError, match=r"format|cannot be used"):
            Store(str(tmp_path))


def test_a_token_with_its_receipt_takes_few_bytes(place: str) -> None:
    """Of 200 episodes alike but for their ids and log-probabilities: the columns are compressed, chunk by chunk."""
    rng = np.random.default_rng(0)
    with Writer(place) as writer:
        logprobs = np.log(rng.random((200, 100), np.float32)).astype(float).tolist()
        tokens = rng.integers(0, 150_000, (200, 100)).tolist()
        writer.append([
            replace(made(n, 100), tokens=tuple(tokens[n]), behavior_logprobs=tuple(logprobs[n]), kept=None)
            for n in range(200)
        ])  # fmt: skip
    size = sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file())
    assert size < 9 * 200 * 100, "18 bits of an id and 32 of a log-probability are random here; the rest is little"
