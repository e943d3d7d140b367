"""What `plan` counts in traced and compiled programs, against formulas, and against programs written another way."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax import sharding
from agentrl_jax.cli.main import main
from agentrl_jax.kernels.fused_loss import logprob_loss
from agentrl_jax.models import llama
from agentrl_jax.recipes.plan import compiling, flops, hlo, levels, memory, shapes
from agentrl_jax.recipes.plan.programs import programs
from tests.recipes import qwen_config
from tests.recipes.plan.test_shapes import qwen  # noqa: F401


def counted(wanted):
    listed = programs(wanted.config, wanted.model, memory.abstract_mesh(wanted.mesh))
    return {p.name: flops.count(p.traced, p.loops).weights for p in listed}


@pytest.mark.parametrize(("form", "products"), [("single_pass", 3), ("two_pass", 4)])
def test_the_loss_head_is_as_many_products_as_the_formula_says(form, products):
    tokens, width, vocabulary, chunk = 4096, 64, 5000, 512
    shape = (1, tokens)
    put = lambda dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    hidden = jax.ShapeDtypeStruct((*shape, width), jnp.float32)
    matrix = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32)

    def loss(logprobs, entropy, data):
        return jnp.sum(logprobs * data), None

    def both(hidden, matrix, ids, parents, mask, data):
        function = partial(logprob_loss, loss, chunk=chunk, form=form)
        return jax.value_and_grad(lambda h, m: function(h, m, ids, parents, mask, data)[0], (0, 1))(hidden, matrix)

    traced = jax.jit(both).trace(hidden, matrix, put(jnp.int32), put(jnp.int32), put(jnp.bool_), put(jnp.float32))
    found = flops.count(traced, tokens // chunk)
    assert sum(found) == pytest.approx(products * 2.0 * tokens * width * vocabulary, rel=0.01)


@pytest.mark.parametrize("remat", [False, "full"])
def test_a_scan_over_layers_is_what_layers_laid_out_one_after_another_extrapolate_to(qwen, remat):  # noqa: F811
    wanted = shapes.request(shapes.with_settings(qwen, 16, remat), "v5e:4x4", "fsdp=16")
    of = lambda layers: counted(wanted._replace(model=dataclasses.replace(wanted.model, layers=layers)))["update"]  # noqa: E731
    one, three, all_layers = of(1), of(3), of(28)  # up to 4 are laid out one after another
    assert all_layers == pytest.approx(one + 27 * (three - one) / 2, rel=0.01)


@pytest.mark.parametrize("remat", [False, "full"])
def test_a_traced_step_is_what_the_formula_by_shapes_says(qwen, remat):  # noqa: F811
    wanted = shapes.request(shapes.with_settings(qwen, 16, remat), "v5e:4x4", "fsdp=16")
    report = shapes.by_shapes(wanted)
    found = levels.traced(wanted, report)
    assert found["level"] == "traced" and found["flops_by"] == "traced"
    assert found["executed_tflop"] == pytest.approx(report["executed_tflop"], rel=0.01)


MODEL = llama.LlamaConfig(
    vocab_size=128, width=32, layers=5, heads=4, kv_heads=4, head_width=8, mlp_width=64, qk_norm=True
)


def gradients(mesh):
    """Loss and gradients of a small decoder, parameters and rows by rule; and the program's text."""
    places = sharding.shardings(mesh, llama.logical_axes(MODEL))
    key = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf, place: jax.device_put(key.normal(0, 0.2, leaf.shape).astype(np.float32), place),
        llama.shapes(MODEL), places,
    )  # fmt: skip
    ids = np.random.default_rng(1).integers(0, 128, (8, 16)).astype(np.int32)
    columns = np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16))
    tokens, positions, ends = (jax.device_put(x, sharding.rows(mesh)) for x in (ids, columns, 0 * columns + 16))

    def loss(params):
        return jnp.mean(jnp.square(llama.hidden(MODEL, params, tokens, positions, ends, "full")))

    function = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
    value, grads = function(params)
    return float(value), jax.tree.map(np.asarray, grads), function.as_text()


def test_weights_are_gathered_a_layer_at_a_time_and_change_nothing():
    devices = np.asarray(jax.devices())
    one, expected, _ = gradients(Mesh(devices.reshape(8, 1, 1, 1), sharding.AXES))
    value, found, text = gradients(Mesh(devices.reshape(2, 4, 1, 1), sharding.AXES))
    assert value == pytest.approx(one, rel=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6), found, expected)
    exchanged = hlo.exchanges(text, 8)
    assert not [one for one in exchanged if one.kind == "collective-permute"]
    gathers = [one for one in exchanged if one.kind == "all-gather"]
    largest = max(128 * 32, 32 * 64) * 4
    assert gathers and max(one.bytes for one in gathers) <= largest
    assert {one.count for one in gathers} >= {MODEL.layers}


def test_collectives_in_loops_are_counted_as_often_as_they_run():
    mesh = Mesh(np.asarray(jax.devices()), ("x",))

    def step(x):
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c, "x") * 0.1, None), x, length=6)[0]

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    text = mapped.lower(jnp.ones((4, 8))).compile().as_text()
    (found,) = hlo.exchanges(text, 8)
    assert found == hlo.Collective("all-reduce", 8, 4 * 8 * 4, 6)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3}}", 2),
        ("[4,2]<=[8]", 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 4),
        ("mesh['a'=8] {'a':(2)4}", 4),
        ("{}", 8),
    ],
)
def test_replica_groups_are_read_in_every_way_they_are_written(groups, size):
    text = f"""ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %r = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add
}}
"""
    assert hlo.exchanges(text, 8) == [hlo.Collective("all-reduce", size, 16, 1)]


@pytest.mark.parametrize(("stride", "trips"), [(1, 8), (2, 4)])
def test_a_loop_runs_up_to_the_constant_of_its_condition_by_the_stride_of_its_body(stride, trips):
    text = f"""%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{{0}} get-tuple-element(%p), index=1
  %c = s32[] constant({stride})
  %next = s32[] add(%i, %c)
  %r = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={{}}, to_apply=%add
  ROOT %t = (s32[], f32[4]{{0}}) tuple(%next, %r)
}}

%condition (p: (s32[], f32[4])) -> pred[] {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(8)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  ROOT %w = (s32[], f32[4]{{0}}) while(%p), condition=%condition, body=%body
}}
"""
    (found,) = hlo.exchanges(text, 8, trips=100)
    assert found.count == trips


def test_a_window_that_lies_mostly_outside_is_no_work():
    """How a TPU's compiler writes [5, 64] x [16, 8, 64] -> [16, 5, 8]."""
    text = """ENTRY %main (a: f32[5,1,64], b: f32[16,8,64]) -> f32[5,16,8] {
  %a = f32[5,1,64]{2,1,0} parameter(0)
  %b = f32[16,8,64]{2,1,0} parameter(1)
  ROOT %r = f32[5,16,8]{2,1,0} convolution(%a, %b), window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=b0f_0oi->b0f
}
"""
    assert hlo.matmul_flops(text) == 2 * 5 * 16 * 8 * 64


def test_what_does_not_fit_says_what_it_would_need():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (113.83G) exceeds available HBM (31.24G). HLO module: jit_accumulate."
    )
    found = compiling.too_large(message)
    assert (found["peak"] / (1 << 30), found["available"] / (1 << 30)) == pytest.approx((113.83, 31.24))
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory "
        "space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G."
    )
    found = compiling.too_large(message)
    assert (found["peak"], found["available"]) == (20.5 * (1 << 30), 15.75 * (1 << 30))
    with pytest.raises(RuntimeError, match="something else"):
        compiling.too_large("INTERNAL: something else")


def test_compiled_figures_take_the_place_of_estimates(qwen):  # noqa: F811
    wanted = shapes.request(qwen, "v5p:4x4x4", "data=4,fsdp=16")._replace(config=shapes.with_settings(qwen, 64, "full"))
    wanted = wanted._replace(config=dataclasses.replace(
        wanted.config, loop=dataclasses.replace(wanted.config.loop, tasks=8)))  # fmt: skip
    report = shapes.by_shapes(wanted)
    figures = {
        "oom": False, "arguments": 1 << 30, "temporaries": 2 << 30, "outputs": 0, "peak": 3 << 30, "matmul_flops": 1e12,
        "cycles": 1.75e9, "heaviest": [], "versions": ["jax 0"],
        "collectives": [
            {"kind": "all-reduce", "group": 16, "count": 10, "bytes": 10 << 30},
            {"kind": "collective-permute", "group": 64, "count": 3, "bytes": 1 << 20},
        ],
    }  # fmt: skip
    found = levels.compiled(wanted, report, {"update": figures, "apply": figures | {"collectives": []}})
    own = {row["what"]: row["gib"] for row in report["resident"]}
    update = next(row for row in found["programs"] if row["program"] == "update")
    assert update["gib"] == pytest.approx(sum(own.values()) + 3 - own["parameters"] - own["batch"], abs=2e-3)
    assert [(row["kind"], row["axis"], row["count"]) for row in found["collectives"]] == [
        ("all-reduce", "fsdp", 10), ("collective-permute", "dataxfsdp", 3)
    ]  # fmt: skip
    assert found["executed_tflop"] == 2 * 64
    assert any("3 collective-permutes" in text for text in found["warnings"])
    assert any("gathered by all-reduces" in text for text in found["warnings"])
    full = levels.compiled(
        wanted, report, {"update": figures | {"oom": True, "peak": 100 << 30, "available": 96 << 30}}
    )
    assert not full["fits"]
    assert "update: the compiler refuses it: 100.00 GiB required, 96.00 available" in full["warnings"]


def test_axes_are_named_by_the_chips_of_a_group():
    mesh = {"data": 4, "fsdp": 16, "tensor": 1}
    assert [levels.axes_named(n, mesh) for n in (4, 16, 64, 3)] == ["data", "fsdp", "dataxfsdp", "3 chips"]
    assert levels.axes_named(4, {"data": 4, "fsdp": 1, "tensor": 4}) == "data or tensor"


def test_compiling_without_the_compiler_says_what_to_install(qwen, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("agentrl_jax.cli.plan._has_libtpu", lambda: False)
    assert main(["plan", qwen_config.__file__, "--topology", "v5e:4x4", "--level", "compiled"]) == 2
    assert "pip install -e '.[tpu]'" in capsys.readouterr().err


def test_figures_are_read_off_an_executable():
    """On a CPU, where a compiler is at hand; its text is what a TPU's is but for estimates of cycles."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4, 1, 1), sharding.AXES)
    put = lambda shape, *axes: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))  # noqa: E731

    def step(x, weights):
        return jax.lax.scan(lambda x, w: (x @ sharding.gathered(w, ("width", "mlp"), w.dtype), None), x, weights)[0]

    arguments = put((16, 32), ("data", "fsdp")), put((6, 32, 32), None, "fsdp")
    found = compiling.figures_of(jax.jit(step).lower(*arguments), 8, 1)
    assert not found["oom"] and found["arguments"] == (16 * 32 / 8 + 6 * 32 * 32 / 4) * 4
    assert found["peak"] > 0
    assert found["matmul_flops"] == 6 * 2 * 2 * 32 * 32
    (gather,) = (row for row in found["collectives"] if row["kind"] == "all-gather")
    assert gather == {"kind": "all-gather", "group": 4, "count": 6, "bytes": 6 * 32 * 32 * 4}
