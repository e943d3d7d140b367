"""What supervised steps learn from: a teacher's episodes and drills, as packed rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from agentrl_jax.batch import Source, TokenBatch
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import (
    Action,
    EnvironmentRef,
    EnvironmentSpec,
    Message,
    Observation,
    Snapshot,
    Suite,
    Task,
    Verdict,
)
from agentrl_jax.recipes.config import RunConfig, Sft, Shown, Stored
from agentrl_jax.recipes.keeping import fingerprint_of
from agentrl_jax.rollout.collect import play
from agentrl_jax.rollout.episode import Renderer
from agentrl_jax.rollout.packing import pack, used_rows
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.runtime.store import Store

if TYPE_CHECKING:
    from agentrl_jax.recipes.policy import Policy


def packed(
    ref: EnvironmentRef, renderer: Renderer, settings: Sft, seed: int, stored: Iterable[Trajectory] = ()
) -> TokenBatch:
    """Every demonstration and drill, packed; raises `UserError` for one that does not fit a row."""
    parts = (part for part in settings.demonstrations if isinstance(part, Shown))
    shown = [t for part in parts for t in play_all(ref, renderer, part, seed)]
    shown += recite_all(ref.load(), renderer, settings.drills, seed)
    shown += stored
    # What a sampler's cut had left to draw from plays no part: the whole distribution learns.
    # A branch stands by itself, too: its source may not be among these.
    alone = {"member": 0, "kept": None, "branch": None}
    groups = [[replace(t, group=index, **alone)] for index, t in enumerate(t for t in shown if any(t.action_mask))]
    segments = sum(t.segments for group in groups for t in group)  # one that was rendered anew may need several rows
    try:
        rows = pack(groups, rows=segments, width=settings.width, group_size=1, pad_id=0)
    except ValueError as error:
        raise UserError(f"sft.width={settings.width}: {error}") from error
    return take(rows, np.arange(used_rows(rows)))


def play_all(ref: EnvironmentRef, renderer: Renderer, shown: Shown, seed: int) -> Iterator[Trajectory]:
    """Episodes of the environment's own teacher, played in process."""
    suite = EnvironmentRef(target=ref.target, options={**ref.options, **shown.options}).load()
    assert suite.demonstrate is not None  # checks.check_environment
    world = suite.make()
    for index, task in enumerate(suite.tasks(shown.split, shown.count, seed)):
        script = suite.demonstrate(task, seed + index)
        yield play(suite, renderer, task, script, seed + index, environment=world)
    world.close()


def open_stores(config: RunConfig, policy: Policy, lengths: Sequence[int] | None = None) -> list[Store]:
    """The store of each `Stored`, in order; `lengths` is how much of each there was when the run first read them.

    Raises `UserError`: no store, one of another tokenizer, or nothing in it to learn from.
    """
    stores = []
    for index, part in _stored(config):
        setting, store = f"sft.demonstrations.{index}.path={part.path!r}", Store(part.path)
        if store.commit.about.get("tokenizer") != fingerprint_of(policy.tokenizer):
            raise UserError(f"{setting}: its tokens are of another tokenizer than the policy's; expected the same one")
        if not len(_wanted(part, store)):
            raise UserError(f"{setting}: none of its {len(store)} trajectories qualifies; see only_successes")
        stores.append(store)
    return stores if lengths is None else [s.first(length) for s, length in zip(stores, lengths, strict=True)]


def read_all(config: RunConfig, stores: Sequence[Store]) -> Iterator[Trajectory]:
    """What the `Stored` of a config name, through grain; raises `UserError` for a task of `evaluation.split`."""
    import grain  # beside numpy the heaviest import of this package; most runs show nothing stored

    for (index, part), store in zip(_stored(config), stores, strict=True):
        chosen = grain.MapDataset.source(_wanted(part, store))
        if part.count is not None:
            chosen = chosen.shuffle(seed=config.seed)[: part.count]
        for t in chosen.map(store.__getitem__).to_iter_dataset(grain.ReadOptions(num_threads=4)):
            if t.task.split == config.evaluation.split:
                raise UserError(
                    f"sft.demonstrations.{index}.path={part.path!r} holds tasks of split {t.task.split!r}, which "
                    "evaluation.split measures on: show trajectories of 'train'"
                )
            yield t


def _stored(config: RunConfig) -> list[tuple[int, Stored]]:
    parts = () if config.sft is None else config.sft.demonstrations
    return [(index, part) for index, part in enumerate(parts) if isinstance(part, Stored)]


def _wanted(part: Stored, store: Store) -> list[int]:
    return np.flatnonzero(store.column("success" if part.only_successes else "valid").read().result()).tolist()


def recite_all(suite: Suite, renderer: Renderer, count: int, seed: int) -> Iterator[Trajectory]:
    """One-turn trajectories of the environment's drills."""
    if not count:
        return
    assert suite.drills is not None  # checks.check_environment
    recital = _recital_suite()
    for index, (request, answer) in enumerate(suite.drills(count, seed)):
        task = Task(id=f"drill-{index}", split="train", kind="drill", data={"request": request})
        yield play(recital, renderer, task, [answer], seed)


class _Recital:
    """A world with one request and nothing to act on."""

    spec = EnvironmentSpec(name="recital", version="1", tools=())

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation(content=(Message(role="user", content=task.data["request"]),))

    def step(self, action: Action) -> Observation:
        return Observation(content=(), terminated=True)

    def snapshot(self) -> Snapshot:
        return Snapshot(data=b"", hash="")

    def restore(self, snapshot: Snapshot) -> None:
        """There is no state."""

    def close(self) -> None:
        """There is nothing to close."""


def _recital_suite() -> Suite:
    def verify(task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot) -> Verdict:
        return Verdict(outcome=True)

    return Suite(spec=_Recital.spec, make=_Recital, tasks=lambda *_: (), verify=verify, verifier_version="1")


def take(batch: TokenBatch, rows: np.ndarray) -> TokenBatch:
    return TokenBatch(*(None if field is None else field[rows] for field in batch))


def order(rows: int, seed: int, step: int, count: int) -> np.ndarray:
    """The rows of one step: epochs are seeded permutations, so that any step can be recomputed alone."""
    places = np.arange(step * count, (step + 1) * count)
    epochs = {e: np.random.default_rng((seed, e)).permutation(rows) for e in np.unique(places // rows).tolist()}
    return np.asarray([epochs[place // rows][place % rows] for place in places.tolist()])


def token_ids(words: Iterable[str], tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """Ids of the words that are one token each."""
    found = (tokenizer.token_to_id(word) for word in words)
    return np.asarray([index for index in found if index is not None], np.int32)


def rename(batch: TokenBatch, handles: np.ndarray, rng: np.random.Generator) -> TokenBatch:
    """Permute the handles of every tree of every row among themselves: the same episode under other names.

    A handle stands for a record and means nothing by itself, so what a demonstration shows is to copy it; renamed anew
    at each step, it cannot be learned by heart. `handles` i32[n]: token ids that may stand for one another.
    """
    if not len(handles):
        return batch
    roots = (batch.parents < 0) & (batch.sources != Source.PADDING)
    tree = np.cumsum(roots.reshape(-1)).reshape(roots.shape)
    _, tree = np.unique(tree, return_inverse=True)
    tree = tree.reshape(roots.shape)
    table: Any = np.tile(
        np.arange(int(max(batch.tokens.max(), handles.max())) + 1, dtype=np.int32), (int(tree.max()) + 1, 1)
    )
    table[:, handles] = handles[np.argsort(rng.random((len(table), len(handles))), axis=1)]
    return batch._replace(tokens=table[tree, batch.tokens])
