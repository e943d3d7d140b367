"""`agentrl env`: through the real command line, in a process of its own, from a pipe and from a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl_jax.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SUITES = ROOT / "tests" / "envs"
COMMAND = [sys.executable, "-m", "agentrl_jax.cli.main", "env"]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "envs")])


def run(*words: str, said: str = "", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PATHS}
    return subprocess.run(
        [*COMMAND, *words],
        input=said,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=120,
        check=False,
    )


def test_list_names_what_there_is_with_its_options_and_loads_no_data():
    done = run("list")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    (index,) = [number for number, line in enumerate(lines) if line.startswith("workflow ")]
    assert "tenant" in lines[index] and "handles=short" in lines[index + 1]
    assert any(line.startswith("retail ") for line in lines)


def test_check_prints_every_property_and_exits_0_where_all_hold():
    done = run("check", "workflow", "handles=real", "--tasks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok       reference_scores_full          2 tasks" in done.stdout
    assert done.stdout.splitlines()[-1] == "workflow 1: 21 hold, 0 broken, 0 skipped"


def test_check_of_your_own_environment_names_what_is_broken_and_exits_1():
    """From the folder that the module lies in, as a user would."""
    done = run("check", "broken_suites:vault", "fault=attackers_fail", "--only", "attackers_fail", cwd=SUITES)
    assert done.returncode == 1 and done.stderr == ""
    assert "BROKEN   attackers_fail" in done.stdout and "every number from 0 to 999" in done.stdout
    assert "expected: No script that tries to be scored" in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["env"], ["ACTION"]),
        (["env", "check"], ["NAME"]),
        (["env", "check", "worflow"], ["'worflow'", "did you mean workflow?"]),
        (["env", "play", "nothing_like_it"], ["there are", "workflow", "package.module:function"]),
        (["env", "check", "workflow", "handles"], ["'handles'", "name=value"]),
        (["env", "check", "workflow", "handle=real"], ["no such option", "handles=short"]),
        (["env", "check", "workflow", "handles=odd"], ["ValueError", "short, real"]),
        (["env", "check", "workflow", "--tasks", "0"], ["--tasks 0"]),
        (["env", "check", "workflow", "--only", "beauty"], ["--only beauty", "attackers_fail"]),
        (["env", "check", "no.such:thing"], ["'no.such:thing'", "ModuleNotFoundError"]),
        (["env", "play", "workflow", "--split", "test"], ["--split test", "heldout"]),
        (["env", "list", "workflow"], ["'workflow'"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


def test_what_the_machine_lacks_is_said(tmp_path):
    package = tmp_path / "far_away.py"
    package.write_text(
        "def missing():\n    return 'the moon is not installed: fetch it'\n\n\ndef suite():\n    1 / 0\n"
    )
    done = run("check", "far_away:suite", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == "agentrl: error: the moon is not installed: fetch it\n"


def test_a_person_plays_from_a_pipe_and_the_end_of_the_input_brings_the_verdict():
    done = run("play", "broken_suites:vault", "--task", "1", said=":tools\nlook box=3\n\nlook\nhm\n", cwd=SUITES)
    assert done.returncode == 0 and done.stderr == ""
    text = done.stdout
    assert "user: what lies in box 3 of 3 ?" in text and 'look: {"type": "object"' in text
    assert "tool: look 1: 424" in text and "[left: 15 steps, 15 calls, 4 writes, 4 retries]" in text
    assert text.count("[invalid_action]") == 2
    assert "stopped: early_stop\nverdict: no success (outcome False)\n  unfinished: early_stop" in text


def test_calls_may_be_json_several_in_one_turn_and_the_task_ends_it():
    calls = '[{"name": "look", "arguments": {"box": 3}}, {"name": "finish", "arguments": {"answer": "424"}}]'
    said = f"{{broken\n{calls}\nlook box=1\n"
    done = run("play", "broken_suites:vault", "--task", "1", said=said, cwd=SUITES)
    assert "tool: look 1: 424\ntool: thank you\n" in done.stdout
    assert done.stdout.rstrip().endswith("stopped: completed\nverdict: success (outcome True)")


def test_budgets_hold_for_a_person_too():
    done = run("play", "broken_suites:vault", said="look box=0\n" * 25, cwd=SUITES)
    assert "denied: budget tool_calls: the last 1 are kept for finish" in done.stdout
    assert "stopped: budget" in done.stdout and "verdict: no success" in done.stdout


def test_an_environment_that_breaks_is_said_and_exit_code_1():
    said = '{"name": "look", "arguments": {}}\n'
    done = run("play", "fake_suites:counter", said="break how=raise\n", cwd=ROOT / "tests" / "rollout")
    assert done.returncode == 1 and "the environment broke: ValueError: the database is locked" in done.stdout
    done = run("play", "broken_suites:vault", said=said, cwd=SUITES)
    assert done.returncode == 0 and "[invalid_action]" in done.stdout


# What starts the tests may ignore SIGINT, as a shell does for what it runs in the background; children inherit that.
LISTENING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from agentrl_jax.cli.main import main
sys.exit(main())
"""


class Terminal:
    """A pseudo-terminal with `agentrl env play` in it."""

    def __init__(self, *words: str, cwd: Path) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": PATHS, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LISTENING, "env", "play", *words], stdin=slave, stdout=slave, stderr=slave, cwd=cwd,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def until(self, words: str) -> str:
        limit = time.monotonic() + 60
        while words not in self.text:
            if time.monotonic() > limit:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{words!r} never came: {self.text}")
            if select.select([self.master], [], [], 1.0)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode().replace("\r\n", "\n")
                except OSError:
                    assert words in self.text, self.text
        found, _, self.text = self.text.partition(words)
        return found

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> int:
        code = self.process.wait(timeout=60)
        os.close(self.master)
        return code


def test_in_a_terminal_a_person_is_asked_and_may_end_the_input():
    terminal = Terminal("broken_suites:vault", cwd=SUITES)
    terminal.until("what lies in box 0 of 0 ?")
    terminal.until("> ")
    terminal.write("look box=0\n")
    terminal.until("tool: look 1: 400")
    terminal.until("> ")
    terminal.write("\x04")
    terminal.until("verdict: no success")
    assert terminal.close() == 0


def test_ctrl_c_in_a_terminal_leaves_one_line():
    terminal = Terminal("broken_suites:vault", cwd=SUITES)
    terminal.until("> ")
    # Once: a second one, while the interpreter of a busy machine still closes, would kill it. CPython's input() keeps a
    # signal that comes between its prompt and its read until the next line, which is therefore given.
    os.kill(terminal.process.pid, signal.SIGINT)
    with contextlib.suppress(OSError):  # it is gone already
        terminal.write("\n")
    terminal.until("agentrl: stopped")
    assert terminal.close() == 130 and "Traceback" not in terminal.text


def test_a_reader_that_has_enough_is_no_error():
    environment = {**os.environ, "PYTHONPATH": PATHS}
    with subprocess.Popen(
        [*COMMAND, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert said == "" and process.returncode == 128 + signal.SIGPIPE


def test_the_command_line_loads_no_jax_for_environments():
    program = (
        "import sys; from agentrl_jax.cli.main import main; main(['env', 'check', 'workflow', '--tasks', '1']);"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PATHS},
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
