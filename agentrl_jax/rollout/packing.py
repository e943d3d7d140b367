"""Trajectories to a `TokenBatch`: first-fit-decreasing into forest rows, each group's prompt stored once a tree.

A trajectory that branched from another adds what it sampled itself; what lies before is its source's, stored there and
trained there, once. So the action tokens of a batch are those that were sampled, and the weights count them: under
`rl.weights.sequence_mean` each member weighs alike, a branch by its own tokens and a source by all of its own, those
before the branch points too; under `token_mean` every sampled token does. A ratio over a sequence is over the same
tokens. The source's advantage is theirs, and where the source does not train, neither do they.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl_jax.batch import Source, TokenBatch, validate
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.sampling import kept_bits

_Array = np.ndarray


@dataclass(frozen=True, slots=True)
class _Branch:
    """What one segment of a trajectory adds to its prompt, up to its last action: whatever came after teaches nothing.

    Its tokens are `begin` to `end` of the trajectory's, of which the first `prompt` are shared with the tree and the
    first `foreign` are none of its own: the source's. `over` is the source's own branch where it lies in the same tree;
    this one then leaves it after the first `prompt` tokens.
    """

    trajectory: Trajectory
    id: int
    begin: int
    prompt: int
    end: int
    foreign: int = 0
    over: _Branch | None = None

    @property
    def size(self) -> int:
        return self.end - self.begin - self.prompt


@dataclass(frozen=True, slots=True)
class _Tree:
    branches: tuple[_Branch, ...]
    size: int


def pack(
    groups: Sequence[Sequence[Trajectory]],
    *,
    rows: int,
    width: int,
    group_size: int,
    pad_id: int,
    vocab_size: int | None = None,
    kept: bool = False,
) -> TokenBatch:
    """A checked batch of exactly `rows` rows of `width` tokens that holds every trajectory with an action in it.

    The id of a trajectory is `index of its group in groups * group_size + member`, N = len(groups) * group_size where a
    token is shared or padding. The prompt of a group is stored once in each tree; a group that exceeds a row becomes
    several trees, and so do members whose prompts differ. The segments of a trajectory are branches with its id, side
    by side in one tree where they begin with the group's prompt and fit a row. One that has `Trajectory.branch` leaves
    its source in the source's tree; where that does not fit a row, it is a tree of its own, in which what is the
    source's is read and not trained. Rows are filled in an order that depends on sizes and ids only, never on the
    order of `groups`. Credit and weights are 0, to be filled in by the objective.

    With `kept` the batch holds what each token was drawn from, every bit set where nothing was cut; that takes
    `rows * width * vocab_size / 8` bytes, and `vocab_size` must be given.

    Raises `ValueError` where there are kept sets and `kept` is False: the learner would score another distribution;
    where a trajectory is longer than `width`, a member is not in 0..group_size-1 or is twice there, a branch does not
    begin as its source does, or the trees need more than `rows` rows; the message names the trajectory and the setting.
    """
    if kept and vocab_size is None:
        raise ValueError("pack: kept=True needs vocab_size, the tokens that a set speaks of")
    if not kept and any(trajectory.kept is not None for group in groups for trajectory in group):
        raise ValueError("pack: trajectories hold kept sets, of a sampler that cut; pass kept=True and vocab_size")
    trees = [tree for index, group in enumerate(groups) for tree in _trees(group, index, width, group_size)]
    placed = _place(trees, width)
    if len(placed) > rows:
        raise ValueError(f"rows={rows}: the trajectories need {len(placed)} rows of width={width}; raise rows or width")
    batch = _empty(rows, width, len(groups) * group_size, pad_id)
    if kept and vocab_size is not None:
        batch = batch._replace(kept=np.full((rows, width, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32))
    for row, row_trees in enumerate(placed):
        column = 0
        for tree in row_trees:
            column = _write(batch, row, column, tree)
    limit = int(batch.tokens.max(initial=0)) + 1 if vocab_size is None else vocab_size
    return validate(batch, vocab_size=limit)


def used_rows(batch: TokenBatch) -> int:
    """How many rows hold any token; they come first."""
    return int((batch.sources != Source.PADDING).any(axis=1).sum())


def rows_needed(groups: Sequence[Sequence[Trajectory]], *, width: int, group_size: int) -> int:
    """How many rows `pack` would fill."""
    return len(_place([tree for i, group in enumerate(groups) for tree in _trees(group, i, width, group_size)], width))


def _trees(group: Sequence[Trajectory], index: int, width: int, group_size: int) -> list[_Tree]:
    seen: set[int] = set()
    by_prompt: dict[tuple[int, ...], list[_Branch]] = {}
    for trajectory in sorted(group, key=lambda t: t.member):
        if not 0 <= trajectory.member < group_size or trajectory.member in seen:
            raise ValueError(
                f"task {trajectory.task.id!r}: member {trajectory.member} is outside 0..{group_size - 1} or there twice"
            )
        seen.add(trajectory.member)
        for branch in _branches(trajectory, index * group_size + trajectory.member, width):
            prompt = trajectory.tokens[branch.begin : branch.begin + branch.prompt]
            by_prompt.setdefault(prompt, []).append(branch)
    _check_sources(group)
    return [tree for prompt, branches in by_prompt.items() for tree in _split(len(prompt), branches, width)]


def _check_sources(group: Sequence[Trajectory]) -> None:
    members = {trajectory.member: trajectory for trajectory in group}
    for trajectory in group:
        source = None if trajectory.branch is None else members.get(trajectory.branch.member)
        start = trajectory.branch_start
        if source is not None and source.tokens[:start] != trajectory.tokens[:start]:
            raise ValueError(
                f"task {trajectory.task.id!r}: member {trajectory.member} does not begin with the first {start} tokens "
                f"of member {source.member}, which it branched from"
            )


def _branches(trajectory: Trajectory, id: int, width: int) -> Iterator[_Branch]:
    """A branch for each segment that holds an action. One that begins with the trajectory's first prompt shares it."""
    first, start = trajectory.tokens[: trajectory.prompt_length], trajectory.branch_start
    for begin, after_prompt, stop in trajectory.spans:
        end = _last_action(trajectory, max(begin, start), stop) + 1
        if end == 0:
            continue
        if end - begin > width:
            raise ValueError(
                f"width={width}: task {trajectory.task.id!r} member {trajectory.member} has {end - begin} tokens; "
                "raise width or lower the token budget"
            )
        shares = trajectory.tokens[begin : begin + len(first)] == first and begin + len(first) <= after_prompt
        prompt = len(first) if shares else after_prompt - begin
        yield _Branch(trajectory, id, begin, prompt, end, foreign=max(0, start - begin))


def _split(prompt: int, branches: list[_Branch], width: int) -> list[_Tree]:
    """The fewest trees by first-fit-decreasing whose prompt and branches fit a row; a trajectory's stay together."""
    bins: list[list[_Branch]] = []
    sizes: list[int] = []
    for unit in sorted(_units(prompt, branches, width), key=lambda u: (-_total(u), u[0].trajectory.member, u[0].begin)):
        for place, size in enumerate(sizes):
            if size + _total(unit) <= width:
                bins[place].extend(unit)
                sizes[place] += _total(unit)
                break
        else:
            bins.append(list(unit))
            sizes.append(prompt + _total(unit))
    return [
        _Tree(tuple(sorted(members, key=lambda b: (b.trajectory.member, b.begin))), size)
        for members, size in zip(bins, sizes, strict=True)
    ]


def _units(prompt: int, branches: list[_Branch], width: int) -> Iterator[list[_Branch]]:
    """The branches of each trajectory together where they fit a row beside their prompt, else one by one.

    To those come the ones that left them, in their order, as many as fit; the others stand by themselves.
    """
    left = {id: list(found) for id, found in itertools.groupby(branches, key=lambda b: b.id)}
    for unit in [unit for unit in left.values() if unit[0].trajectory.branch is None]:
        parts = [unit] if prompt + _total(unit) <= width else [[branch] for branch in unit]
        del left[unit[0].id]
        for part in parts:
            yield [*part, *_over(part, left, width - prompt - _total(part))]
    for found in left.values():
        yield from ([branch] for branch in found)


def _over(sources: list[_Branch], left: dict[int, list[_Branch]], room: int) -> Iterator[_Branch]:
    """Branches out of `left` that leave one of `sources` and fit into `room` tokens; they are taken out of it."""
    for found in left.values():
        for branch in list(found):
            for source in sources:
                joined = _joined(branch, source)
                if joined is not None and joined.size <= room:
                    room -= joined.size
                    found.remove(branch)
                    yield joined
                    break


def _joined(branch: _Branch, source: _Branch) -> _Branch | None:
    """A branch as it lies over its source, which may end before it left: tokens that taught nothing there."""
    left = branch.trajectory.branch
    if left is None or left.member != source.trajectory.member or branch.begin != source.begin:
        return None
    shared = min(branch.foreign, source.end - source.begin)
    return None if shared < branch.prompt else replace(branch, prompt=shared, over=source)


def _total(branches: list[_Branch]) -> int:
    return sum(branch.size for branch in branches)


def _place(trees: list[_Tree], width: int) -> list[list[_Tree]]:
    def order(tree: _Tree) -> tuple[object, ...]:
        first = tree.branches[0].trajectory
        begin = tree.branches[0].begin
        return (-tree.size, first.group, first.task.id, first.member, first.seed, begin, first.tokens)

    rows: list[list[_Tree]] = []
    free: list[int] = []
    for tree in sorted(trees, key=order):
        for row, room in enumerate(free):
            if tree.size <= room:
                rows[row].append(tree)
                free[row] -= tree.size
                break
        else:
            rows.append([tree])
            free.append(width - tree.size)
    return rows


def _last_action(trajectory: Trajectory, begin: int, stop: int) -> int:
    for column in range(stop - 1, begin - 1, -1):
        if trajectory.action_mask[column]:
            return column
    return -1


def _empty(rows: int, width: int, shared: int, pad_id: int) -> TokenBatch:
    shape = (rows, width)
    columns = np.broadcast_to(np.arange(width, dtype=np.int32), shape).copy()
    return TokenBatch(
        tokens=np.full(shape, pad_id, np.int32), parents=np.full(shape, -1, np.int32), subtree_ends=columns,
        positions=np.zeros(shape, np.int32), trajectory_ids=np.full(shape, shared, np.int32),
        turn_ids=np.zeros(shape, np.int32), sources=np.full(shape, Source.PADDING, np.int8),
        action_mask=np.zeros(shape, np.bool_), behavior_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32), weights=np.zeros(shape, np.float32),
        policy_versions=np.full(shape, -1, np.int32),
    )  # fmt: skip


def _write(batch: TokenBatch, row: int, start: int, tree: _Tree) -> int:
    """Lay the tree depth-first from column `start`; returns the column after it."""
    trunks = [branch for branch in tree.branches if branch.over is None]
    first = trunks[0]
    prompt, stop = first.prompt, start + tree.size
    _copy(batch, row, start, first, 0, prompt)
    batch.parents[row, start : start + prompt] = np.arange(start - 1, start + prompt - 1, dtype=np.int32)
    batch.parents[row, start] = -1
    batch.subtree_ends[row, start : start + prompt] = stop
    column = start + prompt
    for branch in trunks:
        # Those that left it latest come first: so each subtree is a stretch of columns.
        over = sorted((b for b in tree.branches if b.over is branch), key=lambda b: (-b.prompt, b.id))
        origin, after = column - prompt, column + branch.size
        batch.subtree_ends[row, column:after] = after
        _lay(batch, row, column, branch, start + prompt - 1)
        column = after
        for leaving in over:
            after = column + leaving.size
            parent = origin + leaving.prompt - 1 if leaving.prompt > prompt else start + prompt - 1
            _lay(batch, row, column, leaving, parent)
            batch.subtree_ends[row, column:after] = after
            batch.subtree_ends[row, origin + prompt : origin + leaving.prompt] = after
            column = after
    return column


def _lay(batch: TokenBatch, row: int, column: int, branch: _Branch, parent: int) -> None:
    """A branch's tokens from `column` on, after `parent`, with its id; what is its source's is read, and no action."""
    after = column + branch.size
    _copy(batch, row, column, branch, branch.prompt, branch.prompt + branch.size)
    batch.parents[row, column:after] = np.arange(column - 1, after - 1, dtype=np.int32)
    batch.parents[row, column] = parent
    own = column + max(0, branch.foreign - branch.prompt)
    batch.action_mask[row, column:own] = False
    batch.behavior_logprobs[row, column:own] = 0.0
    batch.policy_versions[row, column:own] = -1
    batch.trajectory_ids[row, own:after] = branch.id
    batch.turn_ids[row, own:after] = branch.trajectory.turn_ids[branch.end - (after - own) : branch.end]


def _copy(batch: TokenBatch, row: int, column: int, branch: _Branch, start: int, stop: int) -> None:
    """Tokens `start` to `stop` of the branch's segment, from `column` on."""
    place, tokens = slice(column, column + stop - start), slice(branch.begin + start, branch.begin + stop)
    trajectory = branch.trajectory
    batch.tokens[row, place] = trajectory.tokens[tokens]
    batch.sources[row, place] = trajectory.sources[tokens]
    batch.action_mask[row, place] = trajectory.action_mask[tokens]
    batch.behavior_logprobs[row, place] = trajectory.behavior_logprobs[tokens]
    batch.policy_versions[row, place] = trajectory.policy_versions[tokens]
    batch.positions[row, place] = np.arange(start, stop, dtype=np.int32)
    for offset, bits in enumerate(trajectory.kept[tokens] if trajectory.kept is not None else ()):
        if bits:
            batch.kept[row, column + offset] = np.frombuffer(kept_bits(bits), "<u4")
