"""What is read off a compiled program: work inside loops, the arrays it holds, its collectives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from agentrl_jax.recipes.plan import hlo

M, K, N = 6, 10, 14
LEFT, RIGHT, BACK = jnp.ones((M, K)), jnp.full((K, N), 0.1), jnp.full((N, K), 0.1)
PRODUCT = 2 * M * N * K


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def there_and_back(x):
    """Two products, with something between them that no compiler can fold."""
    return jnp.tanh(jnp.sin(x @ RIGHT) @ BACK)


def test_a_product_and_a_batch_of_them():
    assert hlo.matmul_flops(compiled(jnp.matmul, LEFT, RIGHT)) == PRODUCT
    batched = compiled(partial(jnp.einsum, "bmk,bkn->bmn"), jnp.ones((3, M, K)), jnp.ones((3, K, N)))
    assert hlo.matmul_flops(batched) == 3 * PRODUCT
    assert hlo.matmul_flops(compiled(jnp.sin, LEFT)) == 0


def test_a_loop_counts_as_often_as_it_runs():
    looped = compiled(lambda x: lax.fori_loop(0, 7, lambda _, y: there_and_back(y), x), LEFT)
    assert "while(" in looped, "not unrolled, or this tests nothing"
    assert hlo.matmul_flops(looped) == 7 * 2 * PRODUCT
    scanned = compiled(lambda x, ws: lax.scan(lambda y, w: (jnp.tanh(y @ w @ BACK), None), x, ws)[0], LEFT,
                       jnp.ones((7, K, N)))  # fmt: skip
    assert hlo.matmul_flops(scanned) == 7 * 2 * PRODUCT


def test_a_loop_inside_a_loop_multiplies():
    def nested(x):
        inner = lambda _, y: lax.fori_loop(0, 5, lambda _, z: there_and_back(z), y)  # noqa: E731
        return lax.fori_loop(0, 3, lambda i, y: there_and_back(inner(i, y)), x)

    text = compiled(nested, LEFT)
    assert text.count("while(") >= 2
    assert hlo.matmul_flops(text) == 3 * (5 + 1) * 2 * PRODUCT


def test_a_loop_of_unknown_length_runs_as_often_as_it_is_told():
    text = compiled(lambda x, n: lax.fori_loop(0, n, lambda _, y: there_and_back(y), x), LEFT, jnp.int32(4))
    assert hlo.matmul_flops(text) == 2 * PRODUCT
    assert hlo.matmul_flops(text, trips=4) == 4 * 2 * PRODUCT


def test_a_gradient_costs_two_more_products_and_of_two_branches_the_dearer_counts():
    grad = compiled(jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), argnums=(0, 1)), LEFT, RIGHT)
    assert hlo.matmul_flops(grad) == 3 * PRODUCT
    twice = lambda x: there_and_back(there_and_back(x))  # noqa: E731
    branched = compiled(lambda x, yes: lax.cond(yes, twice, there_and_back, x), LEFT, jnp.asarray(True))
    assert hlo.matmul_flops(branched) == 4 * PRODUCT


def test_the_largest_array_and_whether_one_of_a_given_size_is_held():
    def logits(x, w):
        return jnp.sum(jax.nn.softmax(x @ w, axis=-1) ** 2)

    text = compiled(logits, LEFT, RIGHT)
    assert hlo.largest_buffer(text) == K * N  # the matrix
    assert hlo.holds(text, M, N) and hlo.holds(text, N, M) and hlo.holds(text, M, K)
    assert not hlo.holds(text, M, M) and not hlo.holds(text, K, K) and not hlo.holds(text, M, N + 1)
    tall = compiled(logits, jnp.ones((40, K)), RIGHT)
    assert hlo.largest_buffer(tall) == 40 * N


def test_arrays_inside_a_loop_are_found():
    text = compiled(lambda x: lax.fori_loop(0, 7, lambda _, y: there_and_back(y), x), jnp.ones((23, K)))
    assert hlo.holds(text, 23, N) and hlo.largest_buffer(text) == 23 * N


@pytest.mark.parametrize(
    ("line", "rows", "columns", "expected"),
    [
        ("  %a = f32[12,35]{1,0} add(%b, %c)", 12, 35, True),
        ("  %a = f32[2,35,12]{1,0} add(%b, %c)", 12, 35, True),
        ("  %a = f32[420]{0} add(%b, %c)", 12, 35, True),
        ("  %a = (s32[], f32[1,420]{1,0}) tuple(%b, %c)", 12, 35, True),
        ("  %a = f32[12,12]{1,0} add(%b, %c)", 12, 12, True),
        ("  %a = f32[12]{0} add(%b, %c)", 12, 12, False),
        ("  %a = f32[12,36]{1,0} add(%b, %c)", 12, 35, False),
    ],
)
def test_an_array_holds_both_dimensions_or_their_product(line, rows, columns, expected):
    assert hlo.holds(line, rows, columns) is expected


def test_collectives_and_the_size_of_their_result():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    gathered = partial(lax.all_gather, axis_name="x", axis=0, tiled=True)
    shared = partial(jax.shard_map, mesh=mesh, in_specs=P("x"), check_vma=False)
    rows = np.ones((8, 5), np.float32)
    assert hlo.collectives(compiled(shared(lambda x: lax.psum(x, "x"), out_specs=P()), rows)) == [("all-reduce", 10)]
    assert hlo.collectives(compiled(shared(gathered, out_specs=P()), rows)) == [("all-gather", 40)]
    assert hlo.collectives(compiled(jnp.sin, rows)) == []


TPU = """HloModule jit_f

%fused (p.0: f32[6,10], p.1: f32[10,14]) -> f32[6,14] {
  %p.0 = f32[6,10]{1,0} parameter(0)
  %p.1 = f32[10,14]{1,0} parameter(1)
  ROOT %c = f32[6,14]{1,0} convolution(%p.0, %p.1), dim_labels=bf_io->bf
}

ENTRY %main (a: f32[6,10], b: f32[10,14]) -> f32[6,14] {
  %a = f32[6,10]{1,0} parameter(0)
  %b = f32[10,14]{1,0} parameter(1)
  %note = f32[6,14]{1,0} custom-call(%a), custom_call_target="x", backend_config={
  "nested": {"braces": 1}
}
  ROOT %f = f32[6,14]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
}
"""


def test_a_tpus_way_of_writing_a_product_behind_attributes_of_several_lines():
    assert hlo.matmul_flops(TPU) == PRODUCT
    entry, computations = hlo.parse(TPU)
    assert entry == "main" and [operation.kind for operation in computations["main"]][-1] == "fusion"
    assert hlo.called_by(computations["main"][-1]) == ["fused"]
