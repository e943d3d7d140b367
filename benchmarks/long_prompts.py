"""The trajectories of a side-by-side harness under longer prompts: half of all tokens, shared by each group.

`python benchmarks/long_prompts.py FROM.npz TO.npz`: what the members did stays, token by token; a group's prompt
becomes as long as its members are on average without theirs.
"""

from __future__ import annotations

import sys

import numpy as np


def lengthen(data: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The same ragged arrays; sum(prompt_lengths) is half of the tokens, to rounding."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(data["lengths"])])
    bodies = data["lengths"] - data["prompt_lengths"]
    prompts = {}
    for group in np.unique(data["group"]):
        length = round(float(bodies[data["group"] == group].mean()))
        prompts[group] = rng.choice(data["tokens"], length).astype(np.int32)
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("tokens", "loss_mask", "old_logprobs")}
    for index, group in enumerate(data["group"]):
        prompt = prompts[group]
        body = slice(int(starts[index] + data["prompt_lengths"][index]), int(starts[index + 1]))
        for name, parts in found.items():
            first = prompt if name == "tokens" else np.zeros(len(prompt), data[name].dtype)
            parts.append(np.concatenate([first, data[name][body]]))
    lengths = np.array([len(part) for part in found["tokens"]], np.int64)
    joined = {name: np.concatenate(parts) for name, parts in found.items()}
    return data | joined | {"lengths": lengths, "prompt_lengths": lengths - bodies}


def main() -> None:
    source, target = sys.argv[1:]
    with np.load(source) as npz:
        data = lengthen({name: npz[name] for name in npz.files})
    np.savez(target, **data)  # pyright: ignore[reportArgumentType]
    share = data["prompt_lengths"].sum() / data["lengths"].sum()
    print(f"{target}: {data['lengths'].sum()} tokens, {share:.1%} of them prompts, {data['loss_mask'].sum()} actions")


if __name__ == "__main__":
    main()
