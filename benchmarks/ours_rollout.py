"""The sampling contender of a side-by-side harness: the work of `benchmarks/sampler.py` on the harness' own data.

BENCH_DATA is an npz with prompt_tokens, prompt_token_lengths and stop_ids, BENCH_MODEL a Hugging Face Llama folder.
Prints one line `RESULT {...}`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from agentrl_jax.models.families import family_of
from agentrl_jax.runtime import pretrained
from benchmarks.sampler import NEW, make_engine, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="what products are in")
    arguments = parser.parse_args()
    reps, folder = arguments.reps, Path(os.environ["BENCH_MODEL"])
    with np.load(os.environ["BENCH_DATA"]) as data:
        lengths, tokens, stops = data["prompt_token_lengths"], data["prompt_tokens"], data["stop_ids"].tolist()
    prompts = [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    raw = json.loads((folder / "config.json").read_text())
    config = family_of(raw["model_type"]).config_from_json(raw, str(folder))  # the harness' folder has no tokenizer
    config = dataclasses.replace(config, compute_dtype=arguments.dtype)
    params = pretrained.load_params(folder, config)
    engine = make_engine(config, params, stops, int(max(lengths)) + NEW)
    try:
        from common import Stopwatch, emit  # pyright: ignore[reportMissingImports] - the harness' own clock and line
    except ImportError:
        Stopwatch, emit = None, None
    started = time.perf_counter()
    sample(engine, prompts, 1)
    first = time.perf_counter() - started
    generated, wall, cpu = [], [], []
    watch = Stopwatch() if Stopwatch else None
    for rep in range(reps):
        now, used = time.perf_counter(), time.process_time()
        if watch is None:
            generated.append(sample(engine, prompts, rep + 2))
        else:
            with watch:
                generated.append(sample(engine, prompts, rep + 2))
        wall.append(time.perf_counter() - now)
        cpu.append(time.process_time() - used)
    rate = float(np.median(np.array(generated) / np.array(cpu)))
    who = "ours" if arguments.dtype == "float32" else "ours-bf16"
    fields = {
        "bench": "rollout", "who": who, "preset": os.environ.get("BENCH_PRESET"), "prompts": len(prompts),
        "generated": generated, "useful_tokens": generated,  # finished rows leave the batch: cost follows the draws
        "compile_s": round(first - float(np.median(wall)), 2), "tokens_per_cpu_s": round(rate, 1),
    }  # fmt: skip
    if watch is not None and emit is not None:
        emit(**fields, **watch.fields())
        return
    fields |= {"wall_s": wall, "cpu_s": cpu, "median_s": float(np.median(wall)), "median_cpu_s": float(np.median(cpu))}
    fields["peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
    print("RESULT " + json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
