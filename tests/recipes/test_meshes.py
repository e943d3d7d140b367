"""A run's mesh: what is refused, where params and optimizer state lie, and that a run goes on under another one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.learner.optimizers import adamw
from agentrl_jax.learner.placement import placed, placed_like
from agentrl_jax.learner.state import init_state
from agentrl_jax.models import llama
from agentrl_jax.models.lora import Lora, LoraParams
from agentrl_jax.recipes import meshes
from agentrl_jax.recipes.checks import check
from agentrl_jax.recipes.config import MeshShape, PretrainedPolicy
from agentrl_jax.recipes.directory import prepare
from agentrl_jax.recipes.plan import shapes
from agentrl_jax.runtime import fleet
from agentrl_jax.runtime.publish import publish
from tests.recipes.test_checks import good, with_
from tests.recipes.tori import torus

MODEL = llama.LlamaConfig(vocab_size=64, width=16, layers=2, heads=4, kv_heads=2, head_width=4, mlp_width=32)
ADAFACTOR = optax.adafactor(1e-3, min_dim_size_to_factor=4)


def on(**mesh):
    return replace(good(), mesh=MeshShape(**mesh))


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({}, {"data": 8, "fsdp": 1, "tensor": 1, "expert": 1}),
        ({"fsdp": 4}, {"data": 2, "fsdp": 4, "tensor": 1, "expert": 1}),
        ({"data": 1, "fsdp": -1, "tensor": 2}, {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1}),
    ],
)
def test_one_axis_takes_the_devices_that_the_others_leave(mesh, expected):
    assert meshes.sizes(MeshShape(**mesh), 8) == expected == dict(meshes.make(on(**mesh)).shape)


def test_an_axis_runs_along_links_of_the_torus():
    for shape in ((4, 4, 1, 1), (1, 16, 1, 1)):
        laid = sharding.arranged(shape, torus(4, 4))
        assert len({device.id for device in laid.flat}) == 16 and None not in sharding.row_owners(laid)
        ring = [device.coords for device in laid.reshape(-1, shape[1])[0]]
        steps = [sorted(abs(a - b) % 3 for a, b in zip(one, two, strict=True)) for one, two in pairwise(ring)]
        far = sum(step != [0, 0, 1] for step in steps)
        assert far <= 1, "of a ring over all chips one link is missing"


@pytest.mark.parametrize(
    ("shape", "devices"),
    [
        ((1, 4, 4, 1), torus(4, 4)),  # four heads' chips in a line are two hosts'
        ((1, 12, 1, 1), [device for device in torus(4, 4) if device.id not in (5, 7, 13, 15)]),
        ((2, 4, 1, 1), jax.devices()),
    ],
    ids=["rows of two hosts", "holes", "CPU"],
)
def test_devices_are_taken_as_they_come_where_a_torus_does_not_serve(shape, devices):
    laid = sharding.arranged(shape, devices)
    assert list(laid.flat) == list(devices) and laid.shape == shape and None not in sharding.row_owners(laid)


def test_devices_that_learn_sample_in_the_order_of_the_mesh(monkeypatch):
    order = jax.devices()[::-1]
    monkeypatch.setattr(sharding, "arranged", lambda shape, found: np.asarray(order, dtype=object).reshape(shape))
    assert meshes.samplers(good()) == list(meshes.make(good()).devices.flat) == order


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"fsdp": 0}, "mesh.fsdp=0: expected a number of devices, or -1"),
        ({"fsdp": -1}, "mesh.data=-1 and mesh.fsdp=-1: one axis"),
    ],
)
def test_a_mesh_that_no_devices_make_is_refused(mesh, said):
    with pytest.raises(UserError, match=said):
        check(on(**mesh))


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"fsdp": 3}, "the axes take 3 devices, and 8 are here: give sizes that multiply to 8"),
        ({"data": 2, "fsdp": 2}, "the axes take 4 devices, and 8 are here"),
        ({"tensor": 4}, "mesh.tensor=4 does not divide the policy's kv_heads=2: set mesh.tensor=2 and mesh.data=-1"),
        ({"expert": 2}, "mesh.expert=2: the policy has no experts to split: set mesh.expert=1"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_with_what_to_type(mesh, said):
    with pytest.raises(UserError) as refused:
        meshes.check_mesh(on(**mesh), MODEL)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_vocabulary_and_rows_that_do_not_divide_say_what_does():
    with pytest.raises(UserError, match=r"vocab_size=63: set mesh.tensor=1 and mesh.data=-1, or policy.vocab_size=62"):
        meshes.check_mesh(on(tensor=2), replace(MODEL, vocab_size=63))
    config = with_("sft", rows=12, micro_rows=12)(on(fsdp=2))
    with pytest.raises(UserError, match=r"sft.rows=12 .* 8 devices .* set it to 16"):
        meshes.check_mesh(config, MODEL)


@pytest.mark.parametrize(
    "optimizer", [adamw(1e-2), ADAFACTOR, optax.contrib.muon(1e-3)], ids=["adamw", "adafactor", "muon"]
)
def test_params_optimizer_state_and_step_lie_by_rule(optimizer):
    mesh = meshes.make(on(fsdp=2, tensor=2))
    places = meshes.placement(good(), MODEL, mesh)
    params = jax.jit(lambda key: llama.init(MODEL, key), out_shardings=places)(jax.random.key(0))
    assert placed(params) == places and places["layers"]["gate"].spec == P(None, "fsdp", "tensor")
    state = init_state(optimizer, params)
    assert placed(state.opt_state) == placed_like(jax.eval_shape(optimizer.init, params), params)
    everything = jax.tree.leaves(state)
    assert {leaf.sharding.mesh for leaf in everything} == {mesh}
    split = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.size >= MODEL.width * MODEL.mlp_width]
    assert all(leaf.addressable_shards[0].data.size * 4 == leaf.size for leaf in split)


def test_a_factored_moment_lies_as_what_is_left_of_its_parameter():
    places = meshes.placement(good(), MODEL, meshes.make(on(fsdp=2, tensor=2)))
    shapes = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), llama.shapes(MODEL), places
    )
    factored = placed_like(jax.eval_shape(ADAFACTOR.init, shapes), shapes)[0]
    assert factored.v_row["layers"]["gate"].spec == P(None, "fsdp")
    assert factored.v_col["layers"]["gate"].spec == P(None, "tensor")
    assert factored.count.spec == factored.v["layers"]["gate"].spec == P()


@pytest.mark.parametrize("apart", [False, True], ids=["colocated", "split"])
def test_a_publication_is_whole_on_every_device_and_equal(apart):
    mesh = meshes.make(on(fsdp=4, tensor=2))
    params = llama.init(MODEL, jax.random.key(0))
    split = jax.device_put(params, meshes.placement(good(), MODEL, mesh))
    onto = fleet.spread(jax.devices()[6:]) if apart else None
    place = sharding.replicated(mesh) if apart else fleet.spread(jax.devices())
    with jax.transfer_guard("disallow"):
        published = publish(MODEL, split, place, onto=onto)
    assert all(leaf.sharding == place for leaf in jax.tree.leaves(published))
    jax.tree.map(np.testing.assert_array_equal, published, publish(MODEL, params))


@pytest.mark.parametrize("base", ["full", "int8"])
def test_adapters_are_whole_and_what_is_frozen_is_split(base):
    if base != "full":
        pytest.importorskip("qwix", reason="quantised projections need qwix: pip install qwix")
    config = replace(good(), policy=PretrainedPolicy(path="none", lora=Lora(rank=2, base=base)))
    found = meshes.placement(config, MODEL, meshes.make(on(fsdp=2, tensor=2)))
    assert isinstance(found, LoraParams) and found.adapters["query"]["a"].spec == P()
    first, *scales = jax.tree.leaves(found.base["layers"]["gate"])
    assert first.spec == P(None, "fsdp", "tensor") and len(scales) == (base != "full")


@pytest.mark.parametrize(
    ("mesh", "width", "said"),
    [
        ({"sequence": True}, 256, "mesh.sequence=True has no effect at mesh.tensor=1: set mesh.tensor=2"),
        ({"sequence": True, "tensor": 2}, 255, "sft.width=255 does not divide over mesh.tensor=2"),
    ],
)
def test_columns_that_cannot_be_split_are_refused(mesh, width, said):
    with pytest.raises(UserError, match=said):
        meshes.check_mesh(with_("sft", width=width)(on(**mesh)), MODEL)


def test_a_plan_is_for_the_mesh_of_the_config_unless_another_is_asked_for():
    assert shapes.request(on(fsdp=4), "v5e:4x4", None).mesh == {"data": 4, "fsdp": 4, "tensor": 1}
    assert shapes.request(on(fsdp=4), "v5e:4x4", "fsdp=16").mesh == {"data": 1, "fsdp": 16, "tensor": 1}


def test_another_mesh_is_no_other_config(tmp_path):
    prepare(good(), tmp_path / "run", resume=False)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["mesh"]["data"] == -1
    prepare(on(fsdp=4), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="seed was 0, is 1"):
        prepare(replace(on(fsdp=4), seed=1), tmp_path / "run", resume=True)


def test_what_another_machine_asks_for_is_no_other_config(tmp_path):
    prepare(good(), tmp_path / "run", resume=False)
    elsewhere = with_("rollout", slots=256, tensor=2)(with_("loop", offload=True)(on(fsdp=4)))
    prepare(replace(elsewhere, remat=True), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match=r"loop\.group was 8, is 4"):
        prepare(with_("loop", group=4)(elsewhere), tmp_path / "run", resume=True)


def test_a_run_that_knew_fewer_settings_goes_on_with_their_defaults(tmp_path):
    prepare(good(), tmp_path / "run", resume=False)
    file = tmp_path / "run" / "config.json"
    older = json.loads(file.read_text())
    for section, names in {"loop": ("max_lag", "rate_cap", "optimizer"), "policy": ("param_dtype",)}.items():
        for name in names:
            del older[section][name]
    del older["hosts"], older["checkpoints"]
    file.write_text(json.dumps(older))
    prepare(good(), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match=r"loop\.optimizer was None, is 'muon'"):
        prepare(with_("loop", optimizer="muon")(good()), tmp_path / "run", resume=True)


def test_a_run_goes_on_with_the_slots_that_another_machine_needs(tmp_path):
    first = good()
    prepare(first, tmp_path / "run", resume=False)
    prepare(replace(first, rollout=replace(first.rollout, slots=8, workers=4, bank=8)), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match=r"temperature was 1\.0, is 0\.5"):
        prepare(replace(first, rollout=replace(first.rollout, temperature=0.5)), tmp_path / "run", resume=True)
