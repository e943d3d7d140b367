"""RunConfig: everything a run depends on, as one typed, frozen record.

A config file is a program: `def config() -> RunConfig`. There is no registry; what varies
is a value or a function in the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from agentrl_jax.models.lora import Lora
from agentrl_jax.protocol import EnvironmentRef, Json
from agentrl_jax.rl.objective import Objective
from agentrl_jax.rl.types import Reward, TurnCredit
from agentrl_jax.rollout.budgets import EvidenceRule
from agentrl_jax.rollout.records import Branch
from agentrl_jax.rollout.sampling import WHOLE, Cut
from agentrl_jax.rollout.turns import SameState

Place = str | Mapping[str, Json]  # a path, a URL (gs://bucket/name), or TensorStore's spec of a key-value store
Stage = Callable[[Any], None]  # takes the run, recipes.run.Run

# `compute_dtype`: of activations, the sampler and its cache. In bfloat16 sampler and learner round differently: their
# log-probabilities of a token lie about 0.01 apart, and the first ratios as far from 1.
# `param_dtype`: of the parameters that forward and backward read, and that exports hold. In bfloat16 the optimizer
# updates a copy in f32, its masters, and the parameters are that copy rounded; adapters are f32, and need none.
ComputeDtype = Literal["float32", "bfloat16"]
# adafactor keeps of second moments their means over rows and columns, and no first moment; muon makes the updates of
# matrices orthogonal and has one moment of each, adamw's of the rest. One learning rate means about the same to all.
OptimizerName = Literal["adamw", "adafactor", "muon"]
Remat = Literal["none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable"]  # see `models.decoder.hidden`


@dataclass(frozen=True, kw_only=True)
class TinyPolicy:
    """A Llama-architecture transformer with random parameters and a tokenizer built from the environment's words."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp_width: int = 384
    vocab_size: int = 512
    compute_dtype: ComputeDtype = "float32"
    param_dtype: ComputeDtype = "float32"


@dataclass(frozen=True, kw_only=True)
class PretrainedPolicy:
    """A Hugging Face directory, a GGUF file, a run directory, or a name that `agentrl models pull` knows.

    A run stands for what `agentrl export` makes of its newest checkpoint, which is kept as `exports/NUMBER` in it.

    With `lora` only adapters are trained.

    `frame`: how turns are written; `auto` is the directory's own chat template. `history`: what to do where the
    template leaves out reasoning of earlier turns: `keep` it, one sample an episode; or write as the `template` does,
    a new sample each time (at most `rollout.max_segments`). `thinking` sets the template's `enable_thinking`.
    """

    path: str
    frame: Literal["auto", "chatml", "tiny", "qwen3", "llama3", "gemma3"] = "auto"
    history: Literal["keep", "template"] = "keep"
    thinking: bool | None = None
    lora: Lora | None = None
    adapter: str | None = None  # a PEFT directory that adapters start from, of the rank, alpha and targets of `lora`
    compute_dtype: ComputeDtype = "float32"
    param_dtype: ComputeDtype = "float32"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How episodes are sampled. `slots` decode together; an episode keeps one slot and one worker while it runs.

    Where `top_k`, `top_p` or `min_p` cut, the tokens left to draw from are recorded, and the learner's policy (old and
    reference log-probabilities, KL and entropy as well) is the distribution over them: the first ratio is 1. The sets
    take a bit a token of the vocabulary for every column of a batch: `loop` rows x width x vocabulary / 8 bytes.
    """

    workers: int = 64  # environment processes; an episode keeps one from reset to verdict
    workers_url: str | None = None  # ray://auto or ray://HOST:PORT: on the nodes of that Ray cluster instead of here
    slots: int = 64  # rows of the decoding batch of a process, spread over its devices that sample
    tensor: int = 1  # devices of a host that share one copy of the sampler's weights and pages, by heads
    context: int = 256  # tokens a slot can hold: the longest episode
    max_turn_tokens: int = 24
    temperature: float = 1.0
    top_k: int = 0  # draw from the k likeliest tokens; 0 is off
    top_p: float = 1.0  # from the fewest likeliest that hold this mass; 1 is off
    min_p: float = 0.0  # from those of at least this share of the likeliest's probability; 0 is off
    # "calls": every turn, an evaluation's too, is one call of a tool with arguments that its schema allows, and nothing
    # else; one token a dispatch. The tokens allowed are recorded as those of a cut are.
    constrain: Literal["nothing", "calls"] = "nothing"
    calls: Literal["line", "json", "qwen", "llama"] = "line"
    describe_tools: bool = False  # put the tools' descriptions into the prompt
    bank: int = 16  # tiles that one prefill computes, of any slots
    prefill_chunk: int = 32  # tokens a tile
    decode_steps: int = 8  # tokens per decode dispatch
    start_deadline_s: float = 60.0
    step_deadline_s: float = 10.0
    max_segments: int = 8  # samples of an episode whose history is rendered anew (policy.history="template")
    # Each of these ends the run with a line that says what to do. An episode is dropped where it failed for reasons
    # outside the policy; it is valid where it is not dropped and has a score.
    max_failure_fraction: float = 0.25  # the share of a step's or an evaluation's episodes that may be dropped
    max_consecutive_drops: int = 32  # dropped one after another, over steps
    min_valid_fraction: float = 0.5  # of a step's episodes
    stall_s: float = 900.0  # without one answer of an environment or one sampled turn
    # Stop an episode once so many measured exchanges in a row each gained less evidence than the threshold; 0 is off.
    evidence_patience: int = 0
    evidence_threshold: float = 0.0
    free_space_gb: float = 1.0  # a run does not start, and stops between steps, with less room for its directory

    @property
    def cut(self) -> Cut:
        return Cut(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @property
    def evidence(self) -> EvidenceRule | None:
        if not self.evidence_patience:
            return None
        return EvidenceRule(threshold=self.evidence_threshold, patience=self.evidence_patience)

    @property
    def records(self) -> bool:
        """Whether turns bear kept sets."""
        return self.cut != WHOLE or self.constrain != "nothing"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Demonstrations by the environment's own teacher; `options` override the environment's (kinds, sloppiness)."""

    count: int
    split: str = "train"
    options: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Demonstrations by policies: what earlier runs with `RunConfig.store` kept, token by token as it was sampled.

    The policy must have the tokenizer that the store was written with. What was left unscored, or failed for reasons
    outside the policy, is left out.
    """

    path: Place
    only_successes: bool = True
    count: int | None = None  # so many, drawn by the run's seed; None: all


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Supervised steps on demonstrations, stopped while the policy still explores.

    `until_success`: stop once success on validation tasks reaches it (looked at every `check_every`
    steps); None trains for `steps`.
    """

    steps: int = 300
    demonstrations: tuple[Shown | Stored, ...] = ()
    drills: int = 0  # one-turn exercises of the environment that teach copying
    rename_handles: bool = False  # give the records of each demonstration other names at every step
    rows: int = 16  # packed rows a step
    width: int = 256  # tokens a row
    micro_rows: int = 16
    learning_rate: float = 1e-3
    warmup: int = 20
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    optimizer: OptimizerName = "adamw"
    moment_dtype: ComputeDtype = "float32"  # of first moments
    offload: bool = False  # moments and masters lie in the host's memory, but while an update is applied
    until_success: float | None = None
    check_every: int = 50
    check_episodes: int = 64


@dataclass(frozen=True, kw_only=True)
class RateCap:
    """What `rl.staleness.learning_rate_cap` needs to know, fitted on runs of this kind: there are no universal values.

    `batch_radius`: how far the params may move before stale samples leave the clip range; `critical_radius`: before
    training collapses; `update_norm`: bound on the norm of one update divided by the learning rate; `margin`: the share
    of the cap that is used.
    """

    batch_radius: float
    critical_radius: float
    update_norm: float
    margin: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Branching:
    """Members of a group that begin where another one stood: same state, same record, other tokens from there on.

    The first `trunks` members run from the reset. Each of the others continues one of them, in turn, from before a turn
    drawn evenly from 1 to `max_turn` by (seed, step, group, member); from the last one that the trunk came to, where it
    ended earlier; from the reset, where that was its first. With a `max_turn` beyond the usual length many leave at the
    last turn, which is the dearer way: replayed and read anew. See `rollout.branching` and, on weights,
    `rollout.packing`.

    A turn that n of the `group` members share trains with its trunk's advantage. Where that is measured from the mean
    of the group, what came of the same turn is in the baseline: the turn's gradient is in expectation
    `(group - n) / group` of what it would be. With `trunks=1` the turns before the first branching have none left, only
    noise; `rl.turns.branch_credit` with `credit_only` compares a turn with the other ways on and gives these 0.
    """

    trunks: int
    max_turn: int

    def branch(self, seed: int, step: int, group: int, member: int) -> Branch | None:
        """Where a member of the group begins; None: at the reset."""
        if member < self.trunks:
            return None
        turn = int(np.random.default_rng((seed, step, group, member)).integers(1, self.max_turn, endpoint=True))
        return Branch(member=(member - self.trunks) % self.trunks, turn=turn)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Reinforcement learning: `tasks` x `group` episodes a step, one publication a step.

    A step trains on exactly the episodes that (seed, step) plan, fast and slow ones alike. They begin `max_lag` steps
    ahead and run while the learner works; those that are under way at a publication go on with the new params. So no
    token is older than `max_lag` publications when it trains, and nothing is discarded for its age. 0 is on-policy.
    """

    steps: int = 60
    tasks: int = 16
    group: int = 8
    objective: Objective
    reward: Reward  # (violated, outcome, quality) arrays -> rewards, see rl.rewards
    credit: TurnCredit | None = None  # of turns, added to their episode's advantage, see rl.turns
    same_state: SameState = "exchanges"  # when turns of a group count as starting in one state, see rollout.turns
    most_turns: int | None = None  # an episode has with credit of their own; None: all that its budget allows
    learning_rate: float = 2e-4
    warmup: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optimizer: OptimizerName = "adamw"  # these three as in `Sft`
    moment_dtype: ComputeDtype = "float32"
    offload: bool = False
    width: int = 512  # tokens a packed row
    micro_rows: int = 4
    updates_per_batch: int = 1
    max_lag: int = 0  # steps; above 0 the objective needs a correction or a bound (`rl.objective.check_bounded`)
    branching: Branching | None = None  # None: every member runs from the reset
    rate_cap: RateCap | None = None  # keep learning_rate below what `max_lag` bears
    skip_constant_groups: bool = False  # do not pack groups without signal; they leave the denominators too
    train_truncated: bool = True  # False: a token-capped episode stays in the baseline but trains nothing
    train_tasks: int = 8192  # distinct tasks to draw from

    @property
    def rescores(self) -> bool:
        """Whether log-probs under the params at the start of a step are computed anew.

        Several updates of one fresh batch clip against them, and a correction starts from them. Stale samples without a
        correction keep the behavior policy as the old one: its ratio then makes up for their age.
        """
        return self.objective.correction is not None or (self.updates_per_batch > 1 and self.max_lag == 0)

    @property
    def oldest(self) -> int:
        """The largest lag of a token that trains, in optimiser steps; updates of the batch before this one count."""
        return (self.max_lag + 1) * self.updates_per_batch - 1


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out tasks on seeds of their own, apart from the training reward."""

    episodes: int = 256
    every: int = 20  # RL steps between evaluations; 0: only around stages
    every_episodes: int = 128
    split: str = "heldout"
    temperature: float = 1.0
    top_k: int = 0  # these three as in `Rollout`; nothing of training's is taken over
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 10_000

    @property
    def cut(self) -> Cut:
        return Cut(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True, kw_only=True)
class External:
    """Sampling by an inference server at `url`, where that is set, in place of the engine in this process.

    `server` says how it is asked and how it loads params: `vllm` by `/inference/v1/generate`, `vllm-completions` by
    `/v1/completions`; see `runtime.external` for the options each must be started with. A publication writes a Hugging
    Face directory into `exports`, which the server has to see under the same path, and has it loaded; the newest two
    stay. The environment variable AGENTRL_API_KEY is sent as the server's key.
    """

    url: str | None = None  # such as http://127.0.0.1:8000
    server: Literal["agentrl", "vllm", "vllm-completions", "sglang"] = "agentrl"
    model: str | None = None  # the name that it serves the policy by; None: not sent
    exports: str | None = None  # None: `published` in the run's directory
    deadline_s: float = 300.0  # of a turn, retries included
    reload_deadline_s: float = 600.0
    attempts: int = 4  # of a turn


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    every: int = 20  # optimizer steps
    keep: int = 2  # the newest
    best: int = 0  # beside them, those of highest success in an evaluation of `evaluation.every` at the same step


@dataclass(frozen=True, kw_only=True)
class HostLimits:
    """How long the processes of a run on several hosts wait for each other before all end with a line that says why.

    `timeout_s`: for one that comes late to a meeting (it is in a long rollout, and the others have ended theirs), or
    stays in a phase that needs all of them. `lost_s`: for a sign of life of one that may be gone.
    """

    timeout_s: float = 1800.0
    lost_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """How many devices lie along each axis of the learner's mesh; one axis of -1 takes those that the others leave.

    The rows of a batch are spread over data x fsdp. `fsdp` also splits parameters, gradients and optimizer state,
    gathered a layer at a time; `tensor` splits heads, MLP columns and vocabulary, `expert` the experts. A run may
    resume on another mesh.

    `sequence`: over `tensor` the activations between the layers are split by columns, too: long rows take less memory.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    sequence: bool = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    seed: int = 0
    environment: EnvironmentRef
    policy: TinyPolicy | PretrainedPolicy
    stages: tuple[Stage, ...]
    rollout: Rollout = field(default_factory=Rollout)
    external: External = field(default_factory=External)
    sft: Sft | None = None
    loop: Loop | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    mesh: MeshShape = field(default_factory=MeshShape)
    # "colocated": the same devices sample and learn, in turn. "split": of each process's devices the last
    # `sampler_devices` sample and the others learn; a publication goes from device to device.
    placement: Literal["colocated", "split"] = "colocated"
    sampler_devices: int = 0
    hosts: HostLimits = field(default_factory=HostLimits)
    # What the backward pass recomputes of each layer: less memory, up to a third more work. True is full.
    remat: bool | Remat = False
    logprob_chunk: int = 256  # tokens that each device projects to the vocabulary at once
    runs: str = "runs"
    # Where every trajectory of the rl stage is kept (`runtime.store`), failed ones too. A relative path begins in the
    # run's directory. Each run needs a store of its own.
    store: Place | None = None


def stage_name(stage: Stage) -> str:
    return stage_name(stage.func) if isinstance(stage, partial) else getattr(stage, "__name__", type(stage).__name__)
