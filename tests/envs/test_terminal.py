"""The terminal environment in real boxes: references reach the end state, attacks do not, a state is exact."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agentrl_envs import data, sandbox, terminal
from agentrl_envs.sets.nl2bash import NL2BASH
from agentrl_envs.terminal import episode, generated, machine, verifier
from agentrl_envs.terminal.machine import Machine
from agentrl_envs.terminal.tree import changes, file, from_json, with_parents

from agentrl_jax.protocol import Action, Status, ToolCall

LACKS = terminal.missing()
pytestmark = pytest.mark.skipif(LACKS is not None, reason=str(LACKS))
FINISH = ToolCall(name="finish")
HERE = data.locate(NL2BASH) is not None
NEEDS_DATA = pytest.mark.skipif(not HERE, reason="data set nl2bash is not here: set AGENTRL_DATA to its folder")


def run(command: str) -> ToolCall:
    return ToolCall(name="run", arguments={"command": command})


def act(*calls: ToolCall) -> Action:
    return Action(text="", calls=calls)


@pytest.fixture(scope="module")
def suite():
    return terminal.suite()


@pytest.fixture(scope="module")
def tasks(suite):
    return {task.kind: task for task in suite.tasks("train", len(generated.KINDS), 7)}


@pytest.fixture
def short(monkeypatch):
    """Commands that meet their time limit meet it soon; a shell takes a part of it to start."""
    monkeypatch.setattr(machine, "BOXES", replace(machine.BOXES, time_s=2.0))


@pytest.mark.parametrize("kind", generated.KINDS)
def test_the_reference_reaches_the_end_state_and_the_null_agent_does_not(suite, tasks, play, kind):
    if kind == "stop_service" and sandbox.chosen() == "landlock":
        pytest.skip("boxes have no /proc here: allow user namespaces")
    played = play(suite, tasks[kind], suite.solve(tasks[kind]))
    assert played.verdict.success and played.verdict.quality == 1.0, played.verdict
    assert play(suite, tasks[kind], [FINISH]).verdict.outcome is False
    assert play(suite, tasks[kind], suite.solve(tasks[kind])[:-1]).verdict.outcome is False  # it did not say so


def test_no_attack_succeeds(suite, tasks, play, short):
    task = tasks["count_files"]
    verdicts = {name: play(suite, task, script).verdict for name, script in suite.attacks(task).items()}
    assert [name for name, verdict in verdicts.items() if verdict.success or verdict.outcome is not False] == []


def test_what_is_changed_besides_the_task_is_no_success(suite, tasks, play):
    for kind, command in (("count_files", "echo 1 > extra.txt"), ("rename", "chmod 600 run.sh"), ("link", "rm run.sh")):
        task = tasks[kind]
        verdict = play(suite, task, [run(command), *suite.solve(task)]).verdict
        assert verdict.outcome is True and verdict.violated, kind
    stop = tasks["stop_service"]
    both = " ".join(f"pkill -9 -x {name};" for name in stop.data["services"])
    others = "for p in /proc/[0-9]*; do [ $p != /proc/$$ ] && [ $p != /proc/1 ] && kill -9 ${p#/proc/}; done"
    assert not play(suite, stop, [run(both), run(others), FINISH]).verdict.success


TREE = with_parents({"a/b.txt": file("hi\n"), "run.sh": file("#!/bin/sh\necho ready\n", 0o755)})


@pytest.fixture
def box():
    opened = Machine("auto", TREE, ("crawler", "mailer"))
    yield opened
    opened.close()


def test_between_commands_only_the_tree_and_the_services_are_kept(box):
    assert box.run("./run.sh; echo x > /tmp/x; cd a; export Y=1; sleep 1000 & echo z > new").stdout == b"ready\n"
    seen = box.run("ls /tmp; pwd; echo [$Y]; ls /proc/*/comm | wc -l; ls -l --time-style=+%s a/b.txt")
    assert seen.stdout.split(b"\n")[:2] == [b"/workspace", b"[]"] and b" 1700000000 " in seen.stdout
    assert box.run("grep -l sleep /proc/[0-9]*/comm").stdout == b""
    assert seen.services == ("crawler", "mailer") and "a/new" in seen.tree


def test_a_service_that_was_stopped_stays_so_and_a_time_limit_stops_none(box, monkeypatch):
    stop = 'for p in /proc/[0-9]*; do [ "$(head -c 7 $p/cmdline)" = crawler ] && kill -9 ${p#/proc/}; done'
    assert box.run(stop).services == ("mailer",)
    with monkeypatch.context() as soon:
        soon.setattr(machine, "BOXES", replace(machine.BOXES, time_s=2.0))
        late = box.run("echo half > half; while :; do :; done")
    assert (late.stopped, late.services, "half" in late.tree) == ("time", ("mailer",), True)
    assert box.run("head -qc 7 /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c mailer").stdout == b"1\n"


def test_a_program_that_prints_until_it_is_stopped_says_the_same_each_time(box, short):
    first, second = box.run("yes"), box.run("yes")
    assert first.stopped == "time" and first.stdout == second.stdout and first.stdout.strip(b"y\n") == b""


def test_a_workspace_that_is_too_large_or_too_deep_is_as_before(box):
    for command in ("head -c 2000000 /dev/zero > big", "for i in $(seq 150); do mkdir d && cd d || break; done"):
        ran = box.run(command)
        assert ran.stopped and not changes(TREE, ran.tree), command
    assert box.run("echo on").stdout == b"on\n"


def test_a_fork_is_exact_and_siblings_do_not_meet(suite, tasks):
    task = tasks["stop_service"]
    one, two, three = suite.make(), suite.make(), suite.make()
    one.reset(task, 0)
    one.step(act(run("echo 1 > one; mkdir -p d/e; ln -s one l; mkfifo p; chmod 711 d")))
    state = one.snapshot()
    two.restore(state)
    three.restore(state)
    assert two.snapshot() == state and len(state.data) < 20_000
    two.step(act(run("rm one; echo 2 > two")))
    look = run("find . -printf '%p %m %y %l\\n' | sort; cat one")
    answers = [environment.step(act(look)) for environment in (one, three)]
    assert answers[0] == answers[1] and "./d 711 d" in answers[0].content[0].content
    assert one.snapshot() == three.snapshot()
    assert "one" not in episode.load(two.snapshot()).tree
    for environment in (one, two, three):
        environment.close()
        environment.close()


def test_calls_are_answered_in_order_and_nothing_happens_after_the_end(suite, tasks):
    environment = suite.make()
    environment.reset(tasks["link"], 0)
    answer = environment.step(act(run("echo 1"), ToolCall(name="ls"), run("exit 3"), FINISH, run("echo 2")))
    texts = [message.content for message in answer.content]
    assert texts[0] == "1" and "no tool 'ls'" in texts[1] and texts[2:] == [
        "(exit code 3)", "finished", "error: the task is over",
    ]  # fmt: skip
    assert answer.terminated and answer.status is Status.INVALID_ACTION
    before = environment.snapshot()
    assert environment.step(act(run("rm -rf *"))).terminated and environment.snapshot() == before
    environment.close()


def test_a_box_that_breaks_is_an_error_of_the_environment_and_unscored(suite, tasks, play, monkeypatch):
    def broken(*arguments, **options):
        raise sandbox.SandboxError("no keeper")

    environment = suite.make()
    environment.reset(tasks["link"], 0)
    monkeypatch.setattr(sandbox, "open_sandbox", broken)
    answer = environment.step(act(run("ls")))
    assert (answer.status, answer.env_status.retryable) == (Status.ERROR, True)
    assert "keeper" not in answer.content[0].content
    monkeypatch.undo()
    assert environment.step(act(run("ls run.sh"))).content[0].content == "run.sh"
    environment.close()


def test_a_time_limit_is_a_timeout_of_the_policy(suite, tasks, short):
    environment = suite.make()
    environment.reset(tasks["link"], 0)
    answer = environment.step(act(run("echo begun; sleep 100")))
    assert answer.status is Status.TIMEOUT and answer.content[0].content.startswith("begun\n(stopped")
    assert environment.step(act(run("echo on"))).status is Status.OK
    environment.close()


@NEEDS_DATA
def test_nl2bash_asks_for_the_command_and_not_for_its_output(play):
    suite = terminal.suite(source="nl2bash")
    every = {task.id.partition("-")[2]: task for split, n in SPLITS.items() for task in suite.tasks(split, n, 0)}
    task = every["nl2bash-1-22"]  # count all the lines of all php files
    assert play(suite, task, suite.solve(task)).verdict.success
    other = run("cat $(find . -type f | grep '[.]php$') | grep -c ''")
    assert play(suite, task, [run("ls"), other, FINISH]).verdict.success
    known = run("printf '2\\n'")
    verdict = play(suite, task, [*suite.solve(task)[:-1], known, FINISH]).verdict
    assert verdict.outcome is False and "second tree" in verdict.diagnostics["first_failure"]
    writes = every["nl2bash-2-14"]  # remove all *.doc files
    assert play(suite, writes, [run("rm folder1/*.doc"), FINISH]).verdict.success is False  # there are deeper ones
    assert play(suite, writes, [run("find folder1 -name '*.doc' -delete"), FINISH]).verdict.success
    assert play(suite, writes, [run("rm -rf folder1"), FINISH]).verdict.violated


SPLITS = {"train": 53, "validation": 19, "heldout": 24}


@NEEDS_DATA
def test_a_gold_command_that_cannot_be_run_is_unscored(play, monkeypatch):
    suite = terminal.suite(source="nl2bash")
    (task,) = suite.tasks("train", 1, 0)
    played = play(suite, task, suite.solve(task))
    verifier.gold_ending.cache_clear()
    monkeypatch.setattr(verifier, "Machine", None)

    def broken(*arguments):
        raise sandbox.SandboxError("gone")

    monkeypatch.setattr(verifier, "play", broken)
    verdict = suite.verify(task, played.initial, played.actions, played.final)
    assert verdict.outcome is None and verdict.diagnostics["verifier_error"] == "gone"


@NEEDS_DATA
@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_nl2bash_task_is_solved_by_its_gold_command_in_the_same_way_again(play, split):
    suite = terminal.suite(source="nl2bash")
    for task in suite.tasks(split, SPLITS[split], 0):
        played = play(suite, task, suite.solve(task))
        assert played.verdict.success, (task.id, played.verdict)
        again = verifier.play("auto", from_json(task.data["tree"]), task.data["commands"])
        assert again.tree == episode.load(played.final).tree, task.id


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_the_references_of_130_generated_tasks_reach_their_end_states(suite, play, split):
    for task in suite.tasks(split, 130, 11):
        assert play(suite, task, suite.solve(task)).verdict.success, task.id


LEAVES = """
import sys
from agentrl_envs import terminal
from agentrl_jax.protocol import Action, ToolCall
suite = terminal.suite()
environment = suite.make()
environment.reset(suite.tasks("train", 1, 0)[0], 0)
phase = sys.argv[1]
first = "true" if phase == "between" else "exec -a %s sleep 1000" % sys.argv[2]
print("ready", flush=True)
environment.step(Action(text="", calls=(ToolCall(name="run", arguments={"command": first}),)))
print("stepped", flush=True)
sys.stdin.read()
"""


def alive(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            found.append(path.parent.name)
    return [pid for pid in found if pid != str(os.getpid())]


@pytest.mark.parametrize("phase", ["between", "during"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_worker_leaves_no_box(phase, number):
    """P48: live boxes are none after the process that opened them is gone, in whatever way and phase."""
    mark = f"left-{os.getpid()}-{phase}-{number}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    worker = subprocess.Popen(
        [sys.executable, "-c", LEAVES, phase, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        if phase == "between":
            assert worker.stdout.readline() == b"stepped\n"
        while phase == "during" and len(alive(mark)) < 2 and time.monotonic() < deadline:  # the worker, and the box's
            time.sleep(0.05)
        worker.send_signal(number)
        worker.communicate(timeout=60)
        while alive(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(mark) == [], shlex.join(alive(mark))
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.communicate()


def test_options_are_checked():
    with pytest.raises(ValueError, match="generated, nl2bash"):
        terminal.suite(source="intercode")
    for options, said in (({"max_calls": 1}, "needs 2"), ({"kinds": ["dance"]}, "rename"), ({"kinds": []}, "empty")):
        with pytest.raises(ValueError, match=said):
            terminal.suite(**options)
    with pytest.raises(ValueError, match="no effect"):
        terminal.suite(source="nl2bash", kinds=["link"])
    assert {task.kind for task in terminal.suite(kinds=["link", "archive"]).tasks("train", 4, 0)} == {"link", "archive"}
    assert from_json(terminal.suite().tasks("heldout", 1, 0)[0].data["tree"])


@pytest.mark.parametrize(
    "command", ["pwd; env | sort; ls -ln; pwd > where; env > seen", "ls nothing; echo $HOME > home"]
)
def test_without_namespaces_a_transcript_and_a_state_are_the_same_in_every_box(tasks, command):
    """What differs from box to box on the host - its directories, its uid, its mark - is in neither."""
    if why_not := sandbox.available()["landlock"]:
        pytest.skip(f"landlock: {why_not}")
    suite, task, seen = terminal.suite(backend="landlock"), tasks["count_files"], []
    for _ in range(2):
        world = suite.make()
        world.reset(task, 0)
        said = world.step(act(run(command))).content[0].content
        state = world.snapshot()
        world.restore(state)
        seen.append((said, state.hash, world.step(act(run("cat where seen home; ls -lnR"))).content[0].content))
        world.close()
    assert seen[0] == seen[1]
    text = " ".join((seen[0][0], seen[0][2]))
    assert "/tmp/local" in text and "/tmp/_" not in text and str(os.getpid()) not in text, text
