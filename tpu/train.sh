#!/usr/bin/env bash
# Trains on the accelerators of this host, or of all hosts of a slice or a Slurm step, from the newest checkpoint where
# there is one; the same line on every host at the same time:
#     bash tpu/train.sh CONFIG [name=value ...]
# So a host that was preempted, or a pod that was started again, runs the same line. SIGTERM leaves a checkpoint.
# Several hosts need a directory that all of them see: runs=/shared/runs.
set -euo pipefail
[[ $# -ge 1 ]] || { echo "usage: bash tpu/train.sh CONFIG [name=value ...]" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -d .venv ]] && PATH="$PWD/.venv/bin:$PATH"
# The CPU answers where the run lies, so that nothing holds the chips when training starts.
directory="$(JAX_PLATFORMS=cpu agentrl config "$@" |
    python -c 'import json, sys; c = json.load(sys.stdin); print(c["runs"] + "/" + c["name"])')"
more=()
[[ -f "$directory/config.json" ]] && more+=(--resume)  # process 0's answer holds for all
# GKE, Slurm, multislice and SkyPilot say it in the environment. A TPU VM says it nowhere there: SEVERAL_HOSTS=1 does.
if [[ "${TPU_WORKER_HOSTNAMES:-}" == *,* || "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 || "${MEGASCALE_NUM_SLICES:-1}" -gt 1 ||
    "${SKYPILOT_NODE_IPS:-}" == *$'\n'* || -n "${SEVERAL_HOSTS:-}" ]]
then
    more+=(--multihost)
fi
exec agentrl train "$1" "${more[@]}" "${@:2}"
