"""The environment contender of a side-by-side harness: the work of `benchmarks/env.py`. Prints one line `RESULT {...}`.

As with the peers, the environment is in this process; `--processes` sends every step through two worker processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from agentrl_jax.rollout.pool import Pool
from benchmarks.env import REF, STEPS, TURNS, Inline, make_plan, make_renderer, peak_rss_gib, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=33)
    parser.add_argument("--processes", action="store_true")
    arguments = parser.parse_args()
    try:
        from common import Stopwatch, emit  # pyright: ignore[reportMissingImports] - the harness' own clock and line
    except ImportError:
        Stopwatch, emit = None, None
    renderer, plan = make_renderer(), make_plan()
    watch, wall, cpu = Stopwatch() if Stopwatch else None, [], []
    with Pool(REF, 2) if arguments.processes else nullcontext(Inline()) as pool:
        begun = time.perf_counter()
        play(pool, renderer, plan)
        first = time.perf_counter() - begun
        for _ in range(arguments.reps):
            now, used = time.perf_counter(), time.process_time()
            with watch or nullcontext():
                assert play(pool, renderer, plan) == STEPS
            wall.append(time.perf_counter() - now)
            cpu.append(time.process_time() - used)
    fields = {
        "bench": "env", "who": "ours, two worker processes" if arguments.processes else "ours", "turns": TURNS,
        "steps": STEPS, "compile_s": round(first - median(wall), 2), "steps_per_s": round(STEPS / median(wall), 1),
        "cpu_us_per_step": round(1e6 * median(cpu) / STEPS, 1),
    }  # fmt: skip
    if watch is not None and emit is not None:
        emit(**fields, **watch.fields())
        return
    fields |= {"wall_s": wall, "cpu_s": cpu, "median_s": median(wall), "median_cpu_s": median(cpu)}
    print("RESULT " + json.dumps(fields | {"peak_rss_gib": peak_rss_gib()}), flush=True)


if __name__ == "__main__":
    main()
