# shellcheck shell=sh
# Environment of a GPU node. Sourced, not run:  . tpu/env-gpu.sh
# Each line with its reason; what is left out on purpose, and why, is in tpu/gpus.md. What is set already stays.

# A driver or plugin that does not load is an error. Unset, JAX goes on with the CPU and says so in one warning.
export JAX_PLATFORMS="${JAX_PLATFORMS:-cuda,cpu}"

# JAX takes 75 % of a GPU's memory when it starts and never more; the node is this run's alone. The rest is for NCCL's
# buffers, the CUDA context and cuBLAS.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.90}"

# Collectives start early and end late, with the matmuls of the next layer between: without it they wait in line.
export XLA_FLAGS="${XLA_FLAGS:---xla_gpu_enable_latency_hiding_scheduler=true}"

# NCCL is silent by default; when a link or an interface is wrong, its own line is the only one that names it.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# After a requeue the same programs are read instead of compiled. A shared file system serves all nodes.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/agentrl/xla}"

# Lines reach the log file when they are printed: the last one before a hang counts.
export PYTHONUNBUFFERED=1
