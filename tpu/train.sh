#!/usr/bin/env bash
# Trains on the accelerators of this one host, from the newest checkpoint where there is one:
#     bash tpu/train.sh CONFIG [name=value ...]
# So a host that was preempted, or a pod that was started again, runs the same line. SIGTERM leaves a checkpoint.
# `agentrl train` is one process today: on several hosts it would be several runs, or wait for the others for ever.
set -euo pipefail
[[ $# -ge 1 ]] || { echo "usage: bash tpu/train.sh CONFIG [name=value ...]" >&2; exit 2; }
if [[ "${TPU_WORKER_HOSTNAMES:-}" == *,* || "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 || "${MEGASCALE_NUM_SLICES:-1}" -gt 1 ]]
then
    echo "train.sh: \`agentrl train\` is one process and this slice has several hosts; take a slice of one host" \
        "(v5litepod-8, v5p-8, v6e-8), or run tpu/smoke.py here" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -d .venv ]] && PATH="$PWD/.venv/bin:$PATH"
# The CPU answers where the run lies, so that nothing holds the chips when training starts.
directory="$(JAX_PLATFORMS=cpu agentrl config "$@" |
    python -c 'import json, sys; c = json.load(sys.stdin); print(c["runs"] + "/" + c["name"])')"
resume=()
[[ -f "$directory/config.json" ]] && resume=(--resume)
exec agentrl train "$1" "${resume[@]}" "${@:2}"
