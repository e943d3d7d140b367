"""A run's receipts in four tables."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl_jax.cli.main import main
from agentrl_jax.errors import UserError
from agentrl_jax.report.triage import triage


def receipt(task: str = "t", **changes: Any) -> dict[str, Any]:
    step = {"performed": True, "observation_hash": "a"}
    verdict = {"constraints": [{"name": "kept", "passed": True}], "outcome": True}
    plain = {"task": {"id": task}, "stop": "completed", "verdict": verdict, "steps": [step], "attribution": None}
    return {**plain, "ledger": {}, "healed": 0, "replay_id": f"{task}-{json.dumps(changes, sort_keys=True)}", **changes}


def verdict(outcome: Any, *broken: str) -> dict[str, Any]:
    return {"constraints": [{"name": name, "passed": False} for name in broken], "outcome": outcome}


def blamed(cause: str, evidence: str) -> dict[str, Any]:
    return {"attribution": {"cause": cause, "evidence": evidence}, "verdict": None}


MIXED = [
    *[receipt(f"good{i}") for i in range(8)],
    receipt("good8", healed=1),
    receipt("good9", ledger={"infrastructure_retries": 2}),
    receipt("a", verdict=verdict(False), stop="budget"),
    receipt("b", verdict=verdict(False), stop="budget"),
    receipt("c", verdict=verdict(True, "no_undeclared_change")),
    receipt("d", verdict=verdict(0.5)),
    receipt("e", **{**blamed("policy", "timeout in step: x; y"), "verdict": verdict(False)}),
    receipt("f", **blamed("environment", "exception in reset: OSError: no room")),
    receipt("g", **blamed("evaluator", "exception in verify: KeyError: 'gold'")),
    receipt("h", steps=[]),
    receipt("i", replay_id="same"), receipt("i", replay_id="same", verdict=verdict(False)),
    receipt("j", replay_id="two"),
    receipt("j", replay_id="two", verdict=verdict(False), steps=[{"performed": True, "observation_hash": "b"}]),
    receipt("k", verdict=verdict(None)),
    receipt("l", **blamed("unknown", "crash in step")),
]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    lines = [json.dumps(row) + "\n" for row in MIXED]
    (tmp_path / "receipts.jsonl").write_text("".join(lines) + '{"task": {"id": "torn')
    return tmp_path


def test_a_run_on_several_hosts_is_read_as_one(tmp_path):
    for place, names in ((tmp_path, "abcd"), (tmp_path / "hosts" / "1", "wxyz"), (tmp_path / "hosts" / "2", "")):
        place.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(receipt(name, verdict=verdict(False), stop="budget")) + "\n" for name in names]
        (place / "receipts.jsonl").write_text("".join(lines))
    found = triage(tmp_path, last=4)
    assert (found.episodes, found.of) == (4, 8)
    (finding,) = found.tables["policy"]
    assert set(finding.tasks) == set("cdyz") and finding.example == f"{tmp_path}/hosts/1/receipts.jsonl:4"


def test_every_failed_episode_is_in_the_table_of_its_cause(run_dir):
    found = triage(run_dir)
    assert (found.episodes, found.of, found.succeeded, found.mended) == (24, 24, 10, 2)
    counts = {cause: {f.what: f.count for f in table} for cause, table in found.tables.items()}
    assert counts == {
        "policy": {
            "used up its budget": 2, "broke a constraint: no_undeclared_change": 1, "timeout in step: x": 1,
            "finished without reaching the goal": 1,
        },
        "environment": {
            "exception in reset: OSError: no room": 1,
            "the same actions met two answers and two verdicts: it is not deterministic": 2,
        },
        "evaluator": {
            "exception in verify: KeyError: 'gold'": 1, "scored as a success without one action": 1,
            "the same actions and answers were given two verdicts": 2,
        },
        "unknown": {"left unscored by the verifier": 1, "crash in step": 1},
    }  # fmt: skip
    assert sum(found.rates.values()) == pytest.approx(14 / 24)
    assert found.warning is not None and "8.3 %" in found.warning
    budget = found.tables["policy"][0]
    assert budget.tasks == ("a", "b") and budget.example == f"{run_dir / 'receipts.jsonl'}:12"
    assert triage(run_dir, max_unknown=0.1).warning is None


def test_only_the_newest_are_looked_at(run_dir):
    found = triage(run_dir, last=2)
    assert (found.episodes, found.of, found.succeeded) == (2, 24, 0) and found.rates["unknown"] == 1.0


def test_the_command_prints_tables_or_json_and_warns(run_dir, capsys):
    assert main(["triage", str(run_dir)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("24 episodes of ") and "policy  20.8 %" in captured.out
    assert "     2  used up its budget  (2 tasks; agentrl replay " in captured.out
    assert captured.err.startswith("agentrl: warning: nobody can tell")
    assert main(["triage", str(run_dir), "--json", "--max-unknown", "0.5"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rates"]["evaluator"] == pytest.approx(4 / 24) and not captured.err


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "no receipts"), ("", "holds no receipt yet"), ('{"x": 1}\n', r"receipts\.jsonl:1: not a receipt")],
)
def test_a_run_without_receipts_says_so(tmp_path, text, words):
    if text is not None:
        (tmp_path / "receipts.jsonl").write_text(text)
    with pytest.raises(UserError, match=words):
        triage(tmp_path)


@pytest.mark.parametrize("options", [["--last", "0"], ["--max-unknown", "2"]])
def test_a_bad_option_is_named(run_dir, options, capsys):
    assert main(["triage", str(run_dir), *options]) == 2
    assert options[0] in capsys.readouterr().err
