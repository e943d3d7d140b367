"""Our loss head beside the naive one and, where installed, peers: time, compiled memory, matrix work.

`agentrl bench loss` prints it. The work is one value and gradient, by hidden states and unembedding, of PPO's clipped
loss on T tokens ("train"), or their log-probabilities and entropies ("score").
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.kernels.fused_loss import logprob_loss
from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.kernels.vocab_sharded import vocab_sharded_loss
from agentrl_jax.recipes.plan import hlo
from benchmarks import peers

CHUNK, CLIP = 1024, 0.2
GIB = 2.0**30
# What libtpu asks of a machine without a TPU; the accelerator type has no bearing on the topology compiled for.
COMPILE_ONLY = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost", "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip

Row = dict[str, Any]


class Size(NamedTuple):
    tokens: int  # T
    width: int  # D
    vocabulary: int  # V


class Inputs(NamedTuple):
    """What every contender is given; shapes instead of arrays where it is only compiled."""

    hidden: Any  # [1, T, D]
    unembedding: Any  # [V, D]
    tokens: Any  # i32[1, T]
    parents: Any  # i32[1, T]
    action_mask: Any  # bool[1, T]
    data: Any  # old_logprobs, advantages, weights, action_mask


class Compiled(NamedTuple):
    temp_bytes: int
    text: str  # the optimised program
    executable: Any


def clipped_loss(logprobs: jax.Array, entropy: jax.Array | None, data: Any) -> tuple[jax.Array, None]:
    """PPO's clipped surrogate, weighted and summed."""
    del entropy
    ratio = jnp.exp(jnp.where(data["action_mask"], logprobs - data["old_logprobs"], 0.0))
    gain = jnp.minimum(ratio * data["advantages"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * data["advantages"])
    return -jnp.sum(data["weights"] * jnp.where(data["action_mask"], gain, 0.0)), None


def naive_logprobs(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """What one writes first: all logits, their log-sum-exp, the tokens' entries."""
    read = jnp.take_along_axis(inputs.hidden, jnp.maximum(inputs.parents, 0)[:, :, None], axis=1)
    logits = jnp.einsum("btd,vd->btv", read, inputs.unembedding, preferred_element_type=jnp.float32)
    normalizers = jax.nn.logsumexp(logits, axis=-1)
    logprobs = jnp.take_along_axis(logits, inputs.tokens[:, :, None], axis=-1)[:, :, 0] - normalizers
    entropy = normalizers - jnp.sum(jax.nn.softmax(logits) * logits, axis=-1)
    return jnp.where(inputs.action_mask, logprobs, 0.0), jnp.where(inputs.action_mask, entropy, 0.0)


def by_gradient(loss: Callable[[Inputs], jax.Array]) -> Callable[[Inputs], Any]:
    """`loss` -> its value and its gradients by hidden states and unembedding."""

    def run(inputs: Inputs) -> Any:
        replaced = lambda hidden, matrix: loss(inputs._replace(hidden=hidden, unembedding=matrix))  # noqa: E731
        return jax.value_and_grad(replaced, argnums=(0, 1))(inputs.hidden, inputs.unembedding)

    return run


def ours(inputs: Inputs, **settings: Any) -> jax.Array:
    return logprob_loss(clipped_loss, *inputs, chunk=CHUNK, **settings)[0]


def contenders(platform: str) -> Iterator[tuple[str, str, Callable[[Inputs], Any]]]:
    """(what, who, function), the naive head first of each kind."""
    yield "train", "naive", by_gradient(lambda inputs: clipped_loss(naive_logprobs(inputs)[0], None, inputs.data)[0])
    yield "train", "single pass", by_gradient(ours)
    yield "train", "single pass, f32 sums", by_gradient(partial(ours, accumulator=jnp.float32))
    yield "train", "two passes", by_gradient(partial(ours, form="two_pass"))
    yield "train", "checkpointed", by_gradient(partial(ours, form="checkpointed"))
    for name, loss in peers.installed(CLIP):
        yield "train", name, by_gradient(loss)
    score = lambda inputs, **kind: token_logprobs(*inputs[:5], chunk=CHUNK, entropy=True, **kind)  # noqa: E731
    yield "score", "naive", naive_logprobs
    yield "score", "chunks", score
    if platform == "tpu":
        yield "score", "pallas", partial(score, form="pallas")


def measure(size: Size, actions: float, rounds: int) -> Iterator[Row]:
    """Rows of the machine's own platform. A contender that fails says why, and hides no other."""
    inputs, platform = draw(size, actions), jax.default_backend()
    ready: dict[tuple[str, str], tuple[Row, Callable[[Inputs], Any]]] = {}
    for what, who, function in contenders(platform):
        row = _row(size, inputs.hidden.dtype, what, who, platform)
        try:
            compiled = compile_for(function, inputs)
            jax.block_until_ready(compiled.executable(inputs))
            ready[what, who] = row | figures(size, actions, compiled), compiled.executable
        except Exception as error:
            yield row | _failure(error)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in ready}
    for _ in range(rounds):  # in turn, so that a busy moment of the machine meets all of them
        for key, (_, executable) in ready.items():
            start = time.perf_counter()
            jax.block_until_ready(executable(inputs))
            seconds[key].append(time.perf_counter() - start)
    for key, (row, _) in ready.items():
        naive = seconds.get((key[0], "naive"))
        ratios = [own / other for own, other in zip(seconds[key], naive, strict=True)] if naive else []
        yield row | {"ms": 1e3 * median(seconds[key]), "time_ratio": median(ratios) if ratios else None}


def measure_topology(size: Size, actions: float, topology: str) -> Iterator[Row]:
    """Rows of a TPU that need not be here: compiled ahead of time for one chip of it, and split over all its chips."""
    devices, dtype = tpu_devices(topology), jnp.bfloat16
    inputs = placed(shapes(size, dtype), Mesh(np.asarray(devices[:1]), ("one",)), P())
    candidates = [(what, who, function, inputs) for what, who, function in contenders("tpu")]
    if len(devices) > 1:
        split = vocabulary_sharded(Mesh(np.asarray(devices), ("vocab",)), size, dtype)
        candidates.append(("train", f"single pass, vocabulary / {len(devices)}", *split))
    for what, who, function, inputs in candidates:
        row = _row(size, dtype, what, who, topology)
        try:
            yield row | figures(size, actions, compile_for(function, inputs, "tpu"))
        except Exception as error:
            yield row | _failure(error)


def vocabulary_sharded(mesh: Mesh, size: Size, dtype: Any) -> tuple[Callable[[Inputs], Any], Inputs]:
    """Value and gradients with the unembedding split over the mesh, padded to equal shares; and their inputs."""

    def local(inputs: Inputs) -> Any:
        loss = partial(vocab_sharded_loss, clipped_loss, axis_name="vocab", vocabulary=size.vocabulary, chunk=CHUNK)
        return by_gradient(lambda inputs: loss(*inputs)[0])(inputs)

    spec = Inputs(P(), P("vocab"), P(), P(), P(), P())
    function = jax.shard_map(local, mesh=mesh, in_specs=(spec,), out_specs=(P(), (P(), P("vocab"))))
    columns = -(-size.vocabulary // mesh.size) * mesh.size
    matrix = placed(jax.ShapeDtypeStruct((columns, size.width), dtype), mesh, P("vocab"))
    return function, placed(shapes(size, dtype), mesh, P())._replace(unembedding=matrix)


def compile_for(function: Callable[[Inputs], Any], inputs: Inputs, platform: str | None = None) -> Compiled:
    """Compiles, and keeps the program's text: from a dump for TPUs, where the executable cannot always print it."""
    lowered = jax.jit(function).trace(inputs).lower(lowering_platforms=(platform,) if platform else None)
    if platform != "tpu":
        executable = lowered.compile()
        return Compiled(_temp_bytes(executable), executable.as_text() or "", executable)
    with tempfile.TemporaryDirectory() as folder:
        executable = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        text = next(Path(folder).glob("*after_codegen.txt")).read_text()
    return Compiled(_temp_bytes(executable), text, executable)


def figures(size: Size, actions: float, compiled: Compiled) -> Row:
    """Memory, and matrix work in units of one projection of all tokens."""
    visits = max(1, -(-round(actions * size.tokens) // min(CHUNK, size.tokens)))
    counted = "tpu_custom_call" not in compiled.text  # what a kernel multiplies, its caller cannot see
    flops = hlo.matmul_flops(compiled.text, trips=visits)
    return {
        "temp_gib": compiled.temp_bytes / GIB,
        "tflop": flops / 1e12 if counted else None,
        "matmuls": flops / (2.0 * size.tokens * size.width * size.vocabulary) if counted else None,
        "holds_logits": hlo.holds(compiled.text, size.tokens, size.vocabulary),
        "collectives": sorted({kind for kind, _ in hlo.collectives(compiled.text)}),
    }


def draw(size: Size, actions: float) -> Inputs:
    """A batch of one row; a share of `actions` of its columns are actions, the first never."""
    rng = np.random.default_rng(0)
    like = shapes(size, jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    normal = lambda leaf, scale: jnp.asarray(scale * rng.standard_normal(leaf.shape, np.float32), leaf.dtype)  # noqa: E731
    mask = rng.permuted(np.arange(size.tokens) < round(actions * size.tokens))[None]
    mask[:, 0] = False
    row = lambda mean: jnp.asarray(mean + rng.standard_normal(mask.shape), jnp.float32)  # noqa: E731
    data = {"old_logprobs": row(-np.log(size.vocabulary)), "advantages": row(0.0), "action_mask": jnp.asarray(mask)}
    weights = jnp.asarray(mask / max(mask.sum(), 1), jnp.float32)
    return like._replace(
        hidden=normal(like.hidden, 1.0), unembedding=normal(like.unembedding, size.width**-0.5),
        tokens=jnp.asarray(rng.integers(0, size.vocabulary, mask.shape), jnp.int32),
        parents=jnp.arange(-1, size.tokens - 1, dtype=jnp.int32)[None], action_mask=jnp.asarray(mask),
        data=data | {"weights": weights},
    )  # fmt: skip


def shapes(size: Size, dtype: Any) -> Inputs:
    row = partial(jax.ShapeDtypeStruct, (1, size.tokens))
    data = {name: row(jnp.float32) for name in ("old_logprobs", "advantages", "weights")}
    matrix = jax.ShapeDtypeStruct((size.vocabulary, size.width), dtype)
    hidden = jax.ShapeDtypeStruct((1, size.tokens, size.width), dtype)
    ids, mask = row(jnp.int32), row(jnp.bool_)
    return Inputs(hidden, matrix, ids, ids, mask, data | {"action_mask": mask})


def placed(tree: Any, mesh: Mesh, spec: P) -> Any:
    """Shapes that say where their arrays will lie."""
    put = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(put, tree)


def tpu_devices(topology: str) -> Sequence[Any]:
    """Devices of a described TPU, such as "v5p:2x2x1", to compile for with libtpu and without a TPU."""
    from jax.experimental import topologies

    for name, value in COMPILE_ONLY.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def table(rows: Sequence[Row]) -> str:
    """The rows for a person to read."""
    titles: tuple[str, ...] = ("size TxDxV", "", "who", "time / naive", "ms", "temp GiB", "TFLOP", "matmuls", "[T, V]")
    show = lambda row, name, digits: "-" if row.get(name) is None else f"{row[name]:.{digits}f}"  # noqa: E731
    lines: list[tuple[str, ...]] = [titles]
    for row in rows:
        cells = [row["size"], row["what"], row["who"]]
        if "error" in row:
            lines.append((*cells, row["error"]))
            continue
        digits = (("time_ratio", 2), ("ms", 1), ("temp_gib", 3), ("tflop", 2), ("matmuls", 2))
        lines.append((*cells, *(show(row, *column) for column in digits), "held" if row["holds_logits"] else "no"))
    widths = [max(len(line[i]) for line in lines if len(line) == len(titles)) for i in range(len(titles))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _row(size: Size, dtype: Any, what: str, who: str, platform: str) -> Row:
    name = f"{size.tokens}x{size.width}x{size.vocabulary}"
    return {"size": name, "dtype": jnp.dtype(dtype).name, "platform": platform, "what": what, "who": who}


def _temp_bytes(executable: Any) -> int:
    return executable.memory_analysis().temp_size_in_bytes


def _failure(error: Exception) -> Row:
    return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
