#!/usr/bin/env bash
# Makes .venv on a TPU VM or a GPU node:  bash tpu/setup.sh [tpu|cuda13|cuda12]
# uv brings Python 3.12 where the machine has an older one (TPU VM images have 3.10).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
accelerator="${1:-tpu}"
case "$accelerator" in
    tpu) packages=(-e '.[tpu]') ;;
    cuda12 | cuda13) packages=(-e . "jax[$accelerator]") ;;
    *) echo "setup.sh: expected tpu, cuda12 or cuda13, got '$accelerator'" >&2; exit 2 ;;
esac
export PATH="$HOME/.local/bin:$PATH"
command -v uv >/dev/null || python3 -m pip install --user --quiet uv
[[ -x .venv/bin/python ]] || uv venv --python 3.12 .venv
uv pip install --python .venv/bin/python -c constraints.txt "${packages[@]}"
