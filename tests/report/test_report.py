"""The report of a synthetic run: what it shows, what it survives, and that it needs nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.errors import UserError
from agentrl_jax.report import charts, transcripts
from agentrl_jax.report.html import build, render
from agentrl_jax.report.read import RunRecord, read

_spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).parent / "synthetic.py")
assert _spec is not None and _spec.loader is not None
synthetic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic)

VOID = {"meta", "line", "circle", "path", "rect"}


class Page(HTMLParser):
    """Checks that elements nest, and collects what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data):
        if not self.stack or self.stack[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, css: str) -> int:
        return sum(css in (attributes.get("class") or "").split() for _, attributes in self.attributes)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return synthetic.write_run(tmp_path_factory.mktemp("runs") / "quickstart")


def test_the_page_is_self_contained_and_nests(run_dir):
    path = build(run_dir)
    text = path.read_text()
    Page(text)
    assert path == run_dir / "report.html"
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    assert not re.search(r"<(script|img|link|iframe)[^>]*\b(src|href)=", text)
    assert "prefers-color-scheme:dark" in text.replace(" ", "")


def test_four_curves_causes_timing_and_ten_transcripts_are_shown(run_dir):
    page = Page(render(read(run_dir)))
    assert page.count("chart") == 4
    for words in ("Training reward", "Independent success", "Mean tool cost", "Constraint violations"):
        assert words in page.text
    for words in ("Failure causes", "Stop reasons", "Wall time by phase", "Success by kind of task", "rollout"):
        assert words in page.text
    assert page.count("episode") == 10
    assert {"src1", "src2", "src3", "src4"} <= {c for _, a in page.attributes for c in (a.get("class") or "").split()}
    assert page.count("better") > 2 and page.count("worse") > 2, "advantages are shaded"
    assert any("advantage -" in (a.get("data-t") or "") for _, a in page.attributes), "and told on hover"
    assert "before training" in page.text and "34.0 %" in page.text and "+59 points" in page.text
    assert "1.28 M" in page.text and "8 min 43 s" in page.text, "the total is not counted as a phase of its own"


def test_the_points_of_the_success_curve_are_the_evaluations(run_dir):
    page = Page(render(read(run_dir)))
    charts_ = [json.loads(a["data-points"]) for tag, a in page.attributes if tag == "svg" and "data-points" in a]
    held = [p for p in charts_[1] if p[2] == "held-out"]
    assert [(p[4], p[5]) for p in held] == [("sft", 0), ("sft", 300), ("rl", 20), ("rl", 40), ("rl", 60)]
    assert held[1][6] == "34.0 %" and held[1][7].startswith("28.5 %")
    assert held[0][1] > held[-1][1], "a higher share stands higher"


@pytest.mark.parametrize("gone", ["metrics", "evaluations", "transcripts", "timing", "summary", "config"])
def test_a_missing_file_is_a_section_that_says_so(run_dir, tmp_path, gone):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    for path in copy.glob(f"{gone}.*"):
        path.unlink()
    page = Page(build(copy).read_text())
    assert "Four curves" in page.text and "Summary" in page.text


def test_an_unfinished_run_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "early"}')
    text = Page(build(tmp_path).read_text()).text
    assert "early" in text and "not finished" in text and "No evaluation has been recorded yet." in text


def test_a_broken_line_is_named(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    (copy / "report.html").unlink(missing_ok=True)
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    lines[4] = "{broken"
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:5: not JSON"):
        build(copy)
    assert not (copy / "report.html").exists()


def test_a_torn_last_line_is_a_run_in_progress(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"stage":"rl","step":1,"reward":0.5}\n{"stage":"rl","st')
    assert len(read(tmp_path).metrics) == 1


@pytest.mark.parametrize("make", [lambda p: p / "nowhere", lambda p: p])
def test_a_directory_that_holds_no_run_is_refused(tmp_path, make):
    with pytest.raises(UserError, match=r"no such run directory|holds no run"):
        build(make(tmp_path))


def test_text_of_a_run_cannot_become_markup():
    evil = '<script>alert("x")</script>'
    rows = ({"stage": evil, "step": 1, "task": evil, "kind": evil, "reward": 1.0, "advantage": 1.0, "stop": evil,
             "tokens": [[evil, 3, 0, -0.1, 1.0], [evil, 4, 0, None, None]]},)  # fmt: skip
    evaluations = ({"stage": evil, "step": 0, "split": evil, "episodes": 4, "success": 0.5, "failures": {evil: 2}},)
    record = RunRecord(evil, {"name": evil, evil: evil}, ({"stage": evil, evil: 1.0},), evaluations, rows, {evil: 1.0})
    text = render(record)
    Page(text)
    assert "<script>alert" not in text


@given(count=st.integers(0, 60), wanted=st.integers(1, 12))
def test_chosen_transcripts_are_distinct_in_order_and_include_the_earliest(count, wanted):
    rows = [{"step": i, "success": i % 3 == 0, "violated": i % 5 == 0, "kind": f"k{i % 4}"} for i in range(count)]
    steps = [row["step"] for row in transcripts.choose(rows, wanted)]
    assert len(steps) == min(count, wanted) and steps == sorted(set(steps))
    assert not steps or steps[0] == 0


def test_failures_and_successes_are_both_chosen():
    rows = [{"step": i, "success": i > 50, "kind": "k"} for i in range(100)]
    chosen = transcripts.choose(rows)
    assert 0 < sum(row["success"] for row in chosen) < 10


@given(share=st.floats(0, 1), count=st.integers(1, 5000))
def test_the_interval_holds_the_share_and_narrows(share, count):
    low, high = charts.wilson(share, count)
    assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1
    wider = charts.wilson(share, max(1, count // 4))
    assert high - low <= wider[1] - wider[0] + 1e-9


def test_the_interval_of_a_known_case():
    assert charts.wilson(0.0, 256) == pytest.approx((0.0, 0.01478), abs=1e-4)
    assert charts.wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_a_chart_of_any_numbers_stays_in_its_frame(values):
    points = [charts.Point("rl", i, v) for i, v in enumerate(values)]
    svg = charts.line_chart([charts.Series("x", points, "s1", smooth=True)])
    found = next(a for tag, a in Page(svg).attributes if tag == "svg")
    for x, y, *_ in json.loads(found["data-points"]):
        assert 0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [(None, "number", "\N{EN DASH}"), (0.0, "percent", "0 %"), (1.0, "percent", "100 %"), (0.005, "percent", "0.5 %"),
     (1234567, "number", "1.2e+06"), (12345, "number", "12,345"), (2.6e-6, "number", "2.6e-06"),
     (3.14159, "number", "3.14")],
)  # fmt: skip
def test_numbers_are_shown_as_wide_as_they_deserve(value, kind, text):
    assert charts.show(value, kind) == text
