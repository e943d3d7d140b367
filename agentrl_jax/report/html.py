"""A run directory -> report.html: one self-contained page, without a script or a font from elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from agentrl_jax.errors import UserError
from agentrl_jax.report import panels, transcripts
from agentrl_jax.report.charts import Point, Series, legend, line_chart, wilson
from agentrl_jax.report.markup import empty, tag
from agentrl_jax.report.read import Row, RunRecord, number, read

# Names under which the metrics of a training step may hold each of the four curves.
REWARD = ("reward", "reward_mean", "mean_reward")
SUCCESS = ("success",)
TOOL_CALLS = ("tool_calls", "mean_tool_calls")
VIOLATIONS = ("violation_rate", "violations")


def build(run_dir: str | Path) -> Path:
    """Reads `run_dir`, writes `run_dir/report.html` (whole or not at all) and returns its path.

    Raises `UserError` for a directory that holds no run, and for a line that cannot be read.
    """
    target = Path(run_dir) / "report.html"
    text = render(read(run_dir))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def render(record: RunRecord) -> str:
    """The page as text."""
    sections = (
        ("", panels.headline(record), "hero"),
        ("Four curves", _curves(record), ""),
        ("Why episodes failed, and how they ended", _endings(record), ""),
        ("Where it is hard, and where the time went", _two_bars(record), ""),
        ("Ten episodes" if len(record.transcripts) >= 10 else "Episodes", _episodes(record), ""),
        ("Evaluations", panels.evaluations_table(record), "card"),
        ("Every other number", panels.other_numbers(record, (*REWARD, *SUCCESS, *TOOL_CALLS, *VIOLATIONS)), "card"),
        ("Summary", _facts(record), "card"),
    )
    body = "".join(_section(title, content, style) for title, content, style in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(record.name)} · agentrl-jax</title><style>{_asset('page.css')}</style></head><body><main>"
        f'{_header(record)}{body}</main><div id="tip" hidden></div><script>{_asset("page.js")}</script></body></html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("agentrl_jax.report").joinpath(name).read_text(encoding="utf-8")


def _section(title: str, content: str, style: str) -> str:
    head = f"<h2>{title}</h2>" if title else ""
    return (
        f'<section>{head}<div class="{style}">{content}</div></section>'
        if style
        else f"<section>{head}{content}</section>"
    )


def _header(record: RunRecord) -> str:
    config, summary = record.config, record.summary
    environment = config.get("environment")
    target = str(environment.get("target", "")) if isinstance(environment, dict) else ""
    stages = dict.fromkeys(str(r.get("stage", "")) for r in record.metrics)
    seed = summary.get("seed", config.get("seed"))
    pieces = [
        target.split(":")[0].removeprefix("agentrl_envs."),
        " → ".join(s for s in stages if s),
        f"seed {seed}" if seed is not None else "",
        f"{panels.compact(number(summary, 'parameters', 'param_count'))} parameters"
        if number(summary, "parameters", "param_count")
        else "",
        "" if summary else "not finished: this page shows the run so far",
    ]
    line = " · ".join(escape(p) for p in pieces if p)
    return f"<header><h1>{escape(record.name)}</h1><p>{line}</p></header>"


def _curves(record: RunRecord) -> str:
    held, validation = panels.held_out(record), [r for r in record.evaluations if r.get("split") == "validation"]
    if validation == held:
        validation = []
    first = next((str(r["stage"]) for r in record.metrics if "stage" in r), "before")

    def measured(name: str, interval: bool) -> list[Series]:
        return [
            Series("held-out", _points(held, (name,), interval, first), "s2", dots=True),
            Series("validation", _points(validation, (name,), False, first), "s3", dots=True),
        ]

    training = _training_rows(record)
    charts = (
        (
            "Training reward",
            "Mean over each step's episodes: what the policy is trained on.",
            [Series("training", _points(training, REWARD, False, first), "s1", smooth=True)],
            "number",
            None,
        ),
        (
            "Independent success",
            "On tasks the policy never trained on, with the 95 % interval.",
            [
                *measured("success", True),
                Series("training", _points(training, SUCCESS, False, first), "s1", smooth=True),
            ],
            "percent",
            1.0,
        ),
        (
            "Mean tool cost",
            "Tool calls per episode. Fewer is better once success is high.",
            [
                *measured("mean_tool_calls", False),
                Series("training", _points(training, TOOL_CALLS, False, first), "s1", smooth=True),
            ],
            "number",
            None,
        ),
        (
            "Constraint violations",
            "Share of episodes that broke a rule. A violation outweighs any success.",
            [
                *measured("violation_rate", True),
                Series("training", _points(training, VIOLATIONS, False, first), "s1", smooth=True),
            ],
            "percent",
            None,
        ),
    )
    cards = "".join(
        f'<figure class="card"><figcaption><h3>{title}</h3><p class="note">{note}</p></figcaption>'
        f"{legend(series)}{line_chart(series, kind=kind, top=top, label=title)}</figure>"
        for title, note, series, kind, top in charts
    )
    return f'<div class="two">{cards}</div>'


def _training_rows(record: RunRecord) -> list[Row]:
    """Steps that acted in the environment; supervised steps have a loss but no reward."""
    return [r for r in record.metrics if number(r, *REWARD) is not None]


def _points(rows: Sequence[Row], names: Sequence[str], interval: bool, first_stage: str) -> list[Point]:
    """`before` is drawn as step 0 of the first stage: it is where that stage begins."""
    points: list[Point] = []
    for index, row in enumerate(rows):
        value, count = number(row, *names), number(row, "scored", "episodes")
        if value is None:
            continue
        step = number(row, "step")
        low, high = wilson(value, int(count)) if interval and count else (None, None)
        stage = str(row.get("stage", "run"))
        points.append(
            Point(first_stage if stage == "before" else stage, float(index) if step is None else step, value, low, high)
        )
    return points


def _card(title: str, note: str, body: str) -> str:
    return tag("div", tag("h3", title), tag("p", note, css="note"), body, css="card")


def _two_bars(record: RunRecord) -> str:
    hard = _card(
        "Success by kind of task",
        "Held-out, at the last evaluation; the mark is where training began.",
        panels.kinds(record),
    )
    spent = _card("Wall time by phase", "Phases add up to the time the run was at work.", panels.timing(record))
    return tag("div", hard, spent, css="two")


def _endings(record: RunRecord) -> str:
    failed = _card(
        "Failure causes", "Share of held-out episodes that failed, by who is answerable.", panels.failures(record)
    )
    note = "How held-out episodes ended. Only “completed” and “early stop” are the policy's choice."
    return tag("div", failed, _card("Stop reasons", note, panels.endings(record)), css="two")


def _episodes(record: RunRecord) -> str:
    rows = transcripts.choose(record.transcripts)
    if not rows:
        return '<div class="card"><p class="empty">transcripts.jsonl has not been written yet.</p></div>'
    scale = transcripts.shade_scale(rows)
    cards = "".join(
        transcripts.transcript(row, scale=scale, opened=i in (0, len(rows) - 1)) for i, row in enumerate(rows)
    )
    return f"{transcripts.legend(rows)}{cards}"


def _facts(record: RunRecord) -> str:
    parts = [panels.facts(record.summary) if record.summary else empty("summary.json has not been written yet.")]
    if record.receipts:
        command = tag("code", "agentrl replay receipts.jsonl:N")
        parts.append(tag("p", f"{record.receipts:,} receipts: {command} re-runs the N-th.", css="note"))
    if record.config:
        config = escape(json.dumps(record.config, indent=2, ensure_ascii=False))
        parts.append(tag("details", tag("summary", "The resolved config"), tag("pre", config), css="config"))
    return "".join(parts)
