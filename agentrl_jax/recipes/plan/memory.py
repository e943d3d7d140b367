"""What a run keeps on each device, by the sharding rules and shapes alone: no array is made, nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from agentrl_jax import sharding
from agentrl_jax.batch import TokenBatch
from agentrl_jax.errors import UserError
from agentrl_jax.kernels.head import columns_of, dividing
from agentrl_jax.kernels.kept import words
from agentrl_jax.learner.placement import in_memory, placed_like
from agentrl_jax.learner.state import LearnerState
from agentrl_jax.models import llama, lora
from agentrl_jax.models.lora import trained
from agentrl_jax.recipes import meshes, rl, sft
from agentrl_jax.recipes.config import Loop, PretrainedPolicy, RunConfig, Sft
from agentrl_jax.recipes.optimizing import HOST, memory_kind
from agentrl_jax.sampler import decode
from agentrl_jax.sampler import placement as sampler
from agentrl_jax.sampler.pages import PAGE

GIB = 1 << 30
ROWS = 32  # of the largest decode batch of an engine, see `runtime.engine.ROWS`


class Held(NamedTuple):
    """Arrays that live together on a device: `bytes` of one device, and the largest of them as (name, bytes)."""

    name: str
    bytes: int
    largest: list[tuple[str, int]]


class Parts(NamedTuple):
    """The arrays of a run as `jax.ShapeDtypeStruct`, placed on a mesh. What a config does not have is None."""

    state: LearnerState
    grads: Any
    batch: TokenBatch | None
    reference: Any
    sampler: Any  # weights laid out for decoding
    pools: Any


class Host(NamedTuple):
    """Where a process samples: over its devices, `rollout.tensor` of them for each copy of weights and pages."""

    devices: int
    mesh: Any = None  # of the devices of one copy; None: abstract


def parts(config: RunConfig, model: llama.LlamaConfig, mesh: Any, host: Host | None = None) -> Parts:
    """Everything that the stages of a config keep, parameters and optimizer by the rules of `sharding.RULES`.

    Of the sampler it is one copy of the weights, and the pages that go with it. None is a process with all devices.

    Raises `UserError` where the rules cannot split a parameter evenly over the mesh.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    step: Any = _put(jnp.int32, (), everywhere)
    params = _params(config, model, mesh)
    learned = trained(params)
    here = config.external.url is None
    host = host or Host(mesh.size)
    sampling = NamedSharding(host.mesh or abstract_mesh({"tensor": config.rollout.tensor}), PartitionSpec())
    state = LearnerState(params, _opt_state(config, learned), step)
    return Parts(
        state=state,
        grads=jax.tree.map(lambda leaf: _put(jnp.float32, leaf.shape, leaf.sharding), learned),
        batch=batch(config, model, mesh),
        reference=learned if config.loop is not None and config.loop.objective.kl is not None else None,
        sampler=_sampler(config, model, sampling) if here else None,
        pools=_place(_pool_shapes(model, pages(config, host.devices)), sampler.pools(sampling)) if here else None,
    )


def _sampler(config: RunConfig, model: llama.LlamaConfig, sampling: NamedSharding) -> Any:
    shapes = _sampler_shapes(model, config.rollout.tensor == 1)
    try:
        places = sampler.weights(model, sampling)
    except ValueError:
        raise UserError(
            f"rollout.tensor={config.rollout.tensor} does not divide the policy's kv_heads={model.kv_heads}: set "
            f"rollout.tensor={math.gcd(config.rollout.tensor, model.kv_heads)}"
        ) from None
    if isinstance(places, NamedSharding):
        return _place(shapes, places)
    return jax.tree.map(lambda leaf, place: _put(leaf.dtype, leaf.shape, place), shapes, places)


@lru_cache(maxsize=8)
def _sampler_shapes(model: llama.LlamaConfig, fused: bool) -> Any:
    return jax.eval_shape(partial(llama.unstack, model, fused=fused), llama.shapes(model))


@lru_cache(maxsize=8)
def _pool_shapes(model: llama.LlamaConfig, count: int) -> Any:
    return jax.eval_shape(lambda: decode.allocate(model, count))


def slots(config: RunConfig, devices: int) -> int:
    """Slots beside one copy of the sampler's weights, where a process has so many devices; all or some sample."""
    sampling = config.sampler_devices or devices
    return -(-config.rollout.slots // max(1, sampling // config.rollout.tensor))


def pages(config: RunConfig, devices: int) -> int:
    """Pages of the pools beside one copy of the weights, nobody's page among them."""
    return slots(config, devices) * -(-config.rollout.context // PAGE) + 1


def resident(found: Parts) -> list[Held]:
    """What lies on a device whichever program runs."""
    names = {
        "parameters": found.state.params, "optimizer state": found.state.opt_state, "reference": found.reference,
        "batch": found.batch, "sampler weights": found.sampler, "KV pages": found.pools,
    }  # fmt: skip
    return [held(name, tree) for name, tree in names.items() if tree is not None]


def held(name: str, tree: Any) -> Held:
    """Bytes of a tree of placed shapes on one device; what is offloaded takes none."""
    sizes = [(f"{name}{jax.tree_util.keystr(path)}", on_device(x)) for path, x in jax.tree.leaves_with_path(tree)]
    return Held(name, sum(size for _, size in sizes), sorted(sizes, key=lambda item: -item[1])[:3])


def offloaded(found: Parts) -> int:
    """Bytes of a device's share of the optimizer's state that lie in its host's memory between updates."""
    return sum(local_bytes(x) - on_device(x) for x in jax.tree.leaves(found.state.opt_state))


def on_device(leaf: Any) -> int:
    return 0 if leaf.sharding.memory_kind == HOST else local_bytes(leaf)


def local_bytes(leaf: Any) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    bits = 4 if leaf.dtype in (jnp.int4, jnp.uint4) else 8 * leaf.dtype.itemsize
    return math.prod(shape) * bits // 8


def settings(config: RunConfig) -> Loop | Sft:
    """The stage that learns from the largest batches: reinforcement learning where there is any."""
    stage = config.loop or config.sft
    assert stage is not None  # checks.check
    return stage


def row_shares(mesh: Any) -> int:
    """Devices that the rows of a batch are spread over."""
    return math.prod(mesh.shape[axis] for axis in sharding.axes_of("rows"))


def batch_rows(config: RunConfig) -> int:
    """Rows of the device batch, full or not."""
    if config.loop is None:
        assert config.sft is not None
        return config.sft.rows
    again = isinstance(config.policy, PretrainedPolicy) and config.policy.history == "template"
    return config.loop.tasks * config.loop.group * (config.rollout.max_segments if again else 1)


def batch(config: RunConfig, model: llama.LlamaConfig, mesh: Any) -> TokenBatch:
    """The device batch of a step as the update reads it."""
    stage, rows = settings(config), sharding.rows(mesh)
    shape = (batch_rows(config), stage.width)
    if shape[0] % row_shares(mesh):
        raise UserError(f"{shape[0]} rows a step do not divide over data x fsdp = {row_shares(mesh)} devices")
    put = lambda dtype: _put(dtype, shape, rows)  # noqa: E731
    ids = dict.fromkeys(("tokens", "parents", "subtree_ends", "positions", "trajectory_ids"), put(jnp.int32))
    ids |= dict.fromkeys(("turn_ids", "policy_versions"), put(jnp.int32))
    floats = dict.fromkeys(("behavior_logprobs", "advantages", "weights"), put(jnp.float32))
    loop, extra = config.loop, {}
    if loop is not None and rescored(loop):
        extra["old_logprobs"] = put(jnp.float32)
    if loop is not None and loop.objective.kl is not None:
        extra["ref_logprobs"] = put(jnp.float32)
    if loop is not None and config.rollout.records:
        extra["kept"] = _put(jnp.uint32, (*shape, words(model.vocab_size)), rows)
    return TokenBatch(**ids, **floats, **extra, sources=put(jnp.int8), action_mask=put(jnp.bool_))


def rescored(loop: Loop) -> bool:
    """Whether log-probabilities at the start of a step are computed anew."""
    return loop.rescores


def transient(
    config: RunConfig, model: llama.LlamaConfig, mesh: Any, found: Parts, host: Host | None = None
) -> dict[str, int]:
    """Bytes that the programs need beside what is resident, estimated: a compiler's figures replace these."""
    grads = held("gradients", found.grads).bytes
    head = _head(config, model, mesh)
    programs = {"update": grads + _activations(config, model, mesh) + head["logits"] + head["gradient"]}
    # The updates, and the state where it is brought in; the rest is fused or donated.
    programs["apply"] = grads + offloaded(found)
    if config.loop is not None and (rescored(config.loop) or config.loop.objective.kl is not None):
        programs["score"] = _activations(config, model, mesh, kept=False) + head["logits"]
    if found.sampler is not None:
        host = host or Host(mesh.size)
        own = held("sampler", found.sampler).bytes  # the next beside those in use
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(found.sampler))
        if config.placement == "split":  # whole on a device that learns, from where those that sample take their part
            programs |= {"publish": whole, "adopt": own}
        else:  # whole first where it has to be another mesh's: that one cannot be written to
            programs["publish"] = own + (whole if config.rollout.tensor > 1 and host.devices < mesh.size else 0)
        computed = jnp.dtype(model.compute_dtype).itemsize
        rows = min(ROWS, slots(config, host.devices))
        programs["decode"] = 4 * rows * (3 * model.vocab_size + model.mlp_width) * computed
    return programs


def _activations(config: RunConfig, model: llama.LlamaConfig, mesh: Any, *, kept: bool = True) -> int:
    stage, itemsize = settings(config), jnp.dtype(model.compute_dtype).itemsize
    tokens = max(1, stage.micro_rows // row_shares(mesh)) * stage.width
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_width
    layer = 4 * model.width + (heads + 3 * model.mlp_width) // mesh.shape["tensor"]
    layers = 0 if not kept else 1 if config.remat in (True, "full") else model.layers
    f32_tail = 3 * tokens * model.width * 4  # hidden states after the final norm, and their gradient
    by_columns = config.mesh.sequence and stage.width % mesh.shape["tensor"] == 0
    stream = kept * model.layers * model.width // (mesh.shape["tensor"] if by_columns else 1)
    return itemsize * tokens * (layer * max(1, layers) + stream) + f32_tail


def _head(config: RunConfig, model: llama.LlamaConfig, mesh: Any) -> dict[str, int]:
    tokens = head_chunks(config, mesh)[0]
    share = -(-model.vocab_size // mesh.shape["tensor"])
    return {"logits": 3 * tokens * share * 4, "gradient": share * model.width * 4}


def head_chunks(config: RunConfig, mesh: Any) -> tuple[int, int]:
    """How many of its tokens a device projects at once in the loss head, and how often where all are actions."""
    stage = settings(config)
    split = dividing({axis: mesh.shape[axis] for axis in sharding.axes_of("rows")}, stage.micro_rows)
    shares = math.prod(mesh.shape[axis] for axis in split)
    tokens = stage.micro_rows * stage.width
    columns = columns_of(tokens, config.logprob_chunk, shares)
    return columns, -(-tokens // shares // columns)


def _params(config: RunConfig, model: llama.LlamaConfig, mesh: Any) -> Any:
    chosen = config.policy.lora if isinstance(config.policy, PretrainedPolicy) else None
    if chosen is not None and chosen.base != "full":
        raise UserError(
            f"policy.lora.base={chosen.base!r}: plan knows frozen params in full only; plan with base='full'"
        )
    shapes = llama.shapes(model)
    if chosen is not None:
        shapes = jax.eval_shape(partial(lora.init, chosen), shapes, jax.random.key(0))
    placed = meshes.placement(config, model, mesh)
    found = jax.tree.map(lambda leaf, place: _put(leaf.dtype, leaf.shape, place), shapes, placed)
    for path, leaf in jax.tree.leaves_with_path(found):
        try:
            leaf.sharding.shard_shape(leaf.shape)
        except ValueError:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise UserError(
                f"--mesh: {name} {leaf.shape} does not divide over {leaf.sharding.spec} of the mesh "
                f"{dict(mesh.shape)}: take smaller axes"
            ) from None
    return found


def _opt_state(config: RunConfig, params: Any) -> Any:
    chosen = settings(config)
    optimizer = sft.optimizer_of(chosen) if isinstance(chosen, Sft) else rl.optimizer_of(chosen)
    state = jax.eval_shape(optimizer.init, params)
    places = in_memory(placed_like(state, params), state, memory_kind(chosen))
    return jax.tree.map(lambda leaf, place: _put(leaf.dtype, leaf.shape, place), state, places)


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices."""
    shape = {**dict.fromkeys(sharding.AXES, 1), **sizes}
    return AbstractMesh(tuple(shape.values()), tuple(shape))


def _put(dtype: Any, shape: tuple[int, ...], place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def _place(tree: Any, place: NamedSharding) -> Any:
    return jax.tree.map(lambda leaf: _put(leaf.dtype, leaf.shape, place), tree)


def largest(parts: list[Held], count: int = 8) -> Iterator[tuple[str, int]]:
    """The largest arrays of all."""
    return iter(sorted((item for part in parts for item in part.largest), key=lambda item: -item[1])[:count])
