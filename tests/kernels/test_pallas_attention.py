"""The TPU kernels of forest attention, interpreted, against the plain-JAX reference: values and gradients."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.kernels import attention
from agentrl_jax.kernels.head import dividing
from agentrl_jax.kernels.pallas import attention as tiled
from agentrl_jax.recipes.plan import hlo

ROWS, LENGTH, GROUPS, REPEATS, WIDTH, TILE = 2, 19, 2, 2, 8, 4  # no multiple of the tile
SCALE = 0.5


def draw(dtype=jnp.float32, seed=0):
    """q, k, v and the gradient of the output, heads first."""
    rng = np.random.default_rng(seed)
    query, key = (ROWS, GROUPS, REPEATS, LENGTH, WIDTH), (ROWS, GROUPS, LENGTH, WIDTH)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in (query, key, key, query)]


def kernels(qkvg, reach, soft_cap=None, tile=TILE):
    q, k, v, gradient = qkvg
    fixed = tiled.Settings(SCALE, soft_cap, tile, interpret=True)
    out, normalizers = tiled.forward(q, k, v, *reach, fixed)
    inner = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return out, normalizers, tiled.backward(q, k, v, *reach, inner, normalizers, gradient, fixed)


def reference(qkvg, reach, soft_cap=None):
    q, k, v, gradient = qkvg
    fixed = attention._Settings(SCALE, soft_cap)
    out, normalizers = attention._plain_forward(q, k, v, reach, fixed)
    inner = jnp.sum(gradient * out, axis=-1)
    return out, normalizers, attention._plain_backward(q, k, v, reach, inner, normalizers, gradient, fixed)


@lru_cache
def compiled(windowed, soft_cap):
    """Both routes of one kind, compiled once for all the forests."""

    def both(qkvg, ends, positions, window):
        reach = attention.Reach(ends, *((positions, window) if windowed else (None, None)))
        return kernels(qkvg, reach, soft_cap), reference(qkvg, reach, soft_cap)

    return jax.jit(both)


def grow(hops):
    """A depth-first forest and its padding: (subtree_ends, positions). A hop backs up some levels; -1 ends it."""
    ends, positions, stack = np.arange(LENGTH, dtype=np.int32), np.zeros(LENGTH, np.int32), []
    for column, hop in enumerate(hops):
        if hop < 0:
            break
        stack = [*stack[: max(0, len(stack) - hop)], column]
        positions[column] = len(stack) - 1
        ends[stack] = column + 1
    return ends, positions


HOPS = st.lists(st.sampled_from([0] * 12 + [1, 2, 5, 19, 19, -1]), min_size=LENGTH, max_size=LENGTH)


@pytest.mark.parametrize("windowed, soft_cap", [(False, None), (True, 0.7)])
@settings(max_examples=20, deadline=None)
@given(first=HOPS, second=HOPS, window=st.integers(1, LENGTH))
@example(first=[0] * LENGTH, second=[-1] * LENGTH, window=3)  # one document, and padding alone
@example(first=[19] * LENGTH, second=[0] * 9 + [6] + [0] * 4 + [19] + [0] * 4, window=5)  # tokens alone; a tree
def test_values_and_gradients_are_those_of_the_reference(windowed, soft_cap, first, second, window):
    ends, positions = (jnp.asarray(np.stack(rows)) for rows in zip(grow(first), grow(second), strict=True))
    found, expected = compiled(windowed, soft_cap)(draw(), ends, positions, jnp.int32(window))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


def visited(ends, positions=None, window=None, by_key=False):
    fixed = tiled.Settings(SCALE, None, TILE)
    window = None if window is None else jnp.int32(window)
    tile, reach, _ = tiled._laid_out(fixed, (), ends, positions, window)
    visits = tiled._visits(reach, tile, by_key=by_key)
    return [
        list(zip(q[:n].tolist(), k[:n].tolist(), strict=True)) for q, k, n in zip(*map(np.asarray, visits), strict=True)
    ]


@pytest.mark.parametrize("by_key", [False, True])
@settings(max_examples=20, deadline=None)
@given(first=HOPS, window=st.integers(1, LENGTH))
def test_the_visits_are_the_tiles_in_which_something_is_read(by_key, first, window):
    ends, positions = (jnp.asarray(rows)[None] for rows in grow(first))
    for reach in (attention.Reach(ends), attention.Reach(ends, positions, jnp.int32(window))):
        mask = np.zeros((20, 20), bool)
        mask[:LENGTH, :LENGTH] = attention._readable(reach, 0, LENGTH)[0]
        mask[LENGTH, LENGTH] = True
        needed = {(i, j) for i, j in np.ndindex(5, 5) if mask[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].any()}
        found = visited(*reach, by_key=by_key)[0]
        assert found == sorted(found, key=lambda pair: pair[::-1] if by_key else pair)
        assert needed <= set(found)  # a bound by maxima of a tile: it may visit more
        if reach.window is None:
            assert needed == set(found)


def test_short_documents_visit_the_diagonal_and_a_window_a_band():
    each = jnp.asarray([[4] * 4 + [8] * 4 + [12] * 4 + [16] * 4 + [19] * 3], jnp.int32)
    assert visited(each) == [[(i, i) for i in range(5)]]
    whole, positions = jnp.full((1, LENGTH), LENGTH, jnp.int32), jnp.arange(LENGTH, dtype=jnp.int32)[None]
    assert len(visited(whole)[0]) == 15
    assert visited(whole, positions, 4) == [[(i, j) for i in range(5) for j in (i - 1, i) if j >= 0]]


def test_extreme_scores_stay_finite_and_half_precision_keeps_its_dtype():
    ends = jnp.asarray(np.stack([grow([0] * LENGTH)[0], grow([0] * 5 + [-1])[0]]))
    qkvg = [1e4 * x for x in draw(jnp.bfloat16)]
    out, normalizers, grads = jax.jit(lambda *x: kernels(x, attention.Reach(ends), tile=8))(*qkvg)
    assert out.dtype == jnp.bfloat16 and all(x.dtype == jnp.bfloat16 for x in grads)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (out, normalizers, *grads))


# -- where the kernels run -------------------------------------------------------------------------------------------

ENDS = np.stack([grow([0] * 9 + [6] + [0] * 4 + [19] + [0] * 4)[0], grow([0] * 17 + [-1])[0]])


def interpreted(q, k, v, ends, gradient):
    """Both passes on each device's part, as `forest_attention` runs them on a TPU."""
    fixed = tiled.Settings(SCALE, None, TILE, interpret=True)
    spread = partial(attention.per_device, row_axes=("data", "fsdp"), head_axes=("tensor",))
    out, normalizers = spread(partial(tiled.forward, settings=fixed))(q, k, v, ends, None, None)
    inner = jnp.sum(gradient * out, axis=-1)
    grads = spread(partial(tiled.backward, settings=fixed))(q, k, v, ends, None, None, inner, normalizers, gradient)
    return out, normalizers, grads


def test_on_a_mesh_every_device_attends_with_its_own_rows_and_heads():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    split = NamedSharding(mesh, P("data", "tensor"))
    q, k, v, gradient = (jax.device_put(x, split) for x in draw())
    ends = jax.device_put(ENDS, NamedSharding(mesh, P("data")))
    program = jax.jit(interpreted).lower(q, k, v, ends, gradient).compile()
    assert hlo.collectives(program.as_text()) == []
    found = program(q, k, v, ends, gradient)
    assert all(x.sharding.is_equivalent_to(split, x.ndim) for x in jax.tree.leaves(found))
    expected = reference(draw(), attention.Reach(jnp.asarray(ENDS)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


def test_axes_that_do_not_divide_are_left_out():
    assert dividing({"data": 4, "fsdp": 2}, 8) == ("data", "fsdp")
    assert dividing({"data": 4, "fsdp": 2}, 4) == ("data",)
    assert dividing({"data": 4, "fsdp": 2}, 6) == ()


def test_a_program_for_a_cpu_holds_no_kernel():
    q, k, v, _ = (x.swapaxes(1, -2).reshape(ROWS, LENGTH, -1, WIDTH) for x in draw())
    attend = lambda *x: attention.forest_attention(*x, jnp.asarray(ENDS), scale=SCALE)  # noqa: E731
    text = jax.jit(jax.grad(lambda *x: jnp.sum(attend(*x)))).lower(q, k, v).as_text()
    assert "dot_general" in text and "custom_call" not in text


def test_a_program_for_a_tpu_holds_the_kernels_on_a_mesh_and_inside_shard_map():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    q, k, v, _ = (x.swapaxes(1, -2).reshape(ROWS, LENGTH, -1, WIDTH) for x in draw())
    q, k, v, ends = (jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (q, k, v, jnp.asarray(ENDS)))

    def loss(q, k, v, ends):
        return jnp.sum(attention.forest_attention(q, k, v, ends, scale=SCALE))

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for function in (gradient, mapped):
        text = jax.jit(function).trace(q, k, v, ends).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") >= 3  # outputs, queries' gradients, keys' and values'
