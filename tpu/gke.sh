#!/usr/bin/env bash
# Builds the image, pushes it, and runs the smoke test on a slice of a GKE cluster through xpk (pip install xpk):
#     PROJECT=... ZONE=... CLUSTER=... REPOSITORY=REGION-docker.pkg.dev/PROJECT/NAME bash tpu/gke.sh
# TPU_TYPE (v5litepod-16), NUM_SLICES (1) and NAME (agentrl-smoke) may be set too. The cluster was made by
# `xpk cluster create --cluster $CLUSTER --tpu-type $TPU_TYPE --num-slices 1 --project $PROJECT --zone $ZONE --spot`.
# To train on a slice of one host:  ... TPU_TYPE=v5litepod-8 NAME=agentrl-train bash tpu/gke.sh configs/quickstart.py
# xpk keeps nothing of a pod's disk: runs that must outlive it belong on the volume of tpu/jobset-train.yaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${PROJECT:?the Google Cloud project}" "${ZONE:?such as us-west4-a}" "${CLUSTER:?the GKE cluster}"
: "${REPOSITORY:?the Artifact Registry repository, such as us-west4-docker.pkg.dev/PROJECT/NAME}"
image="$REPOSITORY/agentrl:$(git rev-parse --short HEAD)"
command=". tpu/env.sh && python tpu/smoke.py --multihost --platform tpu"
[[ $# -eq 0 ]] || command+=" && exec bash tpu/train.sh$(printf ' %q' "$@")"

docker build -f tpu/Dockerfile -t "$image" .
docker push "$image"
xpk workload create \
    --project "$PROJECT" --zone "$ZONE" --cluster "$CLUSTER" \
    --workload "${NAME:-agentrl-smoke}" \
    --tpu-type "${TPU_TYPE:-v5litepod-16}" --num-slices "${NUM_SLICES:-1}" \
    --docker-image "$image" \
    --command "$command"
