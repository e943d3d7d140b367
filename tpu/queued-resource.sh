#!/usr/bin/env bash
# A slice through the queue of Cloud TPU, from request to deletion:
#     export PROJECT=... ZONE=us-west4-a
#     bash tpu/queued-resource.sh create     # asks for it; waits in the queue, costs nothing until it is there
#     bash tpu/queued-resource.sh wait       # until it is ACTIVE
#     bash tpu/queued-resource.sh setup      # this checkout's HEAD and .venv, on every host
#     bash tpu/queued-resource.sh smoke      # on every host at once
#     bash tpu/queued-resource.sh train configs/quickstart.py [name=value ...]    # a slice of one host; in background
#     bash tpu/queued-resource.sh log        # follows it
#     bash tpu/queued-resource.sh fetch      # its runs/ to here
#     bash tpu/queued-resource.sh delete     # ends the billing
# NAME (agentrl), TPU_TYPE (v5litepod-8), RUNTIME (for the type) and CAPACITY (--spot, --reserved or empty) may be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${PROJECT:?the Google Cloud project}" "${ZONE:?such as us-west4-a}"
NAME="${NAME:-agentrl}" TPU_TYPE="${TPU_TYPE:-v5litepod-8}" CAPACITY="${CAPACITY---spot}"
where=(--project "$PROJECT" --zone "$ZONE")

runtime() {  # the image that belongs to a type of TPU
    case "$TPU_TYPE" in
        v4-*) echo tpu-ubuntu2204-base ;;
        v5litepod-*) echo v2-alpha-tpuv5-lite ;;
        v5p-*) echo v2-alpha-tpuv5 ;;
        v6e-*) echo v2-alpha-tpuv6e ;;
        *) echo "queued-resource.sh: no runtime known for TPU_TYPE=$TPU_TYPE; set RUNTIME" >&2; exit 2 ;;
    esac
}

on() {  # on WORKER COMMAND: a command in the checkout on one host, or on all
    gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker "$1" --command "cd agentrl-jax && $2"
}

case "${1:-}" in
    create)
        image="${RUNTIME:-$(runtime)}"
        gcloud compute tpus queued-resources create "$NAME" --node-id "$NAME" "${where[@]}" \
            --accelerator-type "$TPU_TYPE" --runtime-version "$image" ${CAPACITY:+"$CAPACITY"}
        ;;
    wait)
        while true; do
            state="$(gcloud compute tpus queued-resources describe "$NAME" "${where[@]}" --format 'value(state.state)')"
            echo "$(date +%T) $state"
            case "$state" in
                ACTIVE) exit 0 ;;
                FAILED | SUSPENDING | SUSPENDED | DELETING) exit 1 ;;
            esac
            sleep "${POLL_SECONDS:-30}"
        done
        ;;
    setup)
        archive="$(mktemp -d)/agentrl-jax.tar.gz"
        git archive --format tar.gz --prefix agentrl-jax/ -o "$archive" HEAD
        gcloud compute tpus tpu-vm scp "$archive" "$NAME:" "${where[@]}" --worker all
        gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker all \
            --command "tar xzf agentrl-jax.tar.gz && bash agentrl-jax/tpu/setup.sh tpu"
        ;;
    smoke)
        on all ". tpu/env.sh && .venv/bin/python tpu/smoke.py --multihost --platform tpu"
        ;;
    train)
        [[ $# -ge 2 ]] || { echo "usage: queued-resource.sh train CONFIG [name=value ...]" >&2; exit 2; }
        hosts="$(gcloud compute tpus tpu-vm describe "$NAME" "${where[@]}" --format 'value(networkEndpoints[].ipAddress)' |
            tr ';' '\n' | grep -c .)"
        if [[ "$hosts" -ne 1 && "$*" != *runs=* ]]; then
            echo "queued-resource.sh: $NAME has $hosts hosts; mount a disk that all of them see, and say runs=/ITS/DIR" >&2
            exit 2
        fi
        several=
        [[ "$hosts" -eq 1 ]] || several="SEVERAL_HOSTS=1 "
        # A connection that breaks does not end the run.
        on all ". tpu/env.sh || exit; ${several}nohup bash tpu/train.sh$(printf ' %q' "${@:2}") > train.log 2>&1 < /dev/null & sleep 1"
        ;;
    log) on 0 "tail -n 100 -F train.log" ;;
    fetch) gcloud compute tpus tpu-vm scp --recurse "$NAME:agentrl-jax/runs" . "${where[@]}" --worker 0 ;;
    delete) gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force --quiet ;;
    *) sed -n '2,12p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
