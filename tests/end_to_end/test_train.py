"""The whole loop through the command line: it finishes, it leaves what it promises, and it resumes bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from agentrl_jax.runtime.store import Store
from tests.strictly import STRICT

CONFIG = Path(__file__).with_name("small_config.py")
ROOT = Path(__file__).parents[2]
LIMIT_S = 240
# A process that may die while it writes a compiled program into the session's folder leaves none there.
READ_ONLY = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000000"}
# Another compiles everything itself, as on another machine: the same bits must not hang on what was compiled before.
ALONE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
KEEPING = "store=trajectories"
# A test suite in the background ignores SIGINT, and so would its children.
LISTENING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from agentrl_jax.cli.main import main
sys.exit(main())
"""


def agentrl(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    paths = [str(ROOT), str(ROOT / "envs"), str(CONFIG.parent)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), XLA_FLAGS="") | more
    command = [*STRICT, "-c", LISTENING, *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err[-4000:]
    return out


def wait_for_rows(process: subprocess.Popen[str], metrics: Path, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= count):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)


def rows(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def parameters(directory: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, read without a template."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(directory / "checkpoints") as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a template the placement comes from the checkpoint, as is meant here
        newest = manager.latest_step()
        state = manager.restore(newest, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))["state"]
    leaves = jax.tree_util.tree_leaves_with_path(state["params"])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


KEPT = ("step", "group", "member", "task", "tokens", "behavior_logprobs", "policy_versions", "stop", "verdict")


def kept(directory: Path) -> list[tuple]:
    """The trajectories in the run's store, less what a clock has measured."""
    store = Store(str(directory / "trajectories"))
    steps = store.column("steps").read().result().tolist()
    return [(step, *(getattr(t, name) for name in KEPT[1:])) for step, t in zip(steps, store, strict=True)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from start to end in one go."""
    home = tmp_path_factory.mktemp("straight")
    finish(agentrl("train", str(CONFIG), KEEPING, "checkpoints.best=1", cwd=home))
    return home / "runs" / "small"


def test_a_run_leaves_its_summary_and_report(straight: Path) -> None:
    summary = json.loads((straight / "summary.json").read_text())
    wanted = {"success_before", "success_after_sft", "success_after_rl", "violation_rate", "mean_tool_calls"}
    assert wanted | {"trained_tokens", "wall_seconds", "seed", "versions"} <= set(summary)
    assert summary["trained_tokens"] > 0 and summary["optimizer_steps"] == 10
    page = (straight / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "http://" not in page.replace("http://www.w3.org/", "")


def test_the_sampler_and_the_learner_agree(straight: Path) -> None:
    deviations = [row["ratio_deviation_max"] for row in rows(straight, "metrics.jsonl") if row["stage"] == "rl"]
    assert len(deviations) == 4 and max(deviations) < 1e-5


def test_the_sampler_and_the_learner_agree_where_the_sampler_cuts(tmp_path: Path) -> None:
    finish(agentrl("train", str(CONFIG.with_name("cut_config.py")), cwd=tmp_path))
    found = rows(tmp_path / "runs" / "cut", "metrics.jsonl")
    assert len(found) == 2 and max(row["ratio_deviation_max"] for row in found) < 1e-5
    assert found[0]["kl"] < 1e-6, "the reference's log-probabilities are over the same sets"


def test_every_step_and_every_evaluation_is_written_once(straight: Path) -> None:
    assert [row["at"] for row in rows(straight, "metrics.jsonl")] == list(range(1, 11))
    stages = [(row["stage"], row.get("final", False)) for row in rows(straight, "evaluations.jsonl")]
    assert stages == [("before", True), ("sft", True), ("rl", False), ("rl", True)]
    kept_numbers = {int(path.name) for path in (straight / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept_numbers == {8, 9, 10}, "the newest two, and the one that was evaluated"


def test_every_trajectory_that_was_trained_on_is_kept_once(straight: Path) -> None:
    found = kept(straight)
    groups = [(step, group, member) for step, group, member, *_ in found]
    numbered = [(7 + group // 2, group) for group in range(8)]
    assert groups == [(step, group, member) for step, group in numbered for member in range(4)]
    assert all(versions == {step - 5} for step, versions in ((step, set(v) - {-1}) for step, *_, v, _, _ in found))


@pytest.mark.parametrize(
    ("stop", "after", "every"),
    [(signal.SIGKILL, 3, 1), (signal.SIGKILL, 8, 1), (signal.SIGINT, 7, 1), (signal.SIGTERM, 8, 4)],
)
def test_p57_a_stopped_run_resumes_to_the_same_parameters(
    straight: Path, tmp_path: Path, stop: signal.Signals, after: int, every: int
) -> None:
    command = ("train", str(CONFIG), KEEPING, f"checkpoints.every={every}")
    process = agentrl(*command, cwd=tmp_path, **READ_ONLY)
    directory = tmp_path / "runs" / "small"
    wait_for_rows(process, directory / "metrics.jsonl", after)
    process.send_signal(stop)
    _, err = process.communicate(timeout=LIMIT_S)
    if stop == signal.SIGKILL:
        assert process.returncode == -stop, err
    else:
        assert process.returncode == 128 + stop, err
        assert "--resume" in err and len(err.splitlines()) == 1
        newest = max(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())
        assert newest >= after, "no step that was recorded is lost"

    finish(agentrl(*command, "--resume", cwd=tmp_path, **(ALONE if after == 3 else {})))
    before, after_resume = parameters(straight), parameters(directory)
    assert before.keys() == after_resume.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after_resume[name], value, err_msg=name)
    assert kept(directory) == kept(straight), "no trajectory is lost or doubled"
    volatile = {"wall_s", "tokens_per_s", "decode_s", "prefill_s", "decode_dispatches", "prefill_dispatches"}
    volatile |= {"waited_s", "learner_idle"}
    if stop != signal.SIGKILL:  # what was sampled before the stop is not sampled again
        volatile |= {"sampled", "prefilled", "copied"}
    for one, other in zip(rows(straight, "metrics.jsonl"), rows(directory, "metrics.jsonl"), strict=True):
        assert {k: v for k, v in one.items() if k not in volatile} == {
            k: v for k, v in other.items() if k not in volatile
        }


@pytest.mark.slow
def test_p57_with_rollouts_ahead_a_killed_run_trains_its_plan_exactly(tmp_path: Path) -> None:
    """Which params sample which token is a matter of time then, so the bits differ; the episodes do not."""
    command = ("train", str(CONFIG.with_name("ahead_config.py")), KEEPING)
    process = agentrl(*command, cwd=tmp_path, **READ_ONLY)
    directory = tmp_path / "runs" / "ahead"
    wait_for_rows(process, directory / "metrics.jsonl", 3)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    finish(agentrl(*command, "--resume", cwd=tmp_path))
    found = [(step, group, member) for step, group, member, *_ in kept(directory)]
    assert found == [(1 + group // 2, group, member) for group in range(12) for member in range(4)]
    figures = rows(directory, "metrics.jsonl")
    assert [row["step"] for row in figures] == list(range(1, 7)) and max(row["lag_max"] for row in figures) <= 2
    assert len([row for row in rows(directory, "evaluations.jsonl") if not row.get("final")]) == 2


def test_eval_reads_the_newest_checkpoint(straight: Path) -> None:
    found = json.loads(finish(agentrl("eval", str(straight), "evaluation.episodes=8", cwd=straight)))
    final = rows(straight, "evaluations.jsonl")[-1]
    assert {k: found[k] for k in ("success", "violation_rate", "stops")} == {
        k: final[k] for k in ("success", "violation_rate", "stops")
    }


def test_replay_reproduces_a_receipt(straight: Path) -> None:
    out = finish(agentrl("replay", f"{straight / 'receipts.jsonl'}:5", cwd=straight))
    assert out.startswith("reproduced")
