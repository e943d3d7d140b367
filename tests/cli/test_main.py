"""The command line: every bad input is one clear line and exit code 2, with nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl_jax.cli import main as command_line
from agentrl_jax.cli.main import main
from agentrl_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Runs in an empty directory, so that anything half-written would be seen."""
    monkeypatch.chdir(tmp_path)


def one_line(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("agentrl: error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["required", "agentrl --help"]),
        (["trian", QUICKSTART], ["'trian'", "train"]),
        (["train"], ["CONFIG", "agentrl train --help"]),
        (["train", QUICKSTART, "--nope"], ["'--nope'", "agentrl train --help"]),
        (["train", QUICKSTART, "--dry-run", "--resume"], ["--dry-run and --resume"]),
        (["train", QUICKSTART, "--coordinator", "host:1", "--process", "0"], ["go together"]),
        (
            ["train", QUICKSTART, "--coordinator", "host:1", "--processes", "2", "--process", "2"],
            ["--process 2", "from 0 to 1"],
        ),
        (["train", "nowhere.py"], ["nowhere.py", "no such config file"]),
        (["train", QUICKSTART, "loop.stepz=3"], ["'loop.stepz'", "did you mean loop.steps?"]),
        (["train", QUICKSTART, "loop.steps=many"], ["loop.steps=many", "expected int"]),
        (["train", QUICKSTART, "loop.steps=2", "loop.steps=3"], ["loop.steps", "twice"]),
        (["train", QUICKSTART, "loop.group=1"], ["loop.group=1"]),
        (["train", QUICKSTART, "rollout.slots=63"], ["rollout.slots=63"]),
        (["train", QUICKSTART, "name=a/b"], ["name=a/b", "without '/'"]),
        (["train", QUICKSTART, "--resume"], ["nothing to resume", "leave out --resume"]),
        (["config", QUICKSTART, "environment.target=no.such:thing"], ["'no.such:thing'", "ModuleNotFoundError"]),
        (["config", QUICKSTART, "environment.options.handles=odd"], ["handles", "odd"]),
        (["report", "nowhere"], ["nowhere", "no such run directory"]),
        (["report", "."], ["holds no run"]),
        (["report", ".", "extra"], ["'extra'", "agentrl report --help"]),
        (["eval", "."], ["holds no run"]),
        (["replay", "nowhere.jsonl:3"], ["nowhere.jsonl", "no such receipt"]),
        (["models", "pull", "odd-model"], ["'odd-model'", "smollm2-135m"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys, tmp_path):
    assert main(argv) == 2
    line = one_line(capsys)
    for word in words:
        assert word in line
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_raises_names_its_line(capsys, tmp_path):
    Path("bad.py").write_text("def config():\n    raise RuntimeError('no data here')\n")
    assert main(["train", "bad.py"]) == 2
    assert "bad.py:2: RuntimeError: no data here" in one_line(capsys)


def test_an_unwritable_run_directory_is_named(capsys, tmp_path):
    Path("file").write_text("in the way")
    assert main(["train", QUICKSTART, "runs=file"]) == 2
    line = one_line(capsys)
    assert "file/quickstart" in line and "runs=DIR" in line
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_run_directory_that_holds_a_run_is_not_overwritten(capsys, tmp_path):
    Path("runs/quickstart").mkdir(parents=True)
    Path("runs/quickstart/config.json").write_text("{}")
    assert main(["train", QUICKSTART]) == 2
    assert "--resume" in one_line(capsys)
    assert Path("runs/quickstart/config.json").read_text() == "{}"


def test_config_prints_json_with_the_overrides_applied(capsys):
    assert main(["config", QUICKSTART, "loop.steps=3", "name=trial"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loop"]["steps"] == 3 and found["name"] == "trial"
    assert "ppo_clip" in json.dumps(found["loop"]["objective"])


def test_dry_run_prints_what_a_run_would_cost_and_writes_nothing(capsys, tmp_path):
    assert main(["train", QUICKSTART, "--dry-run", "loop.steps=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["loop"]["steps"] == 3 and found["run_dir"] == "runs/quickstart"
    assert found["parameters"] > 0 and found["token_budget"] and found["estimated_memory_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_overrides_may_stand_before_and_after_options(monkeypatch):
    seen = []
    monkeypatch.setattr(command_line, "_train", lambda arguments: seen.append(arguments) or 0)
    assert main(["train", "loop.steps=1", "--resume", "name=x"]) == 0  # the first word is the config, whatever it is
    assert main(["train", "c.py", "loop.steps=1", "--resume", "name=x"]) == 0
    assert seen[1].config == "c.py" and seen[1].overrides == ["loop.steps=1", "name=x"] and seen[1].resume


def test_ctrl_c_says_how_to_continue(monkeypatch, capsys, tmp_path):
    def interrupted(arguments):
        command_line._begun.append(tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_begun", [])
    monkeypatch.setattr(command_line, "_train", interrupted)
    assert main(["train", "c.py", "loop.steps=1"]) == 130
    assert capsys.readouterr().err == "agentrl: stopped\n", "nothing was begun that could be continued"
    (tmp_path / "config.json").touch()
    assert main(["train", "c.py", "loop.steps=1"]) == 130
    assert "agentrl train c.py loop.steps=1 --resume" in capsys.readouterr().err


def test_report_prints_the_page_it_wrote(capsys):
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"stage":"rl","step":1,"reward":0.5}\n')
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().out == "run/report.html\n" and Path("run/report.html").is_file()


@pytest.mark.parametrize(
    ("divergence", "code", "word"), [(None, 0, "reproduced: 2 steps"), ("step 1", 1, "diverged: step 1")]
)
def test_replay_says_whether_it_diverges(monkeypatch, capsys, divergence, code, word):
    receipt = SimpleNamespace(ref="an environment", steps=(1, 2), replay_id="abc")
    monkeypatch.setattr("agentrl_jax.cli.receipts.read_receipt", lambda given: receipt)
    monkeypatch.setattr("agentrl_jax.rollout.replay.replay", lambda receipt, ref: divergence)
    assert main(["replay", "receipts.jsonl:1"]) == code
    assert word in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("r.jsonl", ["holds 2 receipts", "r.jsonl:1"]),
        ("r.jsonl:9", ["r.jsonl:9", "between 1 and 2"]),
        ("r.jsonl:0", ["r.jsonl:0", "between 1 and 2"]),
        ("r.jsonl:1", ["r.jsonl:1: not a receipt"]),
        ("r.jsonl:2", ["r.jsonl:2: not a receipt"]),
    ],
)
def test_a_bad_receipt_is_named_with_its_line(given, words, capsys):
    Path("r.jsonl").write_text('{"environment":"x"}\nbroken\n')
    assert main(["replay", given]) == 2
    line = one_line(capsys)
    for word in words:
        assert word in line


def test_any_user_error_of_a_recipe_ends_in_exit_code_2(monkeypatch, capsys):
    def refuse(arguments):
        raise UserError("the gradient is not finite at step 3")

    monkeypatch.setattr(command_line, "_report", refuse)
    assert main(["report", "x"]) == 2
    assert "step 3" in one_line(capsys)


def test_a_real_process_exits_with_2_and_one_line():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "envs")])}
    command = [sys.executable, "-m", "agentrl_jax.cli.main", "train", "nowhere.py"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.count("\n") == 1 and "nowhere.py" in found.stderr
