"""Generated tasks: a seeded tree, a request, assertions on the end state, and commands that reach it.

Names and words of one split are in no other. What a task asks is computed here from the tree as data; the commands of
the reference solution reach it by another way, in a shell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from agentrl_jax.protocol import Task

from .tree import Entry, file, to_json, with_parents
from .words import EXTENSIONS, FOLDERS, SERVICES, SPLITS, STEMS, WORDS


class Made(NamedTuple):
    """A request, the assertions that answer it, the reference's commands, and services that run at the start."""

    text: str
    goal: list[dict[str, Any]]
    commands: list[str]
    services: tuple[str, ...] = ()


class Draw:
    """A tree and the words it was made of."""

    def __init__(self, rng: Random, split: str) -> None:
        self.rng, self.words = rng, WORDS[split]
        self.folders = rng.sample(FOLDERS[split], 3)
        self.services = rng.sample(SERVICES[split], 3)
        stems = STEMS[split]
        self.tree: dict[str, Entry] = {}
        for folder in (*self.folders, f"{self.folders[0]}/{self.folders[1]}"):
            for stem in rng.sample(stems, rng.randint(3, 5)):
                extension = rng.choice(EXTENSIONS)
                self.tree[f"{folder}/{stem}.{extension}"] = file(self.lines(rng.randint(1, 7)))
        for folder in self.folders[1:]:
            self.tree[f"{folder}/{rng.choice(stems)}_empty.txt"] = file("")
            self.tree[f"{folder}/setup.sh"] = file("#!/bin/sh\nexit 0\n")
        self.amounts = f"{rng.choice(stems)}_amounts.csv"
        self.tree[self.amounts] = file(self.table(stems))
        self.tree["run.sh"] = file("#!/bin/sh\necho ready\n")
        self.tree = with_parents(self.tree)

    def lines(self, count: int) -> str:
        return "".join(" ".join(self.rng.choices(self.words, k=self.rng.randint(2, 5))) + "\n" for _ in range(count))

    def table(self, stems: tuple[str, ...]) -> str:
        rows = [f"{stem},{self.rng.choice(self.words)},{self.rng.randint(1, 90)}" for stem in self.rng.sample(stems, 6)]
        return "name,group,amount\n" + "\n".join(rows) + "\n"

    def files(self, folder: str = "", extension: str = "") -> dict[str, str]:
        """The texts of the files under a folder with an extension."""
        return {
            path: entry.content.decode()
            for path, entry in self.tree.items()
            if entry.kind == "file" and path.startswith(f"{folder}/" if folder else "") and path.endswith(extension)
        }


def rename(draw: Draw) -> Made:
    folder = draw.folders[0]
    old = draw.rng.choice(sorted({path.rpartition(".")[2] for path in draw.files(folder)}))
    found = draw.files(folder, f".{old}")
    goal = [{"path": path, "is": "absent"} for path in found]
    goal += [{"path": path.removesuffix(old) + "bak", "is": "file", "text": text} for path, text in found.items()]
    text = f"Rename every .{old} file in {folder} and below it so that it ends in .bak instead."
    command = f"find {folder} -type f -name '*.{old}' -exec sh -c 'mv \"$1\" \"${{1%.{old}}}.bak\"' sh {{}} \\;"
    return Made(text, goal, [command])


def filter_lines(draw: Draw) -> Made:
    path = draw.rng.choice(sorted(path for path, text in draw.files().items() if text.count("\n") > 2))
    lines = draw.files()[path].splitlines(keepends=True)
    word = draw.rng.choice(sorted(set("".join(lines).replace(",", " ").split())))
    kept = "".join(line for line in lines if word in line)
    text = f"Write the lines of {path} that contain {word}, in their order, into a new file found.txt."
    return Made(text, [{"path": "found.txt", "is": "file", "text": kept}], [f"grep -F -e {word} {path} > found.txt"])


def count_files(draw: Draw) -> Made:
    folder, extension = draw.folders[0], draw.rng.choice(EXTENSIONS)
    number = len(draw.files(folder, f".{extension}"))
    text = f"Count the .{extension} files in {folder} and below it, and write the number into a new file count.txt."
    command = f"find {folder} -type f -name '*.{extension}' | wc -l > count.txt"
    return Made(text, [{"path": "count.txt", "is": "file", "number": number}], [command])


def count_lines(draw: Draw) -> Made:
    folder, word = draw.folders[0], draw.rng.choice(draw.words)
    number = sum(word in line for text in draw.files(folder).values() for line in text.splitlines())
    text = (
        f"Count the lines that contain {word} in all files of {folder} and below it, and write the number into a new "
        "file count.txt."
    )
    command = f"grep -rhF -e {word} {folder} | wc -l > count.txt"
    return Made(text, [{"path": "count.txt", "is": "file", "number": number}], [command])


def permissions(draw: Draw) -> Made:
    folder = draw.folders[1]
    scripts = sorted(draw.files(folder, ".sh"))
    mode = draw.rng.choice((0o755, 0o700, 0o750))
    goal = [{"path": path, "is": "file", "mode": mode, "text": draw.files()[path]} for path in scripts]
    text = f"Give every .sh file in {folder} and below it the permissions {mode:o}."
    return Made(text, goal, [f"find {folder} -name '*.sh' -exec chmod {mode:o} {{}} +"])


def archive(draw: Draw) -> Made:
    folder = draw.folders[0]
    members = draw.files(folder)
    goal = [{"path": "packed.tar.gz", "is": "archive", "members": members}]
    text = f"Pack the folder {folder}, with all in it, into a new archive packed.tar.gz that holds it as {folder}/..."
    return Made(text, goal, [f"tar -czf packed.tar.gz {folder}"])


def move_large(draw: Draw) -> Made:
    folder, into = draw.folders[0], draw.folders[2] + "_large"
    found = draw.files(folder)
    sizes = sorted(len(text) for text in found.values())
    limit = sizes[len(sizes) // 2]
    large = {path: text for path, text in found.items() if len(text) > limit and path.count("/") == 1}
    goal: list[dict[str, Any]] = [{"path": into, "is": "dir"}]
    goal += [{"path": path, "is": "absent"} for path in large]
    goal += [{"path": f"{into}/{path.rpartition('/')[2]}", "is": "file", "text": text} for path, text in large.items()]
    text = (
        f"Make a folder {into} and move into it the files that lie directly in {folder} (not deeper) and have more "
        f"than {limit} bytes."
    )
    command = f"mkdir {into} && find {folder} -maxdepth 1 -type f -size +{limit}c -exec mv {{}} {into}/ \\;"
    return Made(text, goal, [command])


def delete_empty(draw: Draw) -> Made:
    folder = draw.folders[2]
    empty = [path for path, text in draw.files(folder).items() if not text]
    text = f"Delete every empty file in {folder} and below it."
    return Made(text, [{"path": path, "is": "absent"} for path in empty], [f"find {folder} -type f -empty -delete"])


def replace_word(draw: Draw) -> Made:
    folder = draw.folders[1]
    found = draw.files(folder)
    word = draw.rng.choice(sorted(set(" ".join(found.values()).split()) & set(draw.words)))
    new = draw.rng.choice([other for other in draw.words if other != word])
    changed = {path: text for path, text in found.items() if word in text}
    goal = [{"path": path, "is": "file", "text": text.replace(word, new)} for path, text in changed.items()]
    text = f"Replace {word} by {new} wherever it occurs in the files of {folder} and below it."
    return Made(text, goal, [f"grep -rlF -e {word} {folder} | xargs sed -i 's/{word}/{new}/g'"])


def link(draw: Draw) -> Made:
    path = draw.rng.choice(sorted(draw.files(draw.folders[0])))
    text = f"Make a symbolic link /workspace/current that points to {path}, as a relative path."
    return Made(text, [{"path": "current", "is": "link", "target": path}], [f"ln -s {path} current"])


def sum_column(draw: Draw) -> Made:
    rows = [line.split(",") for line in draw.files()[draw.amounts].splitlines()[1:]]
    text = f"Add up the amounts in {draw.amounts}, and write the sum into a new file sum.txt."
    goal = [{"path": "sum.txt", "is": "file", "number": sum(int(row[2]) for row in rows)}]
    return Made(text, goal, [f"tail -n +2 {draw.amounts} | awk -F, '{{s += $3}} END {{print s}}' > sum.txt"])


def unique_words(draw: Draw) -> Made:
    path = draw.rng.choice(sorted(path for path, text in draw.files(draw.folders[0]).items() if text))
    words = sorted(set(draw.files()[path].split()))
    text = f"Write every word of {path} once into a new file words.txt, a line each, in alphabetical order."
    goal = [{"path": "words.txt", "is": "file", "text": "".join(f"{word}\n" for word in words)}]
    return Made(text, goal, [f"tr -s ' ' '\\n' < {path} | LC_ALL=C sort -u > words.txt"])


def stop_service(draw: Draw) -> Made:
    gone, *kept = draw.services
    goal: list[dict[str, Any]] = [{"service": gone, "running": False}]
    goal += [{"service": name, "running": True} for name in kept]
    text = f"Three services are running: {', '.join(sorted(draw.services))}. Stop {gone}, and leave the others running."
    find = f'[ "$(head -c {len(gone) + 1} $each/cmdline | tr -d "\\0")" = {gone} ] && kill -9 ${{each#/proc/}}'
    command = f"for each in /proc/[0-9]*; do {find}; done 2>/dev/null; true"
    return Made(text, goal, [command], tuple(sorted(draw.services)))


KINDS: dict[str, Callable[[Draw], Made]] = {
    made.__name__: made
    for made in (
        rename, filter_lines, count_files, count_lines, permissions, archive, move_large, delete_empty, replace_word,
        link, sum_column, unique_words, stop_service,
    )
}  # fmt: skip


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"terminal: split={split!r} is not known; expected one of {', '.join(SPLITS)}")


def tasks(kinds: Sequence[str], split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks, the kinds in turn."""
    check_split(split)
    made: dict[str, Task] = {}
    for number in range(4 * count + len(kinds)):
        if len(made) == count:
            break
        kind = kinds[number % len(kinds)]
        new = _task(Random(f"{split}/{seed}/{number}"), split, kind)
        made.setdefault(new.id, new)
    return tuple(made.values())


def _task(rng: Random, split: str, kind: str) -> Task:
    draw = Draw(rng, split)
    made = KINDS[kind](draw)
    rows = to_json(draw.tree)
    digest = hashlib.sha256(f"{made.text}\0{rows}".encode()).hexdigest()
    return Task(
        id=f"{split}-{kind}-{digest[:16]}",
        split=split,
        kind=kind,
        data={
            "text": made.text,
            "tree": rows,
            "services": list(made.services),
            "goal": made.goal,
            "commands": made.commands,
        },
    )
