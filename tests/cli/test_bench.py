"""`agentrl bench loss` at a size that takes no time: its rows, its table, and one line for each bad option."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json

import pytest

from agentrl_jax.cli.main import main

SIZE = "8x4x11"
OURS = ["single pass", "single pass, f32 sums", "two passes", "checkpointed"]


@pytest.fixture(scope="module")
def rows():
    """What `--json` printed: one run of the command serves every test."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["bench", "loss", "--sizes", SIZE, "--rounds", "1", "--json"]) == 0
    return json.loads(printed.getvalue())


def test_json_holds_every_contender_with_its_time_its_memory_and_its_work(rows):
    found = {(row["what"], row["who"]): row for row in rows}
    expected = [*(("train", who) for who in ["naive", *OURS]), ("score", "naive"), ("score", "chunks")]
    assert set(expected) <= set(found)
    for key in expected:
        row = found[key]
        assert "error" not in row, row
        assert row["size"] == SIZE and row["platform"] == "cpu" and row["dtype"] == "float32"
        assert row["ms"] > 0 and row["time_ratio"] > 0
        assert row["temp_gib"] >= 0 and isinstance(row["holds_logits"], bool) and row["collectives"] == []
    assert all(found[what, "naive"]["time_ratio"] == 1 for what in ("train", "score"))


def test_matrix_work_is_counted_in_projections(rows):
    """Value and two gradients take three. With a single chunk the compiler sees where logits are computed again."""
    found = {row["who"]: row for row in rows if row["what"] == "train"}
    for who in ("naive", *OURS):
        assert 3 <= found[who]["matmuls"] <= 4, who
        assert found[who]["tflop"] == pytest.approx(found[who]["matmuls"] * 2 * 8 * 4 * 11 / 1e12)
    assert found["naive"]["matmuls"] == found["single pass"]["matmuls"] == 3


def test_the_table_has_a_line_for_each_row(rows, monkeypatch, capsys):
    from benchmarks import loss

    broken = {"size": SIZE, "what": "train", "who": "a peer", "error": "TypeError: no such argument"}
    asked = []
    monkeypatch.setattr(loss, "measure", lambda *given: asked.append(given) or [*rows, broken])
    assert main(["bench", "loss", "--sizes", SIZE, "16x4x11", "--rounds", "2", "--actions", "0.5"]) == 0
    assert asked == [((8, 4, 11), 0.5, 2), ((16, 4, 11), 0.5, 2)]
    captured = capsys.readouterr()
    title, *lines = captured.out.splitlines()
    assert title.startswith("size TxDxV") and "time / naive" in title and "temp GiB" in title and "TFLOP" in title
    assert len(lines) == 2 * (len(rows) + 1) and all(line.startswith(SIZE) for line in lines)
    assert lines[len(rows)].endswith("  TypeError: no such argument")
    assert captured.err.count("\n") == len(lines), "each row is named as soon as it is measured"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sizes", "8x4"], ["--sizes 8x4", "tokens x width x vocabulary", "512x576x49152"]),
        (["--sizes", SIZE, "8x0x11"], ["--sizes 8x0x11"]),
        (["--sizes", "big"], ["--sizes big"]),
        (["--sizes"], ["--sizes", "agentrl bench --help"]),
        (["--actions", "2"], ["--actions 2.0", "0 to 1"]),
        (["--actions", "-0.1"], ["--actions -0.1"]),
        (["--actions", "nan"], ["--actions nan"]),
        (["--actions", "some"], ["--actions", "'some'"]),
        (["--rounds", "0"], ["--rounds 0", "at least 1"]),
        (["--rounds", "1.5"], ["--rounds", "'1.5'"]),
        (["--topology", "v5p"], ["--topology v5p", "v5p:2x2x1"]),
        (["--topology", "v5p:2"], ["--topology v5p:2", "v5p:2x2x1"]),
        (["--nope"], ["'--nope'", "agentrl bench --help"]),
    ],
)
def test_a_bad_option_is_named_in_one_line(options, words, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: name if name == "libtpu" else find(name, *rest)
    )
    refused(["bench", "loss", *options], words, capsys)


def test_a_topology_without_libtpu_says_what_to_install(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "libtpu" else find(name, *rest)
    )
    refused(["bench", "loss", "--topology", "v5p:2x2x1"], ["--topology v5p:2x2x1", ".[tpu]"], capsys)


def test_a_part_that_does_not_exist_is_named(capsys):
    refused(["bench", "lost"], ["'lost'", "loss", "agentrl bench --help"], capsys)


def test_the_sampler_prints_its_rate_and_what_a_shared_prompt_costs(monkeypatch, capsys):
    from benchmarks import sampler

    monkeypatch.setattr(sampler, "NEW", 8)
    monkeypatch.setattr(sampler, "PROMPTS", 8)
    monkeypatch.setattr(sampler, "SHARED", 40)
    assert main(["bench", "sampler", "--preset", "tiny", "--rounds", "1", "--json"]) == 0
    rate, sharing = json.loads(capsys.readouterr().out)
    assert rate["what"] == "throughput" and rate["tokens_per_cpu_s"] > 0 and 8 <= rate["new_tokens"][0] <= 8 * 128
    assert sharing["cost_ratio"] > 0 and "8 members" in sharing["what"]
    title, *lines = sampler.table([rate, sharing]).splitlines()
    assert "tokens/CPU s" in title and len(lines) == 2


@pytest.mark.parametrize("options, words", [
    (["--preset", "huge"], ["--preset huge", "smollm2-135m"]), (["--rounds", "0"], ["--rounds 0"]),
    (["--sizes", SIZE], ["--sizes", "--preset"]),
])  # fmt: skip
def test_a_bad_option_of_the_sampler_is_named(options, words, capsys):
    refused(["bench", "sampler", *options], words, capsys)


def test_what_a_step_costs_the_host_is_printed(monkeypatch, capsys):
    from benchmarks import env, sandbox

    monkeypatch.setattr(sandbox, "measure", lambda rounds: [])
    monkeypatch.setattr(env, "timed", lambda work, rounds: {"cpu_us_per_step": work() / 8, "steps_per_s": 9000.0})
    monkeypatch.setattr(env, "start", lambda workers, start=env.start: start(4))
    assert main(["bench", "env", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["value"] for row in rows[:3]] == [64.0, 64.0, 9000.0], "512 steps, in this process and in two others"
    assert rows[3]["unit"] == "s" and rows[3]["value"] > 0
    assert len(env.table(rows).splitlines()) == 5


@pytest.mark.parametrize("options, words", [(["--rounds", "0"], ["--rounds 0"]), (["--preset", "tiny"], ["--preset"])])
def test_a_bad_option_of_the_environments_is_named(options, words, capsys):
    refused(["bench", "env", *options], words, capsys)


def refused(argv, words, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("agentrl: error: ") and captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err
