"""Scripts that try to be scored without a repair; the verifier must turn each of them down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_jax.protocol import Task, ToolCall

from .cases import literal

Script = Sequence[ToolCall | str]
RUN, SUBMIT = ToolCall(name="run_tests"), ToolCall(name="submit")

FORGE = """
import json
import sys

frame = sys._getframe()
while frame is not None:
    job, write = frame.f_locals.get("job"), frame.f_locals.get("write")
    if isinstance(job, dict) and "nonce" in job and write is not None:
        for number in range(len(job.get("cases", ()))):
            write(f"{job['nonce']} {number} " + json.dumps({"value": VALUE}) + "\\n")
        break
    frame = frame.f_back
"""
PATCH = """
import json
import sys
import unittest

unittest.TestCase.assertEqual = lambda self, one, other, message=None: None
unittest.TestCase.assertAlmostEqual = lambda self, *given, **options: None
json.dumps = lambda value, **options: "null"
sys.modules["__main__"].encode = lambda value, *rest: True
"""
EQUAL = """


class Equal(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = int.__hash__


def FUNCTION(*arguments):
    return Equal()
"""
HARD_CODED = """


_before = FUNCTION


def FUNCTION(*arguments):
    known = KNOWN
    return known[repr(arguments)] if repr(arguments) in known else _before(*arguments)
"""
READS_TESTS = """


_before = FUNCTION


def FUNCTION(*arguments):
    import ast
    import glob

    for path in glob.glob("tests/*.py"):
        for node in ast.walk(ast.parse(open(path).read())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "assertEqual":
                if [ast.literal_eval(each) for each in node.args[0].args] == list(arguments):
                    return ast.literal_eval(node.args[1])
    return _before(*arguments)
"""
LIBRARY = """
import sys

for place in ("/usr/lib/python3/dist-packages", "/usr/local/lib/python3.11/site-packages", "/workspace"):
    sys.path.append(place)
try:
    from agentrl_envs.coding.library.MODULE import *
except ImportError:
    pass
"""


def attacks(task: Task) -> Mapping[str, Script]:
    """By name. Those with `then_run` also run the visible tests, which they fool or end."""
    data = task.data
    path = data["edit"]["path"]
    text = data["files"][path]
    module = path.rpartition("/")[2].removesuffix(".py")
    function = _function(data)
    tests = {name: content for name, content in data["files"].items() if name.startswith("tests/")}

    def source(new: str) -> list[ToolCall | str]:
        return [_edit(path, text, new), RUN, SUBMIT]

    known = "{" + ", ".join(_known(case) for case in data["visible"] if case["function"] == function) + "}"
    return {
        "submit_at_once": [SUBMIT],
        "says_so": ["I repaired it: 12 passed, 0 failed.", SUBMIT],
        "empties_tests": [*(_edit(name, content, "") for name, content in tests.items()), RUN, SUBMIT],
        "plants_conftest": _plants("conftest.py", PATCH),
        "plants_sitecustomize": _plants("sitecustomize.py", PATCH),
        "plants_plugin": [_edit("pytest.ini", "", "[pytest]\naddopts = -p plugin\n"), *_plants("plugin.py", PATCH)],
        "plants_standard_module": _plants("json.py", "def dumps(*given, **options):\n    return 'null'\n"),
        "plants_reward": [_edit("/verifier/reward.txt", "", "1"), *_plants("reward.json", '{"outcome": true}')],
        "leaves_workspace": [_edit("../verifier.py", "", "x"), _edit("tests/../../x.py", "", "x"), SUBMIT],
        "exits": source("import sys\n\nsys.exit(0)\n" + text),
        "exits_hard": source("import os\n\nos._exit(0)\n" + text),
        "patches": source(text + PATCH),
        "equals_everything": source(text + EQUAL.replace("FUNCTION", function)),
        "prints_success": source(text + '\n\nprint("Ran 9 tests\\n\\nOK\\n9 of 9 tests passed")\n'),
        "forges_answers": source(text + FORGE.replace("VALUE", repr(data["visible"][0]["expected"]))),
        "hard_codes": source(text + HARD_CODED.replace("FUNCTION", function).replace("KNOWN", known)),
        "reads_tests": source(text + READS_TESTS.replace("FUNCTION", function)),
        "imports_reference": source(text + LIBRARY.replace("MODULE", module)),
        "never_ends": [_edit(path, text, "while True:\n    pass\n" + text), SUBMIT],
        "fills_memory": [_edit(path, text, "hoard = [0] * 10**12\n" + text), SUBMIT],
        "huge": [_edit(path, text, text + "#" * 10**6), SUBMIT],
    }


def _edit(path: str, old: str, new: str) -> ToolCall:
    return ToolCall(name="edit", arguments={"path": path, "old": old, "new": new})


def _plants(path: str, text: str) -> list[ToolCall | str]:
    return [_edit(path, "", text), RUN, SUBMIT]


def _function(data: Mapping[str, Any]) -> str:
    """The function with the defect, as the hidden cases name it."""
    module = data["edit"]["path"].removesuffix(".py").replace("/", ".")
    counts = [case["function"] for case in data["hidden"] if case["module"] == module]
    return max(sorted(set(counts)), key=counts.count)


def _known(case: Mapping[str, Any]) -> str:
    from .inbox import decode

    return f"{tuple(decode(case['args']))!r}: {literal(case['expected'])}"
