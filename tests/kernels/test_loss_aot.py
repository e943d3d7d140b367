"""The loss head compiled for a TPU that is not here: memory, matmuls and collectives at T=32768, D=4096, V=151936."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from agentrl_jax.recipes.plan import hlo
from benchmarks import loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs the TPU's compiler: pip install -e '.[tpu]'"
    ),
]
SIZE = loss.Size(32768, 4096, 151936)
ALL = 1.0  # share of tokens that are actions


@pytest.fixture(scope="module")
def devices():
    return loss.tpu_devices("v5p:2x2x1")


def compiled(devices, what, who):
    functions = {(kind, name): function for kind, name, function in loss.contenders("tpu")}
    mesh = Mesh(np.asarray(devices[:1]), ("one",))
    inputs = loss.placed(loss.shapes(SIZE, jnp.bfloat16), mesh, P())
    program = loss.compile_for(functions[what, who], inputs, "tpu")
    return program, loss.figures(SIZE, ALL, program)


@pytest.mark.parametrize(
    ("what", "who", "gib", "matmuls"),
    [
        ("train", "single pass", 0.6, 3.05),
        ("train", "single pass, f32 sums", 3.0, 3.05),
        ("train", "two passes", 0.6, 4.05),
        ("score", "chunks", 0.6, 1.05),
    ],
)
def test_memory_and_matmuls_on_one_chip(devices, what, who, gib, matmuls):
    program, found = compiled(devices, what, who)
    assert found["temp_gib"] <= gib
    assert round(matmuls) - 0.01 <= found["matmuls"] <= matmuls
    assert not found["holds_logits"]
    assert hlo.largest_buffer(program.text) <= SIZE.vocabulary * SIZE.width < SIZE.tokens * SIZE.vocabulary


def test_scoring_by_the_kernel_holds_no_logits_at_all(devices):
    program, found = compiled(devices, "score", "pallas")
    assert found["temp_gib"] <= 0.1
    assert "tpu_custom_call" in program.text
    assert not hlo.holds(program.text, loss.CHUNK, SIZE.vocabulary)


def test_a_vocabulary_over_four_chips_is_never_gathered(devices):
    mesh = Mesh(np.asarray(devices), ("vocab",))
    function, inputs = loss.vocabulary_sharded(mesh, SIZE, jnp.bfloat16)
    program = loss.compile_for(function, inputs, "tpu")
    crossing = hlo.collectives(program.text)
    assert crossing and all(kind.startswith("all-reduce") for kind, _ in crossing)
    assert max(size for _, size in crossing) <= loss.CHUNK * SIZE.width
    found = loss.figures(SIZE, ALL, program)
    assert found["matmuls"] <= 3.05 / 4 and not found["holds_logits"]
