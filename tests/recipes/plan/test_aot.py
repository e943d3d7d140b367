"""`agentrl plan` with the TPU's own compiler, for slices that are not here: what it walks, refuses and warns of."""

import dataclasses
import importlib.util
import json
import os
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from agentrl_jax.cli import plan as command
from agentrl_jax.cli.main import main
from agentrl_jax.kernels.fused_loss import logprob_loss
from agentrl_jax.recipes.plan import compiling, hlo, memory, shapes
from agentrl_jax.recipes.plan.topology import parse_mesh, parse_topology
from agentrl_jax.sharding import gathered, replicated, rows, spec
from tests.recipes import qwen_config
from tests.recipes.plan.test_shapes import SHARED, apart, qwen  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs the TPU's compiler: pip install -e '.[tpu]'"
    ),
]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def described(monkeypatch):
    """libtpu describes slices and looks for none."""
    for name, value in command.ENVIRONMENT.items():
        monkeypatch.setitem(os.environ, name, value)


def small(config, topology, mesh, *, layers=2, **rollout):
    """A decoder of small layers on rows of 1024 tokens."""
    wanted = shapes.request(config, topology, mesh)
    model = dataclasses.replace(wanted.model, width=512, heads=8, kv_heads=4, mlp_width=1536, vocab_size=8192)
    loop = dataclasses.replace(config.loop, width=1024, micro_rows=16)
    config = dataclasses.replace(
        config, loop=loop, logprob_chunk=256, rollout=dataclasses.replace(config.rollout, **rollout)
    )
    return wanted._replace(config=config, model=dataclasses.replace(model, layers=layers))


def compiled(wanted, name, tmp_path):
    return compiling.compile_all(wanted, tmp_path, only=(name,))[name]


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("form", "products"), [("single_pass", 3), ("two_pass", 4)])
def test_the_loss_head_executes_as_many_products_as_the_formula_says(topology, form, products):
    tokens, width, vocabulary, chunk = 4096, 512, 8192, 1024
    mesh = compiling.host_mesh(parse_topology(topology), 1)
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))  # noqa: E731
    ids, floats = put(jnp.int32, 1, tokens), put(jnp.float32, 1, tokens)

    def both(hidden, matrix, ids, mask, data):
        loss = partial(logprob_loss, lambda lp, entropy, data: (jnp.sum(lp * data), None), chunk=chunk, form=form)
        return jax.value_and_grad(lambda h, m: loss(h, m, ids, ids, mask, data)[0], (0, 1))(hidden, matrix)

    arrays = put(jnp.bfloat16, 1, tokens, width), put(jnp.bfloat16, vocabulary, width)
    lowered = jax.jit(both).trace(*arrays, ids, put(jnp.bool_, 1, tokens), floats).lower(lowering_platforms=("tpu",))
    found = compiling.figures_of(lowered, 1, tokens // chunk)
    assert found["matmul_flops"] == pytest.approx(products * 2.0 * tokens * width * vocabulary, rel=0.01)


def test_a_scan_over_layers_executes_what_layers_one_after_another_extrapolate_to(qwen, tmp_path):  # noqa: F811
    of = lambda layers: compiled(small(qwen, "v5e:2x2", "fsdp=4", layers=layers), "update", tmp_path)["matmul_flops"]  # noqa: E731
    one, three, many = of(1), of(3), of(12)  # up to 4 are laid out one after another
    assert many == pytest.approx(one + 11 * (three - one) / 2, rel=0.01)


@pytest.mark.parametrize(("topology", "tensor"), [("v5e:2x2", 1), ("v5p:2x2x1", 1), ("v6e:2x2", 2)])
def test_decoding_copies_no_pages(qwen, tmp_path, topology, tensor):  # noqa: F811
    wanted = small(qwen, topology, "fsdp=-1", slots=64, context=32768, tensor=tensor)
    found = compiled(wanted, "decode", tmp_path)
    pools = memory.parts(
        wanted.config, wanted.model, memory.abstract_mesh(wanted.mesh), memory.Host(wanted.topology.host_devices)
    ).pools
    assert found["temporaries"] < memory.held("pages", pools).bytes / 8
    assert {row["kind"] for row in found["collectives"]} <= {"all-gather", "all-reduce"}
    logits = memory.ROWS * wanted.model.vocab_size * 4  # what is gathered, not the head
    assert all(one["bytes"] <= logits for one in found["heaviest"])


def test_an_update_is_compiled_for_the_devices_that_learn_where_others_sample(qwen, tmp_path):  # noqa: F811
    found = compiled(small(apart(qwen, 2), "v5e:4x4", "fsdp=8"), "update", tmp_path)
    assert not found["oom"] and {row["group"] for row in found["collectives"]} == {8}


@pytest.mark.parametrize("name", ["update", "score"])
def test_a_vocabulary_over_tensor_is_projected_where_it_lies(qwen, tmp_path, monkeypatch, name):  # noqa: F811
    texts, read, vocabulary, tokens = [], compiling.reading, 9216, 16 * 1024 // 4
    monkeypatch.setattr(compiling, "reading", lambda text, *rest: texts.append(text) or read(text, *rest))
    wanted = small(qwen, "v5e:4x4", "data=4,tensor=4")
    loop = dataclasses.replace(wanted.config.loop, updates_per_batch=2)
    wanted = wanted._replace(
        config=dataclasses.replace(wanted.config, loop=loop),
        model=dataclasses.replace(wanted.model, vocab_size=vocabulary),
    )
    found = compiled(wanted, name, tmp_path)
    assert {row["kind"] for row in found["collectives"]} == {"all-reduce"}
    share = max(vocabulary // 4, tokens) * wanted.model.width * 4  # of hidden states, or of the head's gradient
    assert all(one["bytes"] <= 1.01 * share for one in found["heaviest"])
    chunk = memory.head_chunks(wanted.config, memory.abstract_mesh(wanted.mesh))[0]
    assert hlo.holds(texts[0], chunk, vocabulary // 4)
    assert not any(hlo.holds(texts[0], rows, vocabulary) for rows in (chunk, tokens))


def test_what_does_not_fit_is_refused_in_seconds_with_what_it_needs():
    mesh = compiling.host_mesh(parse_topology("v5e:2x2"), 1)
    large = jax.ShapeDtypeStruct((3 << 30,), jnp.float32, sharding=rows(mesh))
    lowered = jax.jit(lambda x: jnp.sin(x)).trace(large).lower(lowering_platforms=("tpu",))
    found = compiling.figures_of(lowered, 1, 1)
    assert found["oom"] and found["peak"] >= 24 * GIB
    assert found["available"] == pytest.approx(15.75 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("topology", "mesh", "gathers"),
    [
        ("v5e:4x4", "fsdp=16", True),
        ("v5p:4x4x4", "data=4,fsdp=16", True),
        ("v6e:16x16", "data=4,fsdp=64", True),
        ("v6e:16x16", "fsdp=256", False),
        ("v5e:4x4", "fsdp=4,tensor=4", True),  # laid a host after another: a tensor axis lies in one
        ("v5p:4x4x4", "data=4,fsdp=4,tensor=4", True),
    ],
)
def test_weights_of_every_size_are_gathered_as_such_where_no_axis_spans_the_slice(topology, mesh, gathers):
    """Keys of 8 MB are the least that a layer of 8 B parameters gathers, embeddings aside."""
    slice_ = parse_topology(topology)
    sizes = parse_mesh(mesh, slice_.devices)
    devices = compiling.topology_mesh(topology, sizes)
    put = lambda names, *shape: jax.ShapeDtypeStruct(  # noqa: E731
        shape, jnp.bfloat16, sharding=NamedSharding(devices, spec(names))
    )
    axes = {"key": ("width", "kv_heads"), "query": ("width", "heads")}
    weights = {"key": put(axes["key"], 4096, 1024), "query": put(axes["query"], 4096, 4096)}

    def product(x, weights):
        found = {}
        for name, weight in weights.items():
            found[name] = jax.nn.silu(x) @ gathered(weight, axes[name], jnp.bfloat16)
            x = x * 2 + jnp.sum(found[name], -1, keepdims=True)
        return found

    lowered = jax.jit(product).trace(put(("rows",), 256, 64, 4096), weights).lower(lowering_platforms=("tpu",))
    found = compiling.figures_of(lowered, slice_.devices, 1)["collectives"]
    assert "collective-permute" not in {row["kind"] for row in found}
    moved = {row["kind"]: row["bytes"] for row in found}
    assert (moved.get("all-gather") == 4096 * (1024 + 4096) * 2 / sizes["tensor"]) == gathers
    assert shapes.spans_torus(slice_, sizes) != gathers


LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36}
LONG = ["loop.width=32768", "rollout.context=32768", "loop.updates_per_batch=2"]
LONG += [f"rollout.{name}=4" for name in ("slots", "workers", "bank")]
CASES = {
    "v5p:4x4x4": ["--mesh", "data=4,fsdp=16", "loop.tasks=8", "loop.micro_rows=64"],
    "v6e:16x16": ["--mesh", "data=4,fsdp=64", "loop.tasks=32", "loop.micro_rows=256", "rollout.tensor=4"],
}


@pytest.mark.parametrize("topology", CASES)
def test_qwen3_of_8_b_on_rows_of_32k_tokens_fits_and_falls_into_no_trap(tmp_path, monkeypatch, capsys, topology):
    (tmp_path / "config.json").write_text(json.dumps({**SHARED, **LARGE, "tie_word_embeddings": False}))
    monkeypatch.setenv("AGENTRL_QWEN", str(tmp_path))
    arguments = ["plan", qwen_config.__file__, "--topology", topology, "--json", "--timeout", "3000"]
    assert main([*arguments, *CASES[topology], *LONG]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["program"] for row in report["programs"] if row["by"] != "shapes"} >= {"update", "apply", "score"}
    kinds = {row["kind"] for row in report["collectives"]}
    assert "all-gather" in kinds and "collective-permute" not in kinds
    assert not [text for text in report["warnings"] if text.startswith(("update", "apply", "score", "decode"))]


def test_qwen3_of_0_6_b_fits_and_falls_into_no_trap(qwen, capsys):  # noqa: F811
    arguments = ["--topology", "v5e:4x4", "--mesh", "fsdp=16", "--json", "--timeout", "3000", "rollout.slots=8"]
    arguments = ["plan", qwen_config.__file__, *arguments, "rollout.workers=8", "rollout.bank=8"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    update = next(row for row in report["programs"] if row["program"] == "update")
    moments = next(row["gib"] for row in report["resident"] if row["what"] == "optimizer state")
    assert update["peak"] + moments < 2.2
    assert {row["kind"] for row in report["collectives"]} <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert report["executed_tflop"] == pytest.approx(561.06, rel=0.01)
    assert not [text for text in report["warnings"] if text.startswith("update")]
    assert main(arguments) == 0
    assert all(row["cached"] for row in json.loads(capsys.readouterr().out)["programs"] if "cached" in row)
