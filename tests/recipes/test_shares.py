"""What each of several processes does of a step: the parts together are what one process would have done."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_suites
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Attribution, Cause, ToolCall, Verdict
from agentrl_jax.recipes import shares
from agentrl_jax.recipes.config import Loop
from agentrl_jax.recipes.evaluate import measure
from agentrl_jax.recipes.rl import carried, make_credit, plan_step, read_outcomes
from agentrl_jax.rl.algorithms import dapo
from agentrl_jax.rl.rewards import lexicographic
from agentrl_jax.rollout.collect import play
from agentrl_jax.rollout.packing import pack, used_rows
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime.hosts import Hosts
from tests.recipes.tori import torus

ADD, FINISH = ToolCall(name="add", arguments={"n": 3}), ToolCall(name="finish")
LOOP = Loop(tasks=4, group=2, objective=dapo(), reward=lexicographic, width=64)


@pytest.fixture(scope="module")
def groups() -> list[list[Trajectory]]:
    renderer = ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)
    suite = fake_suites.counter()
    tasks = suite.tasks("train", 4, 0)

    def played(group: int, member: int) -> Trajectory:
        found = play(suite, renderer, tasks[group], [ADD] * (1 + (group + member) % 3) + [FINISH], 0, member=member)
        return replace(found, group=group, verdict=Verdict(outcome=bool((group + member) % 2), quality=0.1 * group))

    found = [[played(group, member) for member in range(2)] for group in range(4)]
    blamed = Attribution(cause=Cause.ENVIRONMENT, evidence="the worker died")
    found[2][1] = replace(found[2][1], attribution=blamed)
    return found


def process(index: int, count: int, exchange: Any = None) -> Any:
    hosts = Hosts()
    hosts.index, hosts.count = index, count
    if exchange is not None:
        hosts.exchange = hosts.gather = exchange  # type: ignore[method-assign]
    return hosts


def parts_of(groups: list[list[Trajectory]], count: int) -> list[list[list[Trajectory]]]:
    """The groups of a step as each of so many processes sees them: its own, and outlines of the others'."""
    everyones = [
        [shares.outline(t).to_json() for p in process(k, count).share(len(groups)) for t in groups[p]]
        for k in range(count)
    ]
    return [
        shares.groups_together(
            process(k, count, lambda _: everyones), [groups[p] for p in process(k, count).share(len(groups))]
        )
        for k in range(count)
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_of_a_step_have_the_credit_of_the_whole(groups: list[list[Trajectory]], count: int) -> None:
    settings: Any = {"rows": 8, "width": 64, "group_size": 2, "pad_id": 0}
    whole = pack(groups, **settings)
    outcomes = read_outcomes(groups, LOOP)
    credit = make_credit(LOOP)
    expected, rewards, advantages, _ = credit(jax.tree.map(jnp.asarray, whole), outcomes)

    stretches = []
    for k, seen in enumerate(parts_of(groups, count)):
        for name, value in read_outcomes(seen, LOOP)._asdict().items():
            np.testing.assert_array_equal(value, getattr(outcomes, name), err_msg=name)
        mine = process(k, count).share(4)
        part = pack(seen[mine.start : mine.stop], **settings | {"rows": 8 // count})
        stretches.append(shares.renumbered(part, mine, 2, 4))
    batch = jax.tree.map(lambda *fields: jnp.concatenate(fields), *stretches)
    found, *same, _ = credit(batch, outcomes)
    np.testing.assert_array_equal(same, [rewards, advantages])
    assert sum(carried(part, outcomes) for part in stretches) == carried(whole, outcomes)

    def by_trajectory(batch: Any) -> dict[int, list[tuple[float, ...]]]:
        fields = [np.asarray(batch._asdict()[name]) for name in ("tokens", "weights", "advantages", "positions")]
        ids, mask = np.asarray(batch.trajectory_ids), np.asarray(batch.action_mask)
        return {n: list(zip(*(f[mask & (ids == n)].tolist() for f in fields), strict=True)) for n in range(8)}

    assert by_trajectory(found) == by_trajectory(expected)


def test_an_outline_measures_as_the_trajectory_and_bears_no_token(groups: list[list[Trajectory]]) -> None:
    flat = [t for group in groups for t in group]
    outlines = [Trajectory.from_json(shares.outline(t).to_json()) for t in flat]
    assert measure(outlines) == measure(flat)
    assert all(not t.tokens and not t.receipt.steps and not t.task.data for t in outlines)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_plans_of_all_processes_are_the_plan_of_the_step(count: int) -> None:
    tasks = fake_suites.counter().tasks("train", 4, 0)
    whole = plan_step(0, 3, LOOP, tasks)
    assert [plan for k in range(count) for plan in shares.own(process(k, count), whole)] == whole


def test_micro_batches_skip_the_rows_that_nobody_filled() -> None:
    assert shares.micro_batches([5], [np.arange(16)], 4) == [0, 4]
    halves = [np.arange(8), np.arange(8, 16)]
    assert shares.micro_batches([5, 1], halves, 4) == [0, 4, 8]
    assert shares.micro_batches([1, 3], halves, 8) == [0, 8]
    assert shares.micro_batches([0, 0], halves, 4) == [0]
    in_turn = [np.asarray([0, 1, 4, 5, 8, 9]), np.asarray([2, 3, 6, 7, 10, 11])]
    assert shares.micro_batches([2, 0], in_turn, 2) == [0]
    assert shares.micro_batches([2, 3], in_turn, 2) == [0, 2, 6]


def test_each_process_brings_the_rows_that_lie_on_its_devices(
    groups: list[list[Trajectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a torus of 4 x 4 chips the rows of a host of 2 x 2 are not one stretch."""
    devices = sharding.arranged((4, 4, 1, 1), torus(4, 4))
    rows: Any = SimpleNamespace(mesh=SimpleNamespace(devices=devices), is_fully_addressable=False)
    mine = shares.dealt(rows, 32)
    assert sorted(np.concatenate(mine).tolist()) == list(range(32))
    assert [len(part) for part in mine] == [8] * 4 and mine[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    host = pack(groups, rows=8, width=64, group_size=2, pad_id=0)
    host = host._replace(turn_ids=np.arange(8 * 64, dtype=np.int32).reshape(8, 64))

    def put(shape: tuple[int, ...], _: Any, part: Any) -> np.ndarray:
        starts = mine[jax.process_index()][::2].tolist()
        assert shape[0] == 32
        return np.concatenate([part((slice(start, start + 2),)) for start in starts])

    monkeypatch.setattr(shares.sharding, "put_shards", put)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    for k in range(4):
        monkeypatch.setattr(jax, "process_index", lambda k=k: k)
        np.testing.assert_array_equal(shares.global_batch(host, rows).turn_ids, host.turn_ids)


def test_a_batch_of_stretches_is_spread_by_rows(groups: list[list[Trajectory]]) -> None:
    host = pack(groups, rows=8, width=64, group_size=2, pad_id=0)
    spread = shares.global_batch(host, sharding.rows(sharding.make_mesh()))
    np.testing.assert_array_equal(spread.tokens, host.tokens)
    assert used_rows(host) <= 8 and len(spread.tokens.sharding.device_set) == 8


def test_a_record_of_two_processes_speaks_of_both() -> None:
    recorded = [{"buffer": {"group_size": 2, "counts": {"added": 3 + k}}, "stored": 3 + k, "step": 7} for k in range(2)]
    record = shares.position(process(0, 2, lambda _: recorded), recorded[0])
    assert record["stored"] == [3, 4] and record["step"] == 7 and record["buffer"]["counts"]["added"] == 7
    assert [shares.stored_of(record["stored"], k) for k in range(3)] == [3, 4, 0]
    left = shares.left_of(record["stored"], 1)  # one goes on, then two again: the second's store is still there
    again = shares.position(process(0, 1), {**recorded[0], "stored": 6}, left)["stored"]
    assert [shares.stored_of(again, k) for k in range(3)] == [6, 4, 0] and shares.left_of(again, 2) == []
    assert shares.left_of(5, 1) == shares.left_of(None, 1) == []
    assert shares.stored_of(5, 0) == 5 and shares.stored_of(None, 0) == 0


def test_stores_of_processes_do_not_meet() -> None:
    assert shares.store_of("trajectories", 0) == "trajectories"
    assert shares.store_of("trajectories", 2) == "hosts/2/trajectories"
    assert shares.store_of("gs://bucket/run/", 2) == "gs://bucket/run/hosts/2"
    assert shares.store_of({"driver": "file", "path": "/x/"}, 1) == {"driver": "file", "path": "/x/hosts/1"}


def test_what_processes_cannot_share_is_refused() -> None:
    run: Any = SimpleNamespace(external=SimpleNamespace(url=None), loop=SimpleNamespace(tasks=6))
    shares.check_hosts(run, process(0, 3))
    with pytest.raises(UserError, match=r"loop.tasks=6 must be a multiple of the 4 processes.* set it to 8"):
        shares.check_hosts(run, process(0, 4))
    run.external.url = "http://x"
    with pytest.raises(UserError, match=r"external\.url with 2 processes"):
        shares.check_hosts(run, process(0, 2))
    shares.check_rows(Mesh(np.asarray(jax.devices()).reshape(1, 1, 8, 1), sharding.AXES))
