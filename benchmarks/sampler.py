"""Sampling throughput of the engine: ragged prompts, ragged stops, and what a shared prompt costs.

`agentrl bench sampler` prints it. The work: 32 prompts of 8 to 128 tokens (log-normal, median 48), up to 128 new
tokens each at temperature 1, every token a stop with probability 1/64, on random weights. A finished row leaves the
batch, so the cost follows the draws and the tokens counted are those drawn. CPU seconds of the process, compilation
excluded; on a machine that others use too, pin one CPU (taskset) and read these rather than the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import jax
import numpy as np

from agentrl_jax.models import llama
from agentrl_jax.rollout.sampling import SampleRequest
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.publish import publish

PRESETS = {
    "tiny": llama.LlamaConfig(
        vocab_size=2048, width=64, layers=2, heads=4, kv_heads=2, head_width=16, mlp_width=192
    ),
    "small": llama.LlamaConfig(
        vocab_size=49152, width=256, layers=8, heads=4, kv_heads=2, head_width=64, mlp_width=768, rope_theta=1e5
    ),
    "smollm2-135m": llama.LlamaConfig(
        vocab_size=49152, width=576, layers=30, heads=9, kv_heads=3, head_width=64, mlp_width=1536, rope_theta=1e5
    ),
}  # fmt: skip
PROMPTS, NEW, GROUP, SHARED = 32, 128, 8, 512
FIRST = 16  # first id that is drawn for prompts

Row = dict[str, Any]


def make_engine(config: llama.LlamaConfig, params: Any, stop_ids: Sequence[int], context: int) -> Engine:
    """The engine that is measured: 32 slots, up to 32 tokens a dispatch."""
    engine = Engine(
        config, slots=PROMPTS, context=context, bank=16, prefill_chunk=16, decode_steps=32, stop_ids=stop_ids, seed=0
    )
    engine.publish(publish(config, params), 0)
    return engine


def sample(engine: Engine, prompts: Sequence[Sequence[int]], seed: int, new: int = NEW) -> int:
    """Sample every prompt to its end; the number of tokens drawn."""
    engine.publish(engine.params, seed)  # else the last call's prompts would be taken up again
    for slot, prompt in enumerate(prompts):
        engine.submit(SampleRequest(
            slot=slot, key=(seed, slot), ids=tuple(prompt), fresh=True, max_tokens=new, temperature=1.0
        ))  # fmt: skip
    drawn = 0
    while engine.busy:
        drawn += sum(len(done.ids) for done in engine.advance())
    return drawn


def measure(preset: str, rounds: int) -> list[Row]:
    """One row for throughput, one for a prompt of 512 tokens that 8 members share."""
    config, rng = PRESETS[preset], np.random.default_rng(1)
    lengths = np.exp(rng.normal(np.log(48), 0.6, PROMPTS)).astype(int).clip(8, 128)
    lengths[0] = 128
    prompts = [rng.integers(FIRST, config.vocab_size, n).tolist() for n in lengths]
    stops = range(FIRST, FIRST + config.vocab_size // 64)
    engine = make_engine(config, llama.init(config, jax.random.key(0)), stops, SHARED + NEW)
    return [_throughput(preset, engine, prompts, rounds), _sharing(preset, engine, rounds)]


def _throughput(preset: str, engine: Engine, prompts: list[list[int]], rounds: int) -> Row:
    started = time.perf_counter()
    sample(engine, prompts, 1)
    first = time.perf_counter() - started
    wall, cpu, tokens = [], [], []
    for n in range(rounds):
        now, used = time.perf_counter(), time.process_time()
        tokens.append(sample(engine, prompts, n + 2))
        wall.append(time.perf_counter() - now)
        cpu.append(time.process_time() - used)
    return {
        "preset": preset, "what": "throughput", "platform": jax.default_backend(), "prompts": len(prompts),
        "new_tokens": tokens, "cpu_s": [round(x, 4) for x in cpu], "wall_s": [round(x, 4) for x in wall],
        "tokens_per_cpu_s": round(sum(tokens) / sum(cpu), 1), "tokens_per_s": round(sum(tokens) / sum(wall), 1),
        "first_call_s": round(first, 2), "batches": [int(x[7:]) for x in engine.cache_sizes() if "decode" in x],
    }  # fmt: skip


def _sharing(preset: str, engine: Engine, rounds: int) -> Row:
    """What a group's first token costs, and its prompt's prefill alone, against one member's; in turn."""
    rng = np.random.default_rng(2)
    vocab = PRESETS[preset].vocab_size

    def group(members: int) -> float:
        ids = tuple(rng.integers(FIRST, vocab, SHARED - 1).tolist())
        for slot in range(members):
            engine.submit(SampleRequest(
                slot=slot, key=(slot,), ids=ids, fresh=True, max_tokens=1, temperature=1.0,
                share_with=0 if slot else None,
            ))  # fmt: skip
        used = time.process_time()
        while engine.busy:
            engine.advance()
        return time.process_time() - used

    for count in (1, GROUP):
        group(count)
    one, all_ = [], []
    for _ in range(rounds):
        one.append(group(1))
        all_.append(group(GROUP))
    return {
        "preset": preset, "what": f"{GROUP} members share {SHARED - 1} tokens", "platform": jax.default_backend(),
        "cpu_s": [round(x, 4) for x in all_], "one_member_cpu_s": [round(x, 4) for x in one],
        "cost_ratio": round(median(all_) / median(one), 3),
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = ["preset         what                              CPU s  tokens/CPU s  cost / one member"]
    for row in rows:
        rate, ratio = row.get("tokens_per_cpu_s", ""), row.get("cost_ratio", "")
        lines.append(f"{row['preset']:<15}{row['what']:<32}{median(row['cpu_s']):>7.3f}{rate:>14}{ratio:>19}")
    return "\n".join(lines)
