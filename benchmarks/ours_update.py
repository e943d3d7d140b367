"""The update contender of a side-by-side harness: one optimisation step, by the learner that the recipes run.

BENCH_DATA is an npz of ragged trajectories (tokens, loss_mask, old_logprobs, lengths, prompt_lengths, group,
advantages), BENCH_MODEL a Hugging Face Llama folder. GRPO without a KL term, mean per sequence, clip 0.2; AdamW behind
a global norm of 1. Metrics are on: they are computed and fetched inside the clock. Prints one line `RESULT {...}`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

from agentrl_jax.batch import Source, TokenBatch
from agentrl_jax.learner.optimizers import adamw
from agentrl_jax.learner.score import Scorer
from agentrl_jax.learner.state import init_state
from agentrl_jax.learner.update import Update, make_update
from agentrl_jax.models import decoder
from agentrl_jax.models.families import family_of
from agentrl_jax.protocol import StopReason, Task, Verdict
from agentrl_jax.rl import algorithms
from agentrl_jax.rl.objective import assign, outcome, policy_loss
from agentrl_jax.rollout.packing import pack, rows_needed
from agentrl_jax.rollout.records import Ledger, Receipt, Trajectory
from agentrl_jax.runtime import pretrained

OPTIMIZER = adamw(1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
# The harness hands out advantages instead of rewards: they pass as they are.
OBJECTIVE = replace(algorithms.grpo(clip=0.2, beta=0.0), advantage=outcome)
_LANES = 64  # widths are multiples of it


class Work(NamedTuple):
    """Everything that one update reads, and the counts that its figures are quoted by."""

    update: Update
    state: Any
    batch: TokenBatch
    micro: range
    real_tokens: int  # of the trajectories, every copy of a prompt counted


def groups_of(data: dict[str, np.ndarray], *, share: bool = True) -> list[list[Trajectory]]:
    """The harness' ragged arrays as trajectories. Without `share` every member is a group of its own."""
    ids = data["group"] if share else np.arange(len(data["lengths"]))
    groups: list[list[Trajectory]] = [[] for _ in range(int(ids.max()) + 1)]
    starts = np.concatenate([[0], np.cumsum(data["lengths"])])
    for index, group in enumerate(ids.tolist()):
        part = slice(int(starts[index]), int(starts[index + 1]))
        prompt = int(data["prompt_lengths"][index])
        groups[group].append(_trajectory(data, part, prompt, group, len(groups[group])))
    return groups


def _trajectory(data: dict[str, np.ndarray], part: slice, prompt: int, group: int, member: int) -> Trajectory:
    chosen = data["loss_mask"][part] != 0
    assert not chosen[:prompt].any()
    sources = np.where(chosen, int(Source.POLICY), int(Source.ENVIRONMENT))
    sources[:prompt] = int(Source.USER)
    turns = np.cumsum(np.diff(chosen.astype(np.int64), prepend=0) > 0) - 1
    task = Task(id=f"task {group}", split="train")
    receipt = Receipt(
        environment="side-by-side", environment_version="1", verifier_version="1", tools=(), ref=None, task=task,
        seed=group, reset_hash="", steps=(), ledger=Ledger(), stop=StopReason.COMPLETED,
    )  # fmt: skip
    return Trajectory(
        group=group, member=member, task=task, seed=group, tokens=tuple(data["tokens"][part].tolist()),
        sources=tuple(sources.tolist()), action_mask=tuple(chosen.tolist()),
        behavior_logprobs=tuple(np.where(chosen, data["old_logprobs"][part], 0.0).tolist()),
        policy_versions=tuple(np.where(chosen, 0, -1).tolist()), turn_ids=tuple(np.maximum(turns, 0).tolist()),
        prompt_length=prompt, stop=StopReason.COMPLETED, verdict=Verdict(outcome=True), attribution=None,
        receipt=receipt,
    )  # fmt: skip


def make_batch(groups: Sequence[Sequence[Trajectory]], advantages: np.ndarray, width: int) -> TokenBatch:
    """Packed into rows of `width`, with credit and weights filled in by the objective; on the device."""
    size = max(map(len, groups))
    host = pack(groups, rows=rows_needed(groups, width=width, group_size=size), width=width, group_size=size, pad_id=0)
    present = np.zeros((len(groups), size), np.bool_)
    for index, group in enumerate(groups):
        present[index, : len(group)] = True
    rewards = np.zeros(present.shape, np.float32)
    rewards[present] = advantages
    return jax.jit(partial(assign, OBJECTIVE))(jax.device_put(host), rewards, present, present)


def prepare(
    data: dict[str, np.ndarray], model: Path, *, width: int | None = None, micro_rows: int | None = None,
    remat: bool | str = False, chunk: int = 256, share: bool = True,
) -> Work:  # fmt: skip
    """The first state and the batch. The width is the longest trajectory's by default, and all rows one micro-batch."""
    raw = json.loads((model / "config.json").read_text())
    config = family_of(raw["model_type"]).config_from_json(raw, str(model))
    groups = groups_of(data, share=share)
    width = width or -(-int(data["lengths"].max()) // _LANES) * _LANES
    batch = make_batch(groups, data["advantages"], width)
    hidden = partial(decoder.hidden, config, remat=remat)
    scorer = Scorer(hidden, partial(decoder.unembedding, config), chunk=chunk)
    rows = batch.tokens.shape[0]
    each = micro_rows or rows
    loss = partial(policy_loss, OBJECTIVE)
    update = make_update(scorer, loss, OPTIMIZER, micro_rows=each)
    state = init_state(OPTIMIZER, pretrained.load_params(model, config))
    return Work(update, state, batch, range(0, rows, each), int(data["lengths"].sum()))


def main() -> None:
    a = _arguments()
    with np.load(os.environ["BENCH_DATA"]) as npz:
        data = {name: npz[name] for name in npz.files}
    work = prepare(
        data, Path(os.environ["BENCH_MODEL"]), width=a.width, micro_rows=a.micro_rows, remat=a.remat, chunk=a.chunk,
        share=a.prompts == "shared",
    )  # fmt: skip
    try:
        from common import Stopwatch, emit  # pyright: ignore[reportMissingImports] - the harness' own clock and line
    except ImportError:
        Stopwatch, emit = None, None
    watch = Stopwatch() if Stopwatch else None
    first, first_s, wall, cpu = _run(work, a.reps, watch)
    fields: dict[str, Any] = {
        "bench": "update", "who": "ours" + _suffix(a), "preset": os.environ.get("BENCH_PRESET"), "dtype": "float32",
        "trajectories": len(data["lengths"]), "micro_steps": len(work.micro), "real_tokens": work.real_tokens,
        "computed_tokens": work.batch.tokens.size, "loss0": first["loss"], "grad_norm0": first["grad_norm"],
        "compile_s": round(first_s - statistics.median(wall), 2),
        "tokens_per_s": round(work.real_tokens / statistics.median(wall), 1), "metrics0": first,
    }  # fmt: skip
    if watch is not None and emit is not None:
        emit(**fields, **watch.fields())
        return
    fields |= {"wall_s": wall, "cpu_s": cpu}
    fields |= {"median_s": statistics.median(wall), "median_cpu_s": statistics.median(cpu)}
    fields["peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
    print("RESULT " + json.dumps(fields), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--remat", nargs="?", const="full", default="none", help="what the backward pass recomputes")
    parser.add_argument("--chunk", type=int, default=256, help="tokens projected to the vocabulary at once")
    parser.add_argument("--width", type=int, help="tokens a row")
    parser.add_argument("--micro-rows", type=int, help="rows a micro-batch")
    parser.add_argument("--prompts", choices=("shared", "copied"), default="shared")
    return parser.parse_args()


def _run(work: Work, reps: int, watch: Any) -> tuple[dict[str, float], float, list[float], list[float]]:
    """The first update's figures and seconds, then wall and CPU seconds of each of `reps` more. Consumes the state."""
    state, wall, cpu, hosted, first = work.state, [], [], {}, {}
    for _ in range(reps + 1):
        now, used = time.perf_counter(), time.process_time()
        with watch if watch is not None and first else nullcontext():
            state, info = work.update.step(state, work.batch, work.micro)
            hosted = info.to_host()
            jax.block_until_ready(state)
        first = first or hosted
        wall.append(time.perf_counter() - now)
        cpu.append(time.process_time() - used)
    assert set(work.update.cache_sizes().values()) == {1}, "recompiled"
    return first, wall[0], wall[1:], cpu[1:]


def _suffix(a: argparse.Namespace) -> str:
    return ("" if a.remat == "none" else f"-remat-{a.remat}") + ("" if a.prompts == "shared" else "-copied")


if __name__ == "__main__":
    main()
