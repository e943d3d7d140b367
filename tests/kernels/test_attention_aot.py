"""Forest attention compiled for a TPU that is not here: it fits, holds no scores, and a mesh gathers nothing."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.kernels.attention import forest_attention
from agentrl_jax.recipes.plan import hlo
from benchmarks import loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs the TPU's compiler: pip install -e '.[tpu]'"
    ),
]
ROWS = 8
SMOLLM2, LLAMA3 = (9, 3, 64), (32, 8, 128)  # H, J, C


@pytest.fixture(scope="module")
def devices():
    return loss.tpu_devices("v5p:2x2x1")


def compiled(mesh, length, model, dtype, *, window=False, soft_cap=None):
    """Output and gradients of one layer's attention."""
    heads, groups, width = model

    def both(q, k, v, ends, positions, window, pull):
        reach = {} if window is None else {"positions": positions, "window": window}
        attend = partial(forest_attention, subtree_ends=ends, scale=width**-0.5, soft_cap=soft_cap, **reach)
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(pull)

    place = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    q, k = (place((ROWS, length, n, width), dtype, P("data", None, "tensor")) for n in (heads, groups))
    row, scalar = place((ROWS, length), jnp.int32, P("data")), place((), jnp.int32, P())
    return jax.jit(both).lower(q, k, k, row, row, scalar if window else None, q).compile()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("length", [2048, 8192])
@pytest.mark.parametrize("model", [SMOLLM2, LLAMA3])
@pytest.mark.parametrize("extra", [{}, {"window": True, "soft_cap": 50.0}])
def test_no_scores_are_held_on_one_chip(devices, dtype, length, model, extra):
    mesh = Mesh(np.asarray(devices[:1]).reshape(1, 1), ("data", "tensor"))
    program = compiled(mesh, length, model, dtype, **extra)
    heads, groups, width = model
    operands = ROWS * length * (2 * heads + 2 * groups) * max(width, 128) * jnp.dtype(dtype).itemsize  # q, k, v, out
    assert program.memory_analysis().temp_size_in_bytes <= 2.5 * operands
    text = program.as_text()
    assert text.count("tpu_custom_call") >= 3
    assert not hlo.holds(text, 1024, length)


def test_a_mesh_splits_rows_and_heads_and_gathers_nothing(devices):
    mesh = Mesh(np.asarray(devices).reshape(2, 2), ("data", "tensor"))
    one = Mesh(np.asarray(devices[:1]).reshape(1, 1), ("data", "tensor"))
    program, whole = (compiled(place, 2048, LLAMA3, jnp.bfloat16) for place in (mesh, one))
    assert hlo.collectives(program.as_text()) == []
    assert "tpu_custom_call" in program.as_text()
    temp = [x.memory_analysis().temp_size_in_bytes for x in (program, whole)]
    assert temp[0] <= 0.35 * temp[1]
