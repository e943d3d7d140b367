# shellcheck shell=sh
# Environment of a TPU host. Sourced, not run:  . tpu/env.sh
# Each line with its reason; what is left out on purpose, and why, is in tpu/flags.md. What is set already stays.

# A TPU that does not come up is an error. Unset, JAX goes on with the CPU and says so in one warning.
# `cpu` stays: the smoke test compares with it.
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"

# After a preemption the same programs are read instead of compiled: an update of 8B takes 70 to 170 CPU-seconds.
# A gs:// folder is shared by all hosts and outlives them.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/agentrl/xla}"

# Matmuls whose weights are spread over `fsdp` gather them whole, never in slivers. Compiled for v5e:4x4, 0.6B, 8k
# tokens, without explicit gathers: 13,860 collective-permutes and 0.84 s by the compiler's cycles; with this, none and
# 0.40 s. Where the model gathers explicitly it changes nothing. libtpu ends the process on a flag that it does not know.
export LIBTPU_INIT_ARGS="${LIBTPU_INIT_ARGS:---xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000}"

# Lines reach `kubectl logs` and ssh when they are printed, not when a buffer is full: the last one before a hang counts.
export PYTHONUNBUFFERED=1
