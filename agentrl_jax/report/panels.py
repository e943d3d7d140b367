"""The sections of the page that are not curves: headline, endings, failures, time, other numbers, facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from agentrl_jax.protocol import Cause, StopReason
from agentrl_jax.report.charts import NOTHING, between, show, sparkline, wilson
from agentrl_jax.report.markup import empty, tag, text
from agentrl_jax.report.read import Row, RunRecord, number

_STOP_WORDS = {
    StopReason.COMPLETED: "the environment says that the task is over",
    StopReason.EARLY_STOP: "the policy ended its turn without acting, before the task was over",
    StopReason.BUDGET: "steps, tool calls, write actions or wall time were used up",
    StopReason.TOKEN_CAP: "a turn or the context reached its token limit",
    StopReason.LOW_EVIDENCE: "nothing new was being learned",
    StopReason.TIMEOUT: "an environment call outlived its deadline",
    StopReason.FAILURE: "a crash, an exception or garbage ended it",
}
_CAUSE_WORDS = {
    Cause.POLICY: "the policy's doing: it trains on these",
    Cause.ENVIRONMENT: "the environment broke: left out of the baseline and the loss",
    Cause.EVALUATOR: "the verifier broke: left out of the baseline and the loss",
    Cause.UNKNOWN: "no evidence either way: kept, and counted",
}
_METRIC_WORDS = {
    "loss": "what the optimizer minimises",
    "grad_norm": "length of the gradient before clipping",
    "update_norm": "length of the parameter change",
    "entropy": "how undecided the policy is per token; falling to 0 means that it no longer explores",
    "approx_kl": "distance between the policy that sampled and the one after the update",
    "ratio_deviation_max": "largest |ratio - 1|; on a first on-policy update it must be about 0",
    "clip_fraction": "share of tokens whose ratio was clipped",
    "mean_logprob": "mean log-probability of the policy's own tokens",
    "premature_stop_rate": "share of episodes that the policy ended before the task was over",
    "unfinished_after_budget": "share of episodes that used up a budget before they had finished",
    "learner_idle": "share of a step's time in which the learner waited for its episodes",
    "lag_mean": "age of the sampled tokens when they trained, in steps; 0 is on-policy",
    "lag_max": "age of the oldest of them; at most loop.max_lag",
    "tokens_per_s": "trained tokens per second of wall time, everything included",
}
_HIDDEN_METRICS = ("step", "at", "wall_s", "waited_s", "finite", "reward", "reward_mean", "mean_reward")
_MAX_ROWS = 10


def headline(record: RunRecord) -> str:
    """Success at each milestone as a ladder, then the four numbers one asks for next."""
    steps = _milestones(record)
    rungs = []
    for index, (name, share, count) in enumerate(steps):
        low, high = wilson(share, count) if count else (share, share)
        gain = tag("span", f"{100 * (share - steps[index - 1][1]):+.0f} points", css="gain") if index else ""
        filled = tag("i", style=f"width:{100 * share:.1f}%")
        range_ = tag("b", style=f"left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%")
        rungs.append(
            tag(
                "div",
                tag("div", escape(name), gain, css="rung-name"),
                tag("div", show(share, "percent"), css="big"),
                tag("div", filled, range_, css="meter"),
                tag("div", f"95 % interval {between(low, high)}" if count else "", css="note"),
                css="rung last" if index == len(steps) - 1 else "rung",
            )
        )
    ladder = "".join(rungs) or empty("No evaluation has been recorded yet.")
    return tag("div", ladder, css="ladder") + tag("div", *_tiles(record), css="tiles")


def _milestones(record: RunRecord) -> list[tuple[str, float, int]]:
    """(name, success, episodes) before training and after each stage, from the summary or else the evaluations."""
    rows = held_out(record)
    found: list[tuple[str, float, int]] = []
    for key in record.summary:
        value, stage = number(record.summary, key), key.removeprefix("success_").removeprefix("after_")
        if key.startswith("success_") and value is not None:
            match = [r for r in rows if r.get("stage") == stage and number(r, "success") == value]
            found.append((_milestone(stage), value, episodes(match[-1]) if match else 0))
    if not found and rows:
        ends = rows if len(rows) == 1 else (rows[0], rows[-1])
        return [(place(r), number(r, "success") or 0.0, episodes(r)) for r in ends]
    return found


def _milestone(stage: str) -> str:
    return "before training" if stage == "before" else f"after {stage.upper() if len(stage) < 4 else stage}"


def _tiles(record: RunRecord) -> Iterable[str]:
    last: Row = (held_out(record) or [{}])[-1]
    summary = record.summary
    violations = number(summary, "violation_rate") if "violation_rate" in summary else number(last, "violation_rate")
    calls = number(summary, "mean_tool_calls") if "mean_tool_calls" in summary else number(last, "mean_tool_calls")
    seconds = sum(v for v in phases(record).values())
    yield _tile("constraint violations", show(violations, "percent"), "of held-out episodes broke a rule")
    yield _tile("tool calls", show(calls), "per held-out episode")
    yield _tile("tokens trained", compact(number(summary, "trained_tokens")), "carried a loss")
    yield _tile("wall time", duration(seconds) if seconds else NOTHING, f"in {len(phases(record))} phases")


def _tile(name: str, value: str, note: str) -> str:
    parts = ((name, "rung-name"), (value, "mid"), (note, "note"))
    return tag("div", *(tag("div", words, css=css) for words, css in parts), css="tile")


def endings(record: RunRecord) -> str:
    """One bar an evaluation: how its episodes stopped, as shares of all."""
    return _stacks(record, "stops", [str(s) for s in StopReason], _STOP_WORDS, whole=None)


def failures(record: RunRecord) -> str:
    """One bar an evaluation: the failed share of its episodes, by who is answerable."""
    return _stacks(record, "failures", [str(c) for c in Cause], _CAUSE_WORDS, whole="episodes")


def _stacks(record: RunRecord, field: str, order: Sequence[str], meaning: Mapping[Any, str], whole: str | None) -> str:
    rows = _spread([r for r in held_out(record) if isinstance(r.get(field), Mapping)])
    if not rows:
        return empty("No evaluation has recorded this.")
    names = [n for n in order if any(r[field].get(n) for r in rows)]
    names += sorted({n for r in rows for n in r[field]} - set(order))
    colours = {n: f"c{order.index(n) if n in order else len(order)}" for n in names}
    bars = []
    for row in rows:
        counts = {n: int(row[field].get(n, 0)) for n in names}
        total = max(1.0, (number(row, whole) if whole else None) or sum(counts.values()))
        parts = [
            tag("i", css=colours[n], style=f"width:{100 * c / total:.2f}%", title=f"{n}: {c} of {total:.0f} episodes")
            for n, c in counts.items()
            if c
        ]
        bars.append(_bar(place(row), parts, show(sum(counts.values()) / total, "percent") if whole else ""))
    keys = [tag("span", text(n), css=f"key {colours[n]}", title=meaning.get(n, "")) for n in names]
    return tag("div", *keys, css="legend") + tag("div", *bars, css="bars tailed" if whole else "bars")


def _bar(name: str, parts: Iterable[str], tail: str) -> str:
    stack = tag("div", *parts, css="stack")
    return tag("div", tag("span", text(name), title=name), stack, tag("em", tail), css="row")


def timing(record: RunRecord) -> str:
    """Wall time by phase, longest first."""
    times = phases(record)
    total = sum(times.values())
    if not total:
        return empty("Neither timing.json nor summary.json has been written yet.")
    bars = [
        _bar(
            name,
            [tag("i", css="c0", style=f"width:{100 * seconds / max(times.values()):.2f}%")],
            f"{duration(seconds)} · {100 * seconds / total:.0f} %",
        )
        for name, seconds in sorted(times.items(), key=lambda item: -item[1])
    ]
    return tag("div", *bars, css="bars timing")


def kinds(record: RunRecord) -> str:
    """Success by kind of task at the last evaluation, hardest first, with a mark where training began."""
    rows = [r for r in held_out(record) if isinstance(r.get("success_by_kind"), Mapping)]
    if not rows:
        return empty("No evaluation has recorded this.")
    first, last = rows[0]["success_by_kind"], rows[-1]["success_by_kind"]
    bars = []
    for kind, share in sorted(last.items(), key=lambda item: item[1]):
        filled = tag("i", css="c0", style=f"width:{100 * share:.2f}%")
        mark = tag(
            "b", style=f"left:{100 * first[kind]:.2f}%", title=f"{place(rows[0])}: {show(first[kind], 'percent')}"
        )
        bars.append(_bar(kind, [filled, mark if kind in first and len(rows) > 1 else ""], show(share, "percent")))
    return tag("div", *bars, css="bars kinds")


def other_numbers(record: RunRecord, shown: Sequence[str]) -> str:
    """Every other number that the metrics hold, as a small curve with its last value, by stage."""
    parts = []
    for stage in dict.fromkeys(str(r.get("stage", "run")) for r in record.metrics):
        rows = [r for r in record.metrics if str(r.get("stage", "run")) == stage]
        names = [n for n in dict.fromkeys(n for r in rows for n in r) if n not in (*_HIDDEN_METRICS, *shown)]
        cells = []
        for name in names:
            values = [v for v in (number(r, name) for r in rows) if v is not None]
            if values:
                words = escape(_METRIC_WORDS.get(name, ""))
                cells.append(
                    f'<div class="cell" title="{words}"><div class="note">{escape(name.replace("_", " "))}</div>'
                    f'<div class="cell-row"><b>{show(values[-1])}</b>{sparkline(_thin(values))}</div></div>'
                )
        if cells:
            parts.append(f'<h3>{escape(stage)}</h3><div class="cells">{"".join(cells)}</div>')
    return "".join(parts) or empty("metrics.jsonl has not been written yet.")


def evaluations_table(record: RunRecord) -> str:
    if not record.evaluations:
        return empty("evaluations.jsonl has not been written yet.")
    body = []
    for row in record.evaluations:
        share, count = number(row, "success"), episodes(row)
        cells = (
            escape(place(row)),
            escape(str(row.get("split", ""))),
            show(number(row, "episodes")),
            tag("b", show(share, "percent")),
            tag("span", between(*wilson(share, count)), css="soft") if share is not None and count else "",
            show(number(row, "violation_rate"), "percent"),
            show(number(row, "mean_tool_calls")),
        )
        body.append(tag("tr", *(tag("td", cell) for cell in cells)))
    heads = ("when", "split", "episodes", "success", "95 % interval", "violations", "tool calls")
    head = tag("thead", tag("tr", *(tag("th", words) for words in heads)))
    return tag("div", tag("table", head, tag("tbody", *body)), css="scroll")


def facts(values: Row) -> str:
    """A mapping as a two-column table; nested mappings become dotted names."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _flatten(values))
    return f'<dl class="facts">{rows}</dl>'


def _flatten(values: Row, prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", ", ".join(str(item) for item in value)
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            yield (
                f"{prefix}{key}",
                (f"{value:,.6g}" if isinstance(value, float) else str(value)) if is_number else str(value),
            )


def held_out(record: RunRecord) -> list[Row]:
    """The evaluations that measure success independently: neither training nor validation tasks."""
    rows = [r for r in record.evaluations if str(r.get("split", "heldout")) not in ("train", "validation")]
    return rows or list(record.evaluations)


def episodes(row: Row) -> int:
    """How many episodes a share of `row` was measured on."""
    return int(number(row, "scored", "episodes") or 0)


def place(row: Row) -> str:
    step = row.get("step")
    if row.get("stage") == "before":
        return "before"
    return f"{row.get('stage', 'run')} {step:g}" if isinstance(step, int | float) else str(row.get("stage", "run"))


def phases(record: RunRecord) -> dict[str, float]:
    source = record.timing or record.summary.get("wall_seconds") or {}
    items = source.items() if isinstance(source, Mapping) else ()
    return {str(k): float(v) for k, v in items if isinstance(v, int | float) and k != "total"}


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole // 60 % 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{seconds:.1f} s"


def compact(value: float | None) -> str:
    if value is None:
        return NOTHING
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g}"


def _spread(rows: list[Row]) -> list[Row]:
    """At most `_MAX_ROWS` rows, evenly spread, first and last among them."""
    if len(rows) <= _MAX_ROWS:
        return rows
    return [rows[round(i * (len(rows) - 1) / (_MAX_ROWS - 1))] for i in range(_MAX_ROWS)]


def _thin(values: list[float]) -> list[float]:
    stride = max(1, len(values) // 120)
    return [*values[:-1:stride], values[-1]]
