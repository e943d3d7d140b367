"""A run directory such as training leaves, made of formulas: for tests of the report and for looking at it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

KINDS = ("cancel_order", "return_item", "change_address", "exchange_item", "refuse")


def write_run(run_dir: Path, *, rl_steps: int = 60, transcripts: int = 24) -> Path:
    rng = random.Random(0)
    run_dir.mkdir(parents=True)
    config = {
        "name": "quickstart",
        "seed": 0,
        "environment": {"target": "agentrl_envs.workflow:suite", "options": {}},
        "loop": {"steps": rl_steps, "objective": {"surrogate": {"function": "ppo_clip", "with": {"low": 0.2}}}},
    }
    _json(run_dir / "config.json", config)
    _lines(
        run_dir / "metrics.jsonl",
        [*(_sft(i, rng) for i in range(1, 301, 5)), *(_rl(i, rl_steps, rng) for i in range(1, rl_steps + 1))],
    )
    evaluations = [
        _evaluation("before", 0, 0.0, 0.02),
        _evaluation("sft", 150, 0.18, 0.05, "validation"),
        _evaluation("sft", 300, 0.34, 0.04),
    ]
    evaluations += [
        _evaluation("rl", i, _curve(i, rl_steps), 0.03 * (1 - i / rl_steps) ** 2) for i in range(20, rl_steps + 1, 20)
    ]
    _lines(run_dir / "evaluations.jsonl", evaluations)
    _lines(run_dir / "transcripts.jsonl", [_transcript(i, rl_steps, transcripts, rng) for i in range(transcripts)])
    _lines(run_dir / "receipts.jsonl", [{"replay_id": str(i)} for i in range(40)])
    timing = {
        "demonstrations": 14.2,
        "sft": 121.0,
        "rollout": 204.3,
        "update": 88.1,
        "publish": 2.4,
        "evaluation": 61.7,
        "compile": 31.0,
    }
    _json(run_dir / "timing.json", timing)
    _json(
        run_dir / "summary.json",
        {
            "success_before": 0.0,
            "success_after_sft": 0.34,
            "success_after_rl": round(_curve(rl_steps, rl_steps), 4),
            "violation_rate": 0.0,
            "mean_tool_calls": 3.41,
            "trained_tokens": 1_284_133,
            "parameters": 771_200,
            "wall_seconds": {**timing, "total": sum(timing.values())},
            "seed": 0,
            "versions": {"agentrl-jax": "0.1.0", "jax": "0.10.2", "python": "3.11.9"},
        },
    )
    return run_dir


def _curve(step: int, steps: int) -> float:
    return 0.34 + 0.62 * (1 - math.exp(-3.2 * step / steps))


def _sft(step: int, rng: random.Random) -> dict[str, Any]:
    return {
        "stage": "sft",
        "step": step,
        "wall_s": step * 0.4,
        "loss": 3.2 * math.exp(-step / 70) + 0.4 + rng.gauss(0, 0.03),
        "grad_norm": 1.2 * math.exp(-step / 120) + abs(rng.gauss(0, 0.05)),
        "tokens_per_s": 5200 + rng.gauss(0, 100),
    }


def _rl(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    success = min(1.0, max(0.0, _curve(step, steps) + rng.gauss(0, 0.04)))
    return {
        "stage": "rl",
        "step": step,
        "wall_s": 130 + 4.8 * step,
        "reward": success * 1.02,
        "success": success,
        "violation_rate": max(0.0, 0.03 * (1 - step / steps) + rng.gauss(0, 0.006)),
        "tool_calls": 5.6 - 2.1 * success + rng.gauss(0, 0.08),
        "loss": rng.gauss(0, 0.02),
        "grad_norm": 0.4 + abs(rng.gauss(0, 0.1)),
        "entropy": 0.5 * math.exp(-step / steps) + rng.gauss(0, 0.01),
        "ratio_deviation_max": 2e-6 + abs(rng.gauss(0, 4e-7)),
        "approx_kl": 1e-4 * rng.random(),
        "clip_fraction": 0.0,
        "mean_logprob": -0.3 * math.exp(-step / steps),
        "tokens_per_s": 2100 + rng.gauss(0, 60),
        "constant_groups": rng.random() * step / steps,
    }


def _evaluation(stage: str, step: int, success: float, violated: float, split: str = "heldout") -> dict[str, Any]:
    failed = round(256 * (1 - success))
    return {
        "stage": stage,
        "step": step,
        "split": split,
        "episodes": 256,
        "scored": 255,
        "success": round(success, 4),
        "violation_rate": round(violated, 4),
        "mean_tool_calls": 5.5 - 2.2 * success,
        "failures": {"policy": max(0, failed - 1), "environment": 1},
        "stops": {
            "completed": round(200 * success) + 40,
            "early_stop": round(30 * (1 - success)),
            "budget": round(120 * (1 - success)),
            "token_cap": round(20 * (1 - success)),
            "failure": 1,
        },
        "success_by_kind": {
            kind: min(1.0, max(0.02, success + 0.08 * math.sin(3 * i))) for i, kind in enumerate(KINDS)
        },
    }


def _transcript(index: int, steps: int, count: int, rng: random.Random) -> dict[str, Any]:
    step = 1 + index * (steps - 1) // max(1, count - 1)
    success = rng.random() < _curve(step, steps)
    violated = not success and rng.random() < 0.3
    advantage = (0.6 if success else -1.4) * (1 + rng.random() * 0.4)
    tokens: list[list[Any]] = []

    def say(source: int, turn: int, text: str) -> None:
        for word in text.split():
            chosen = source == 3
            logprob = -rng.expovariate(6 if rng.random() < 0.8 else 0.9) if chosen else None
            tokens.append([word, source, turn, logprob, advantage if chosen else None])

    say(
        1,
        0,
        "<system> you serve a retail desk . tools : look_up order=ID ; cancel order=ID ; change_address order=ID ; "
        "finish . rules : a shipped order may not be cancelled ; look before you write ; " * 2 + "<end>",
    )
    say(2, 0, f"<user> please cancel order o{index + 12} , I no longer need it . <end> <assistant>")
    say(3, 0, f"look_up order=o{index + 12} <end>")
    status = "open" if success else "shipped"
    say(4, 0, f"<tool> order o{index + 12} status {status} customer c7 items p3 p9 total 84 <end> <assistant>")
    say(3, 1, f"cancel order=o{index + 12} <end>")
    answer = "ok" if success else 'denied : the order has left the warehouse & cannot be "cancelled" </script>'
    say(4, 1, f"<tool> {answer} <end> <assistant>")
    say(3, 2, "finish <end>")
    return {
        "stage": "rl",
        "step": step,
        "task": f"workflow/train/{1000 + index}",
        "kind": KINDS[index % len(KINDS)],
        "member": index % 8,
        "reward": 1.02 if success else 0.0,
        "advantage": advantage,
        "success": success,
        "violated": violated,
        "stop": "completed" if success else "budget",
        "cause": None if success else "policy",
        "tokens": tokens,
    }


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
