"""States of every optimizer on a mesh: offloaded or not to the bit, kept in place, restored onto fewer devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax import sharding
from agentrl_jax.learner.masters import Masters, with_masters
from agentrl_jax.learner.optimizers import adafactor, adamw, muon
from agentrl_jax.learner.state import LearnerState, init_state
from agentrl_jax.learner.update import Accumulator, make_update
from agentrl_jax.models import llama
from agentrl_jax.models.orthogonal import orthogonal
from agentrl_jax.rl import weights
from agentrl_jax.rl.imitation import imitation_loss
from agentrl_jax.rl.types import Metrics
from agentrl_jax.runtime.checkpoint import Checkpoints
from tests.learner.test_update import CONFIG, ROWS, SCORER, pack, trajectories

OPTIMIZERS = {
    "adamw": partial(adamw, moment_dtype="bfloat16"),
    "adafactor": partial(adafactor, factored_from=4),
    "muon": partial(muon, moment_dtype="bfloat16"),
}
HOST = "pinned_host"


def mesh_of(count):
    return sharding.make_mesh(data=1, fsdp=count, devices=jax.devices()[:count])


def place(mesh, tree):
    return jax.device_put(tree, sharding.shardings(mesh, llama.logical_axes(CONFIG)))


def first_params(mesh):
    rng = np.random.default_rng(0)
    return place(mesh, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(jnp.bfloat16), llama.shapes(CONFIG)))


def gradient(mesh, seed):
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), llama.shapes(CONFIG))
    return Accumulator(place(mesh, grads), jax.device_put(np.float32(1), sharding.replicated(mesh)), Metrics({}, {}))


def applied(update, state, mesh, seeds):
    with jax.transfer_guard("disallow"):
        for seed in seeds:
            state, _ = update.apply(state, gradient(mesh, seed))
    assert update.cache_sizes()["apply"] == 1
    return state


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offloaded_or_not_and_restored_onto_one_device_a_state_is_the_same(name, tmp_path):
    mesh, optimizer = mesh_of(8), with_masters(OPTIMIZERS[name](0.01))

    def begun(mesh, kind=None):
        update = make_update(SCORER, imitation_loss, optimizer, micro_rows=ROWS)
        return update, init_state(optimizer, first_params(mesh), memory_kind=kind)

    update, state = begun(mesh)
    here = applied(update, state, mesh, (1, 2))
    update, state = begun(mesh, HOST)
    there = applied(update, state, mesh, (1, 2))
    same(there, here)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(there.opt_state) if leaf.ndim}
    assert kinds == {HOST} != {leaf.sharding.memory_kind for leaf in jax.tree.leaves(there.params)}
    assert isinstance(there.opt_state, Masters)
    for state in (here, there):  # where the rules say, and for the masters as for the params
        assert state.opt_state.params["layers"]["query"].sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, there._asdict(), {})
    checkpoints.wait()
    one = mesh_of(1)
    for kind in (None, HOST):
        update, template = begun(one, kind)
        found = LearnerState(**checkpoints.restore(2, template._asdict()).state)
        same(found, here)
        assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, template)
    checkpoints.close()
    alone, together = applied(update, found, one, (3,)), applied(begun(mesh)[0], here, mesh, (3,))
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(close, jax.device_get(alone.opt_state.params), jax.device_get(together.opt_state.params))


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_steps_reduce_the_loss(name):
    mesh, optimizer = mesh_of(8), with_masters(OPTIMIZERS[name](0.01))
    batch = pack(trajectories(), share=True)
    weight = weights.token_mean(batch.action_mask, batch.trajectory_ids, batch.turn_ids, num_trajectories=12)
    batch = jax.device_put(batch._replace(weights=np.asarray(weight)), sharding.rows(mesh))
    update = make_update(SCORER, imitation_loss, optimizer, micro_rows=ROWS)
    params = jax.jit(partial(llama.init, CONFIG))(jax.random.key(0))
    params = place(mesh, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    state, losses = init_state(optimizer, params, memory_kind=HOST), []
    with jax.transfer_guard("disallow"):
        for _ in range(5):
            state, info = update.step(state, batch, [0])
            losses.append(info.to_host()["loss"])
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
    assert set(update.cache_sizes().values()) == {1}


@pytest.mark.parametrize(
    ("sizes", "spec", "logical"),
    [
        ((1, 8, 1, 1), (None, "fsdp", "tensor"), ("width", "mlp")),
        ((1, 4, 2, 1), (None, "tensor", "fsdp"), ("mlp", "width")),
        ((1, 2, 2, 2), (None, "expert", "fsdp", "tensor"), ("width", "mlp")),
    ],
)
def test_orthogonal_matrices_are_exchanged_and_never_gathered(sizes, spec, logical):
    mesh = sharding.make_mesh(*sizes)
    place = NamedSharding(mesh, PartitionSpec(*spec))
    x = np.random.default_rng(0).normal(size=(3, *[4] * ("expert" in spec), 16, 32)).astype(np.float32)
    spread = jax.jit(partial(orthogonal, logical=logical), out_shardings=place)
    x = jax.device_put(x, place)
    text = str(spread.lower(x).compile().as_text())
    assert " all-to-all(" in text and " all-gather(" not in text
    found = np.asarray(spread(x))
    values = np.linalg.svd(found, compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.3
    np.testing.assert_allclose(found, jax.jit(orthogonal)(jax.device_get(x)), atol=1e-5)
