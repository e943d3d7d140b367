"""The workflow's tenants in PostgreSQL: real servers, the SQLite back end beside them as the second route."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import agentrl_envs.workflow as workflow
import pytest
from agentrl_envs.conformance import case, check, hold, manners
from agentrl_envs.workflow import suite
from agentrl_envs.workflow.postgres import Tenant, keeper, server
from agentrl_envs.workflow.tenant import build

from agentrl_jax.cli import environments
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Action, EnvironmentRef, Status, ToolCall, fork, restored
from agentrl_jax.rollout.pool import Pool
from agentrl_jax.rollout.wire import Answer, Perform, Reset

DEFAULT = "4938f382cb7bd2849978133a64caec2b9ba96f67f360942bc389e09bbd4999c2"
REAL = "f8cc74cfabbbb160cc2b199d7d8d0cc586eb6b4908553e10f18acd751f94f33f"
LACKS = workflow.missing("postgres")
needs_postgres = pytest.mark.skipif(LACKS is not None, reason=LACKS or "")


def act(*calls):
    return Action(text="", calls=calls)


def digest(made, count):
    """Over tasks, observations and states of all scripts."""
    seen = hashlib.sha256()
    for split in ("train", "validation", "heldout"):
        for task in made.tasks(split, count, 3):
            for script in (made.solve(task), made.demonstrate(task, 0), *made.attacks(task).values()):
                environment = made.make()
                observations, hashes = [environment.reset(task, 0)], [environment.snapshot().hash]
                for turn in script:
                    calls = (turn,) if isinstance(turn, ToolCall) else ()
                    observations.append(environment.step(Action(text=str(turn), calls=calls)))
                    hashes.append(environment.snapshot().hash)
                environment.close()
                seen.update(repr((task, observations, hashes)).encode())
    return seen.hexdigest()


def test_the_default_back_end_gives_the_transcripts_it_gave_before_there_was_another():
    assert digest(suite(), 6) == DEFAULT
    assert digest(suite(handles="real", wording="free"), 6) == REAL


def test_what_is_lacking_is_named_with_its_command_and_only_where_it_is_asked_for(monkeypatch):
    assert workflow.missing() is None and workflow.missing("sqlite") is None
    with pytest.raises(ValueError, match="backend='mysql' is not known; expected one of sqlite, postgres"):
        suite(backend="mysql")
    server.missing.cache_clear()
    monkeypatch.setattr(server, "_binaries", lambda: None)
    try:
        with pytest.raises(RuntimeError, match="apt-get install postgresql"):
            suite(backend="postgres")
        with pytest.raises(UserError, match="apt-get install postgresql"):
            environments.load(environments.resolve("workflow", ["backend=postgres"]))
        environments.load(environments.resolve("workflow", ["backend=sqlite"]))
    finally:
        server.missing.cache_clear()


@pytest.fixture(scope="module")
def both():
    if LACKS:
        pytest.skip(LACKS)
    return suite(), suite(backend="postgres")


def verdicts(made, task, script):
    """(observations, state hashes, verdict)"""
    environment = made.make()
    try:
        seen = [environment.reset(task, 0)]
        initial, actions = environment.snapshot(), []
        for turn in script:
            actions.append(Action(text=str(turn), calls=(turn,) if isinstance(turn, ToolCall) else ()))
            seen.append(environment.step(actions[-1]))
        final = environment.snapshot()
    finally:
        environment.close()
    return seen, (initial.hash, final.hash), made.verify(task, initial, actions, final)


def same(count, **options):
    lite, real = suite(**options), suite(backend="postgres", **options)
    compared = 0
    for task in lite.tasks("train", count, 7):
        for script in (lite.solve(task), lite.demonstrate(task, 1), *lite.attacks(task).values()):
            assert verdicts(lite, task, script) == verdicts(real, task, script)
            compared += 1
    return compared


@needs_postgres
@pytest.mark.parametrize(
    "options", [{}, {"handles": "real", "wording": "free", "dry_run": True}], ids=["short", "real"]
)
def test_both_back_ends_give_the_same_observations_states_and_verdicts(options):
    assert same(2, **options) > 8


@needs_postgres
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"handles": "real", "wording": "free", "dry_run": True}], ids=["short", "real"]
)
def test_both_back_ends_agree_over_fifty_tasks(options):
    assert same(50, **options) > 300


def test_odd_values_name_nothing_on_either_back_end(both):
    for value in ("\0", "\ud800", "x" * 10_000, "%s", "'; DROP TABLE orders; --"):
        answers = []
        for backend in ("sqlite", "postgres"):
            made = suite(handles="real", backend=backend)
            environment = made.make()
            environment.reset(made.tasks("train", 1, 0)[0], 0)
            answers.append(environment.step(act(ToolCall(name="get_order", arguments={"order_id": value}))))
            environment.close()
        assert answers[0] == answers[1] and answers[0].status is Status.INVALID_ACTION
    for number in (2**31, 2**63, 2**200, -1):
        seen = [verdicts(made, made.tasks("train", 1, 0)[0], [ToolCall(name="order", arguments={"id": number})])
                for made in both]  # fmt: skip
        assert seen[0] == seen[1]


def databases():
    return server.server()._do("SELECT datname FROM pg_database WHERE datname LIKE 'tenant_%'").fetchall()


def test_a_fork_is_a_copy_within_the_server_and_apart_from_its_siblings(both, monkeypatch):
    _, made = both
    task = next(task for task in made.tasks("train", 20, 0) if task.data["goal"])
    environment = made.make()
    environment.reset(task, 0)
    first, *rest = made.solve(task)
    environment.step(act(first))
    snapshot = environment.snapshot()
    with monkeypatch.context() as patched:
        patched.setattr(Tenant, "fill", None)  # what is restored from bytes is filled
        copies = [restored(made, snapshot) for _ in range(2)]
    assert len(databases()) == 3
    before = [copy.snapshot().hash for copy in copies]
    for turn in rest:
        copies[0].step(act(turn))
    assert copies[1].snapshot().hash == before[1] == environment.snapshot().hash != copies[0].snapshot().hash
    late = restored(made, snapshot)  # nobody need be in that state any more
    assert late.snapshot() == snapshot
    for one in (environment, late, *copies):
        one.close()
        one.close()
    assert databases() == []


def test_a_snapshot_travels_to_the_other_back_end_and_back(both):
    lite, made = both
    task = made.tasks("train", 1, 4)[0]
    environment = made.make()
    environment.reset(task, 0)
    environment.step(act(made.solve(task)[0]))
    forked = fork(made, environment)
    there = restored(lite, forked.snapshot)
    back = restored(made, there.snapshot())
    for turn in made.solve(task)[1:]:
        assert there.step(act(turn)) == back.step(act(turn)) == environment.step(act(turn))
    for one in (environment, forked.environment, there, back):
        one.close()


@pytest.mark.slow
def test_every_property_of_the_list_holds(both):
    ref = EnvironmentRef(target="agentrl_envs.workflow:suite", options={"backend": "postgres"})
    assert [finding for finding in check(case(ref, 2, 0, 4)) if finding.result != "holds"] == []


def test_cancelled_and_closed_episodes_leave_no_database(both):
    _, made = both
    for held_to in (manners.close_is_safe, manners.nothing_is_left_behind):
        finding = hold(case(made, 1, 0, 1), held_to)
        assert finding.result == "holds", finding
    assert databases() == []


USER = """
import sys
from agentrl_envs.workflow import suite
from agentrl_envs.workflow.postgres.server import server
made = suite(backend="postgres")
environment = made.make()
environment.reset(made.tasks("train", 1, 0)[0], 0)
print(server().directory, environment._connection.name, flush=True)
sys.stdin.readline()
"""


def launched(label):
    paths = os.pathsep.join(filter(None, sys.path))
    environ = {**os.environ, server.LABEL: label, server.WORKER: "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", USER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


def started(label):
    process = launched(label)
    assert process.stdout is not None
    directory, name = process.stdout.readline().split()
    return process, Path(directory), name


def until(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_workers_of_a_run_share_a_server_that_ends_after_the_last_of_them_however_it_ends(both):
    label = f"test-{os.getpid()}"
    first, directory, name = started(label)
    second, shared, other = started(label)
    assert shared == directory == server.home(label) and name != other
    pid = int((directory / "data" / "postmaster.pid").read_text().split()[0])
    assert server.reap(label) == 0  # it is in use
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    third, _, _ = started(label)  # drops what the killed one had
    assert keeper.runs(directory) and Path(f"/proc/{pid}").exists()
    held = server._connect(directory, "postgres")
    left = {row[0] for row in held.execute("SELECT datname FROM pg_database WHERE datname LIKE 'tenant_%'").fetchall()}
    held.close()
    assert name not in left and other in left and len(left) == 2
    second.communicate("\n")
    os.kill(third.pid, signal.SIGKILL)
    third.communicate()
    until(lambda: not directory.exists())
    assert not Path(f"/proc/{pid}").exists()
    assert server.reap(label) == 0


@pytest.mark.slow
def test_a_starter_that_is_killed_meanwhile_leaves_a_server_that_others_join_or_nothing(both):
    label = f"test-{os.getpid()}-early"
    directory = server.home(label)
    early = launched(label)
    until((directory / "data").exists)
    early.kill()
    early.communicate()
    process, where, _ = started(label)
    assert where == directory and keeper.runs(directory)
    process.communicate("\n")
    until(lambda: not directory.exists())


def test_the_workers_of_a_pool_share_a_server_that_outlives_any_one_of_them(both):
    label = f"test-{os.getpid()}-pool"
    ref = EnvironmentRef(target="agentrl_envs.workflow:suite", options={"backend": "postgres"})
    task = ref.load().tasks("train", 1, 0)[0]
    directory = server.home(label)
    with Pool(ref, 2, label=label) as pool:
        workers = [pool.acquire(), pool.acquire()]
        for worker in workers:
            pool.submit(worker, Reset(task, 0))
        answers = []
        while len(answers) < 2:
            answers += [reply for _, reply in pool.poll(60)]
        assert all(isinstance(reply, Answer) for reply in answers), answers
        pid = int((directory / "data" / "postmaster.pid").read_text().split()[0])
        pool.submit(workers[0], Perform(act(*made_calls(ref, task))))
        pool.give_up(workers[0])  # its process is killed, with all that is known to be its own
        pool.submit(workers[1], Perform(act(*made_calls(ref, task))))
        ((_, reply),) = pool.poll(60)
        assert isinstance(reply, Answer) and reply.value.terminated and keeper.runs(directory)
    until(lambda: not directory.exists())
    assert not Path(f"/proc/{pid}").exists()


def made_calls(ref, task):
    return ref.load().solve(task)


@pytest.mark.slow
def test_what_a_killed_keeper_leaves_is_reaped_by_label(both):
    label = f"test-{os.getpid()}-kept"
    process, directory, _ = started(label)
    pid = int((directory / "data" / "postmaster.pid").read_text().split()[0])
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    process.communicate("\n")
    assert keeper.runs(directory)
    assert server.reap(label) == 1 and not directory.exists()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_lost_server_is_a_service_that_is_down_and_the_next_episode_gets_another(both):
    _, made = both
    task = made.tasks("train", 1, 0)[0]
    environment = made.make()
    environment.reset(task, 0)
    pid = int((server.server().directory / "data" / "postmaster.pid").read_text().split()[0])
    os.kill(pid, signal.SIGQUIT)
    until(lambda: not keeper.runs(server.server().directory))
    seen = environment.step(act(made.solve(task)[0]))
    assert seen.unavailable and seen.env_status.service == "postgres" and not seen.env_status.retryable
    environment.reset(task, 0)
    for turn in made.solve(task):
        seen = environment.step(act(turn))
    assert seen.terminated
    environment.close()


def test_the_verifier_sees_a_tenant_that_was_changed_behind_the_tools(both):
    _, made = both
    task = next(task for task in made.tasks("train", 20, 0) if task.data["goal"])
    environment = made.make()
    environment.reset(task, 0)
    initial, actions = environment.snapshot(), [act(turn) for turn in made.solve(task)]
    for action in actions:
        environment.step(action)
    assert made.verify(task, initial, actions, environment.snapshot()).success
    product = build(task.data["tenant"], "train", task.kind, "", "short").rows["products"][0]
    environment._connection.execute("UPDATE products SET price = ? WHERE id = ?", (product[2] + 1, product[0]))
    verdict = made.verify(task, initial, actions, environment.snapshot())
    assert verdict.violated and not verdict.success
    environment.close()
