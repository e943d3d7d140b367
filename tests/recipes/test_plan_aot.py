"""`agentrl plan` with the TPU's own compiler: Qwen3-0.6B on 8k rows over a v5e:4x4 that is not here."""

import importlib.util
import json

import pytest

from agentrl_jax.cli.main import main
from tests.recipes import qwen_config
from tests.recipes.test_plan import qwen  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs the TPU's compiler: pip install -e '.[tpu]'"
    ),
]


def test_qwen3_at_0_6_b_fits_and_falls_into_no_trap(qwen, capsys):  # noqa: F811
    command = [
        "plan",
        qwen_config.__file__,
        "--topology",
        "v5e:4x4",
        "--mesh",
        "fsdp=16",
        "--json",
        "--timeout",
        "3000",
    ]
    assert main([*command, "rollout.slots=8", "rollout.workers=8", "rollout.bank=8"]) == 0
    report = json.loads(capsys.readouterr().out)
    programs = {row["program"]: row for row in report["programs"]}
    moments = next(row["gib"] for row in report["resident"] if row["what"] == "optimizer state")
    assert programs["update"]["peak"] + moments < 2.2
    assert {row["kind"] for row in report["collectives"]} <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert report["executed_tflop"] == pytest.approx(561.06, rel=0.01)
    assert not [text for text in report["warnings"] if text.startswith("update")]
    again = main([*command, "rollout.slots=8", "rollout.workers=8", "rollout.bank=8"])
    assert again == 0 and all(
        row["cached"] for row in json.loads(capsys.readouterr().out)["programs"] if "cached" in row
    )
