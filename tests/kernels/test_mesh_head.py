"""The loss head of arrays on a mesh: the numbers of one device, no device waits in the loop, one sum behind it."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax import sharding
from agentrl_jax.kernels.fused_loss import logprob_loss
from agentrl_jax.kernels.kept import pack
from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.kernels.mesh_head import split_logprobs, split_loss, split_of
from agentrl_jax.recipes.plan import hlo

V, D, ROWS, LENGTH, CHUNK = 12, 8, 8, 9, 4
SETTINGS = {"temperature": 0.7, "soft_cap": 3.0, "entropy": True, "accumulator": jnp.float32}
AXES = (sharding.axes_of("vocab"), sharding.axes_of("rows"), sharding.axes_of("width"))
MESHES = {f"{axis}{n}": {axis: n} for axis in ("data", "fsdp") for n in (2, 4, 8)}
MESHES |= {f"tensor{n}": {"tensor": n} for n in (2, 4)} | {"all2": {"data": 2, "fsdp": 2, "tensor": 2}}


def clipped(logprobs, entropy, data):
    ratio = jnp.exp(jnp.where(data["mask"], logprobs - data["old"], 0.0))
    gain = jnp.minimum(ratio * data["advantages"], jnp.clip(ratio, 0.8, 1.2) * data["advantages"])
    return jnp.sum(jnp.where(data["mask"], -gain - 0.05 * entropy, 0.0)), jnp.sum(logprobs)


def pooled(logprobs, entropy, data):
    """A ratio of whole rows."""
    ratio = jnp.exp(jnp.mean(logprobs - jnp.where(data["mask"], data["old"], 0.0), axis=1))
    return jnp.sum(ratio * data["advantages"][:, 0]) - 0.05 * jnp.sum(entropy)


def mesh_of(sizes):
    mesh = {"data": 1} | sizes
    return sharding.make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())])


def arrays_of(draw, rows, actions=0.6):
    sample = draw(5, actions, rows=rows, length=LENGTH, width=D, vocabulary=V)
    rng = np.random.default_rng(9)
    old, advantages = (rng.normal(mean, 1.0, sample.mask.shape).astype(np.float32) for mean in (-2.0, 0.0))
    sets = rng.random((*sample.mask.shape, V)) < 0.7
    np.put_along_axis(sets, sample.tokens[..., None], True, 2)
    data = {"mask": sample.mask, "old": old, "advantages": advantages}
    return sample.hidden, sample.head, sample[2:], data, np.asarray(pack(jnp.asarray(sets)))


def place(mesh, arrays, rows):
    hidden, matrix, *rest = arrays
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    return put(hidden, rows), put(matrix, sharding.spec(("vocab", "width"))), *(put(tree, rows) for tree in rest)


def functions(chunk):
    """(hidden, matrix, columns, data, kept) -> (value, more) of a loss of tokens, and of one that pools.

    Of arrays on no mesh they are those of the plain functions.
    """

    def tokens(hidden, matrix, columns, data, kept):
        settings = SETTINGS | {"chunk": chunk, "kept": kept}
        if (split := split_of(hidden, matrix, *AXES)) is None:
            value, rest = logprob_loss(clipped, hidden, matrix, *columns, data, **settings)
            return value, rest.aux
        value, parts = split_loss(split, clipped, hidden, matrix, columns, data, **settings)
        return value, jnp.sum(parts)

    def rows(hidden, matrix, columns, data, kept):
        settings = SETTINGS | {"chunk": chunk, "kept": kept}
        if (split := split_of(hidden, matrix, *AXES)) is None:
            scored = token_logprobs(hidden, matrix, *columns, **settings)
        else:
            scored = split_logprobs(split, hidden, matrix, columns, **settings)
        return pooled(*scored, data), scored

    return {"tokens": tokens, "rows": rows}


@cache
def gradients():
    """(hidden, matrix, columns, data, kept) -> of either of `functions` ((value, more), gradients)."""
    each = [jax.value_and_grad(f, argnums=(0, 1), has_aux=True) for f in functions(CHUNK).values()]
    return jax.jit(lambda *a: [f(*a) for f in each])


def close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), found, expected)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_changes_neither_losses_nor_scores_nor_gradients(draw, name):
    mesh = mesh_of(MESHES[name])
    for actions in (0.6, 0.0):
        arrays = arrays_of(draw, ROWS, actions)
        found = gradients()(*place(mesh, arrays, sharding.spec(("rows",))))
        close(found, gradients()(*map(partial(jax.tree.map, jnp.asarray), arrays)))


@pytest.mark.parametrize("rows", [2, 3])
def test_rows_that_do_not_divide_are_those_of_several_devices(draw, rows):
    mesh, arrays = mesh_of({"data": 2, "fsdp": 4}), arrays_of(draw, rows)
    found = gradients()(*place(mesh, arrays, P()))
    close(found, gradients()(*map(partial(jax.tree.map, jnp.asarray), arrays)))


@pytest.mark.parametrize(
    ("sizes", "moved"),
    [
        ({"data": 4}, {"all-reduce": 1}),
        ({"fsdp": 4}, {"all-gather": 1, "reduce-scatter": 1}),
        ({"data": 2, "fsdp": 2}, {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 0.5}),
    ],
    ids=["data4", "fsdp4", "data2-fsdp2"],
)
@pytest.mark.parametrize("which", ["tokens", "rows"])
def test_the_unembedding_is_gathered_once_its_gradient_summed_once_and_no_loop_waits(sizes, moved, which):
    mesh, rows, length, width, vocabulary, chunk = mesh_of(sizes), 4, 512, 32, 1024, 64
    lies = NamedSharding(mesh, sharding.spec(("rows",)))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=lies)  # noqa: E731
    ids, mask, floats = (put(dtype, rows, length) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
    matrix = NamedSharding(mesh, sharding.spec(("vocab", "width")))
    arrays = (
        put(jnp.float32, rows, length, width),
        jax.ShapeDtypeStruct((vocabulary, width), jnp.float32, sharding=matrix),
    )
    data = {"mask": mask, "old": floats, "advantages": floats}
    gradient = jax.value_and_grad(functions(chunk)[which], argnums=(0, 1), has_aux=True)
    placed = {"out_shardings": ((None, None), (lies, matrix))}
    text = jax.jit(gradient, **placed).lower(*arrays, (ids, ids, mask), data, None).compile().as_text()
    crossing = hlo.exchanges(text, 4, trips=length // chunk)
    assert " while(" in text and {one.count for one in crossing} == {1}
    whole = vocabulary * width * 4
    large = [one for one in crossing if one.bytes > whole / 8]
    found = {one.kind: one.bytes / whole for one in large}  # with a few scalars beside it
    assert found == pytest.approx(moved, rel=1e-3) and len(large) == len(moved)
    assert hlo.largest_buffer(text) <= max(chunk, width) * vocabulary
