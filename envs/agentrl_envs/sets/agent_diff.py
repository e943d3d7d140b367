"""Agent-Diff: seeds and tests of Slack, Linear, Calendar and Box replicas, with state-diff assertions.

At the origin the files lie in several folders of `backend/seeds`; here they are in `seeds/` and `testsuites/`.
"""

from __future__ import annotations

from ..data import DataSet, File

_FILES = {
    "seeds/box_default.json": "0e133ebd09ac3e5fca4439bb7e6476ad6c1b5f2c31466899d32b699e7767e1c0",
    "seeds/calendar_default.json": "1ebbd34a3409a5139204d06cfc70db65f2beed116a514da5e60a69aea13833fa",
    "seeds/linear_expanded.json": "e9194b55f5ff1b009e67e3102948be3409018de38aebde27b6d390945f37632c",
    "seeds/slack_bench_v2.json": "5cad8e19b715f6c56947e39fc0fa604f00361ef9779430daaa10a5f12cc6f2e4",
    "testsuites/box_bench.json": "901c5a12ff875d60c6ec1bdccfe0ddcb7a84c168d66b8f2492d0e5f74cb3bcc3",
    "testsuites/calendar_bench.json": "5f1aa994005909eb0925da1bca82c99d03cdca80feb8890c586471fbef3cf282",
    "testsuites/linear_bench.json": "56493d6fe456777bdf49ec8cd769851b20c51d5cb4aad6e909a02fac4a99da93",
    "testsuites/slack_bench_v2.json": "301c10d00dbe03ca8d0ce1aa9539f64fee97ebc4beffaa4fd010109651d00e99",
}

AGENT_DIFF = DataSet(
    name="agent_diff",
    repository="agent-diff-bench/agent-diff",
    commit="2354987ad6497f3bf46670b1b924dda48550603e",
    licence="MIT",
    files={name: File(origin=None, sha256=sha256) for name, sha256 in _FILES.items()},
)
