"""Retail (tau-bench): 500 users, 50 products, 1,000 orders; requests with annotated actions; the policy text."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from ..data import DataSet, File

_AT = "tau_bench/envs/retail"


def tasks_of(source: str, split: str) -> list[dict[str, Any]]:
    """The `Task(...)` calls of a list in Python source, as records with an id. The source is never run."""
    calls = [node for node in ast.walk(ast.parse(source)) if _is_call(node, "Task")]
    return [{"id": f"{split}-{i}", **_record(node)} for i, node in enumerate(calls)]


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _record(node: ast.AST) -> dict[str, Any]:
    assert isinstance(node, ast.Call)
    return {str(word.arg): _value(word.value) for word in node.keywords}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_record(item) if _is_call(item, "Action") else _value(item) for item in node.elts]
    return ast.literal_eval(node)


def _tasks(split: str) -> Callable[[bytes], Any]:
    return lambda raw: tasks_of(raw.decode(), split)


RETAIL = DataSet(
    name="retail",
    repository="sierra-research/tau-bench",
    commit="59a200c6d575d595120f1cb70fea53cef0632f6b",
    licence="MIT",
    files={
        "users.json.gz": File(
            origin=f"{_AT}/data/users.json", sha256="c712a9b61256070e5c0dc676645b93d6f5ec2dc8a80182fab312d9de51cd0582"
        ),
        "orders.json.gz": File(
            origin=f"{_AT}/data/orders.json", sha256="db372c34a4226c830305cb78feefbeaf79897de300f67db4c0b8214e205d194b"
        ),
        "products.json.gz": File(
            origin=f"{_AT}/data/products.json",
            sha256="b739a976c91e39561b40e7064f8f65572978e7cbb5a72a5bf0f2bedfa6f584dc",
        ),
        "tasks_train.jsonl.gz": File(
            origin=f"{_AT}/tasks_train.py",
            sha256="686d30de0363417187dc49a184c03843b1c2447767645bfb2f86fff9cb9abf4a",
            convert=_tasks("train"),
        ),
        "tasks_dev.jsonl.gz": File(
            origin=f"{_AT}/tasks_dev.py",
            sha256="add1f9bdd45e378c6550409843316ab63b1ca52459875719475b1ae3e13247ea",
            convert=_tasks("dev"),
        ),
        "tasks_test.jsonl.gz": File(
            origin=f"{_AT}/tasks_test.py",
            sha256="d91fd69a5fd65f36551dcc8a677d7f56ad71c3c1b5ba0594572f9b9b67c818ae",
            convert=_tasks("test"),
        ),
        "policy.md": File(
            origin=f"{_AT}/wiki.md", sha256="2a064144f4a76e7b2aa205216724361729185b39ab04acea15e7ecb0737cc2bb"
        ),
    },
)
