"""`agentrl plan` by shapes: figures against arithmetic done by hand, splits over meshes, and what it says to change."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from agentrl_jax.cli import plan as command
from agentrl_jax.cli.main import main
from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.recipes.plan import memory, shapes
from agentrl_jax.recipes.plan.topology import CHIPS, parse_mesh, parse_topology, spans_torus
from tests.recipes import qwen_config

SHARED = {
    "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "max_position_embeddings": 40960, "vocab_size": 151936, "num_key_value_heads": 8,
}  # fmt: skip
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28}
GIB = 1 << 30


@pytest.fixture
def qwen(tmp_path, monkeypatch):
    """The config of Qwen3-0.6B on 8k rows; of the model there is a config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps({**SHARED, **QWEN, "tie_word_embeddings": True}))
    monkeypatch.setenv("AGENTRL_QWEN", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return qwen_config.config()


def gib(report):
    return {row["what"]: row["gib"] for row in report["resident"]}


def test_what_is_resident_is_what_arithmetic_says(qwen):
    wanted = shapes.request(qwen, "v5e:4x4", "fsdp=16")
    report = shapes.by_shapes(wanted)
    found, count = gib(report), llama.param_count(wanted.model)
    assert count == 596_049_920  # the published 0.6 B
    norms = 28 * (2 * 1024 + 2 * 128) + 1024  # whole on every device
    share = ((count - norms) / 16 + norms) * 4 / GIB
    assert found["parameters"] == pytest.approx(share, abs=1e-3)
    assert found["optimizer state"] == pytest.approx(2 * share, abs=1e-3)
    assert found["sampler weights"] == pytest.approx(2 * count / GIB, abs=1e-3)
    pages = 16 / 4 * 8192 / 32 + 1  # a host has 4 of the 16 chips, and shares its 16 slots out to them
    assert found["KV pages"] == pytest.approx(2 * 28 * pages * 32 * 8 * 128 * 2 / GIB, abs=1e-3)
    assert report["limit_gib"] == 15.75


@pytest.mark.parametrize(("axis", "shrinks"), [("data", 1), ("fsdp", 8), ("tensor", 8)])
def test_an_axis_splits_what_its_rules_say(qwen, axis, shrinks):
    qwen = shapes.with_settings(qwen, 16, "full")
    whole = gib(shapes.by_shapes(shapes.request(qwen, "v5e:1x1", None)))
    split = gib(shapes.by_shapes(shapes.request(qwen, "v5e:2x4", f"{axis}=8")))
    assert split["parameters"] == pytest.approx(whole["parameters"] / shrinks, rel=0.02)
    assert split["KV pages"] == pytest.approx(whole["KV pages"] / 4, rel=1e-3)  # a host's 4 chips share its slots


def test_placed_shapes_take_the_bytes_that_real_arrays_take():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 2, 2, 1), memory.sharding.AXES)
    model = llama.LlamaConfig(vocab_size=64, width=16, layers=2, heads=4, kv_heads=2, head_width=4, mlp_width=32)
    places = memory.sharding.shardings(mesh, llama.logical_axes(model))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), llama.shapes(model))
    params = jax.tree.map(jax.device_put, zeros, places)
    first = mesh.devices.flat[0]
    real = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards if s.device == first)
    assert memory.held("params", params).bytes == real


def test_search_turns_a_run_that_does_not_fit_into_one_that_does(qwen):
    qwen = sampling(qwen, slots=32, workers=32)
    wanted = shapes.request(qwen, "v5e:4x4", None)
    report = shapes.by_shapes(wanted)
    assert not report["fits"] and report["headroom_gib"] < 0
    found = shapes.search(wanted)
    assert found[0]["fits"] and found[0]["mesh"]["data"] < 16
    again = shapes.by_shapes(wanted._replace(mesh=found[0]["mesh"], config=shapes.with_settings(
        qwen, found[0]["micro_rows"], found[0]["remat"])))  # fmt: skip
    assert again["fits"] and again["peak_gib"] == found[0]["peak_gib"]
    assert "--mesh" in shapes.advice(wanted, report, found)[0]


def sampling(config, **changes):
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **changes))


def test_too_many_slots_are_named_with_a_number_that_fits(qwen):
    wanted = shapes.request(sampling(qwen, slots=128, workers=128), "v5e:4x4", "fsdp=16")
    report = shapes.by_shapes(wanted)
    assert not report["fits"]
    (advice,) = shapes.advice(wanted, report, shapes.search(wanted))
    tensor, slots = map(int, re.findall(r"rollout\.(?:tensor|slots)=(\d+)", advice))
    assert 0 < slots < 128
    fewer = sampling(qwen, slots=slots, tensor=tensor, workers=slots)
    assert shapes.by_shapes(shapes.request(fewer, "v5e:4x4", "fsdp=16"))["fits"]


def test_devices_that_share_a_sampler_hold_a_part_of_its_weights_and_the_same_pages(qwen):
    whole, split = (
        gib(shapes.by_shapes(shapes.request(sampling(qwen, tensor=tensor), "v5e:4x4", "fsdp=16"))) for tensor in (1, 4)
    )
    assert split["sampler weights"] == pytest.approx(whole["sampler weights"] / 4, rel=0.01)
    assert split["KV pages"] == pytest.approx(whole["KV pages"], rel=0.01)


def test_heads_of_a_sampler_that_do_not_divide_are_refused(qwen):
    with pytest.raises(UserError, match=r"rollout\.tensor=3 .* kv_heads=8: set rollout\.tensor=1"):
        shapes.by_shapes(shapes.request(sampling(qwen, tensor=3), "v5e:4x4", "fsdp=16"))


def test_a_bracket_is_in_order_and_scales_with_the_rows(qwen):
    report = shapes.by_shapes(shapes.request(qwen, "v5e:4x4", "fsdp=16"))
    step = report["step_s"]
    assert 0 < step["floor"] <= step["point"] <= step["ceiling"] and 0 < step["mfu"] < 1
    assert step["tokens_per_s"] == pytest.approx(report["tokens_a_step"] / step["point"])
    twice = dataclasses.replace(qwen, loop=dataclasses.replace(qwen.loop, tasks=4))
    double = shapes.by_shapes(shapes.request(twice, "v5e:4x4", "fsdp=16"))
    assert double["executed_tflop"] == pytest.approx(2 * report["executed_tflop"], rel=1e-4)


def test_rows_split_by_columns_take_less_and_where_they_cannot_be_it_says_so(qwen):
    by_columns = dataclasses.replace(qwen, mesh=dataclasses.replace(qwen.mesh, sequence=True))
    whole, split = (
        shapes.by_shapes(shapes.request(config, "v5e:4x4", "fsdp=4,tensor=4")) for config in (qwen, by_columns)
    )
    update = [row["own_gib"] for row in (whole["programs"][0], split["programs"][0])]
    saved = 28 * 16 / 4 * 8192 * 1024 * 2 * 3 / 4  # of each of 28 layers, what 3 of 4 devices keep for the others
    assert update[0] - update[1] == pytest.approx(saved / GIB, abs=2e-3)
    assert not [text for text in split["warnings"] if "sequence" in text]
    said = shapes.by_shapes(shapes.request(by_columns, "v5e:4x4", "fsdp=16"))["warnings"]
    assert [text for text in said if text.startswith("mesh.sequence=True needs a tensor axis")]


def apart(config, count, **changes):
    return dataclasses.replace(sampling(config, **changes), placement="split", sampler_devices=count)


def test_a_split_run_has_devices_that_learn_and_devices_that_sample(qwen):
    few = shapes.with_settings(qwen, 8, "full")
    split = shapes.by_shapes(shapes.request(apart(few, 2), "v5e:4x4", "fsdp=8"))
    wanted = shapes.request(few, "v5e:2x4", "fsdp=8")
    alone = shapes.by_shapes(wanted)  # of as many devices as learn there
    on = {name: {row["what"]: row["gib"] for row in split["resident"] if row["on"] == name}
          for name in ("learners", "samplers")}  # fmt: skip
    assert on["learners"] == {name: gib(alone)[name] for name in ("parameters", "optimizer state", "batch")}
    pages = 16 / 2 * 8192 / 32 + 1  # each of a host's two holds half of its slots
    assert on["samplers"]["sampler weights"] == gib(alone)["sampler weights"]
    assert on["samplers"]["KV pages"] == pytest.approx(2 * 28 * pages * 32 * 8 * 128 * 2 / GIB, abs=1e-3)
    peaks = {row["program"]: (row["on"], row["gib"]) for row in split["programs"]}
    weights = on["samplers"]["sampler weights"]
    assert peaks["adopt"] == ("samplers", pytest.approx(sum(on["samplers"].values()) + weights, abs=3e-3))
    assert peaks["publish"] == ("learners", pytest.approx(sum(on["learners"].values()) + weights, abs=3e-3))
    assert peaks["update"][0] == "learners" and peaks["decode"][0] == "samplers"
    assert [(group["on"], group["devices"]) for group in split["groups"]] == [("learners", 8), ("samplers", 8)]
    assert split["peak_gib"] == max(group["peak_gib"] for group in split["groups"])
    assert split["executed_tflop"] == alone["executed_tflop"]
    assert split["step_s"]["floor"] == pytest.approx(alone["step_s"]["floor"]), "by those that learn"
    assert "samplers: peak" in command.table(split | {"search": [], "advice": []})


def test_devices_that_only_sample_have_room_for_more_slots_and_the_advice_is_theirs(qwen):
    slots = {"slots": 64, "workers": 64}
    together = shapes.by_shapes(shapes.request(sampling(qwen, **slots), "v5e:4x4", "fsdp=16"))
    wanted = shapes.request(shapes.with_settings(apart(qwen, 2, **slots), 8, "full"), "v5e:4x4", "fsdp=8")
    report = shapes.by_shapes(wanted)
    fits = {group["on"]: group["fits"] for group in report["groups"]}
    assert fits == {"learners": True, "samplers": False} and not report["fits"] and not together["fits"]
    (advice,) = shapes.advice(wanted, report, shapes.search(wanted))
    tensor, fewer = map(int, re.findall(r"rollout\.(?:tensor|slots)=(\d+)", advice))
    changed = sampling(wanted.config, tensor=tensor, slots=fewer, workers=fewer)
    assert shapes.by_shapes(shapes.request(changed, "v5e:4x4", "fsdp=8"))["fits"]


def test_a_search_for_a_split_run_is_over_meshes_of_those_that_learn(qwen):
    wanted = shapes.request(shapes.with_settings(apart(qwen, 2), 8, False), "v5e:4x4", None)
    assert wanted.mesh == {"data": 8, "fsdp": 1, "tensor": 1}
    found = shapes.search(wanted)
    assert found[0]["fits"] and {math.prod(row["mesh"].values()) for row in found} == {8}


@pytest.mark.parametrize(
    ("count", "tensor", "said"),
    [
        (4, 1, "sampler_devices=4 leaves none of a host's 4 devices to learn: set at most 3"),
        (2, 4, "rollout.tensor=4 does not divide the 2 devices that sample: set rollout.tensor=2"),
    ],
)
def test_devices_of_a_host_that_cannot_be_shared_out_are_refused(qwen, count, tensor, said):
    with pytest.raises(UserError, match=said):
        shapes.request(apart(qwen, count, tensor=tensor), "v5e:4x4", None)


def test_a_head_in_chunks_too_small_for_a_slice_is_named_with_a_size_that_is_not(qwen):
    few, enough = (dataclasses.replace(qwen, logprob_chunk=chunk) for chunk in (128, 1024))
    warned = [shapes.by_shapes(shapes.request(config, "v5e:4x4", "fsdp=16"))["warnings"] for config in (few, enough)]
    (said,) = warned[0]
    assert said.startswith("logprob_chunk=128: ") and said.endswith("set logprob_chunk=1024")
    assert not warned[1]


def test_the_torus_rule():
    v5p = parse_topology("v5p:4x4x4")
    assert spans_torus(v5p, parse_mesh("fsdp=64", 64)) and not spans_torus(v5p, parse_mesh("data=4,fsdp=16", 64))
    v6e = parse_topology("v6e:16x16")
    assert spans_torus(v6e, parse_mesh("fsdp=256", 256)) and not spans_torus(v6e, parse_mesh("data=4,fsdp=64", 256))
    assert not spans_torus(parse_topology("v5e:4x4"), parse_mesh("fsdp=16", 16))


def test_devices_are_counted_as_jax_counts_them():
    counts = {"v5e:4x4": 16, "v5p:4x4x4": 64, "v6e:16x16": 256, "TPU7x:4x4x4": 128, "v4:2x2x1": 8}
    assert {name: parse_topology(name).devices for name in counts} == counts
    assert {kind: chip.gib for kind, chip in CHIPS.items() if kind != "v4"} == {
        "v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74
    }  # fmt: skip


@pytest.mark.parametrize("name", ["v5p-128", "v5e", "v5e:4", "h100:8x8", "v5e:0x4"])
def test_a_name_that_is_no_topology_is_refused(name):
    with pytest.raises(UserError, match="such as v5p:4x4x4"):
        parse_topology(name)


@pytest.mark.parametrize("mesh", ["fsdp=3", "fsdp=-1,data=-1", "expert=4", "fsdp", "data=4,fsdp=8"])
def test_a_mesh_that_cannot_be_is_refused(mesh):
    with pytest.raises(UserError, match="--mesh"):
        parse_mesh(mesh, 16)


def test_a_mesh_takes_what_is_left():
    assert parse_mesh("data=-1,fsdp=4", 16) == {"data": 4, "fsdp": 4, "tensor": 1}
    assert parse_mesh(None, 16) == {"data": 16, "fsdp": 1, "tensor": 1}


def test_heads_that_do_not_divide_are_named(qwen):
    with pytest.raises(UserError, match=r"layers\.key .* smaller axes"):
        shapes.by_shapes(shapes.request(qwen, "v5e:4x4", "tensor=16"))


def test_micro_batches_that_leave_devices_idle_are_refused(qwen):
    with pytest.raises(UserError, match=r"loop\.micro_rows=8 .* set loop\.micro_rows=16"):
        shapes.by_shapes(shapes.request(shapes.with_settings(qwen, 8, "full"), "v5e:4x4", "fsdp=16"))


def test_the_command_prints_a_table_keeps_a_file_and_exits_by_the_verdict(qwen, tmp_path, capsys):
    command = ["plan", qwen_config.__file__, "--topology", "v5p:2x2x1", "--mesh", "fsdp=4", "--level", "shapes"]
    assert main([*command, "--save", str(tmp_path / "plan.json"), "--search"]) == 0
    out = capsys.readouterr().out
    assert "fits: peak" in out and "floor / point / ceiling" in out and "tried" in out
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["fits"] and math.isclose(kept["headroom_gib"], kept["limit_gib"] - kept["peak_gib"], abs_tol=1e-3)
    assert main([*command, "--json", "rollout.slots=16", "rollout.context=16384", "loop.width=16384"]) == 0
    assert json.loads(capsys.readouterr().out)["resident"][-1]["gib"] > kept["resident"][-1]["gib"]
    command[3] = "v5e:2x2"
    assert main([*command, "rollout.slots=64"]) == 1
    assert "does NOT fit" in capsys.readouterr().out
