"""The house as tests: who may import whom, what never loads JAX, no cycles, nothing too long, one vocabulary.

Read off the syntax trees of all source files, so an import inside a function or under TYPE_CHECKING counts.
"""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

LEAVES = {"protocol", "batch", "sharding", "errors"}
ALLOWED = {
    **{leaf: set() for leaf in LEAVES},
    "rl": {"batch"},
    "kernels": set(),
    "models": {"kernels", "sharding"},
    "sampler": {"batch", "kernels", "models", "sharding"},
    "learner": {"batch", "rl", "kernels", "models"},
    "rollout": {"protocol", "batch"},
    "runtime": {"protocol", "batch", "sharding", "models", "sampler", "learner", "rollout"},
    "recipes": LEAVES | {"rl", "kernels", "models", "sampler", "learner", "rollout", "runtime", "report"},
    "report": {"protocol"},
    "cli": {"protocol", "recipes", "report", "rollout", "runtime"},
    "agentrl_envs": {"protocol"},
    "configs": {"protocol", "recipes", "rl", "models", "agentrl_envs"},  # protocol: a config names its environment
}
SERVER = ROOT / "agentrl_jax" / "runtime" / "serve"  # all of it is one extra's
ANYONE_MAY_IMPORT = {"errors"}  # the exception whose message is for the user; standard library only
NO_JAX = ("protocol", "batch", "errors", "rollout", "report", "agentrl_envs")
# Third-party packages that load JAX when imported, beside JAX itself.
LOADS_JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}

MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FUNCTION = 100
MOST_LINES_OF_A_FORMULA = 60  # in rl, docstring included


class Import(NamedTuple):
    """One imported name: `module` is absolute; `lazy` when it stands inside a function or under TYPE_CHECKING."""

    module: str
    line: int
    lazy: bool


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "envs":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """The row of the table that a module of this repository belongs to: "" is the top of agentrl_jax itself."""
    parts = module.split(".")
    if parts[0] != "agentrl_jax":
        return parts[0]
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path) -> Iterator[Import]:
    yield from _walk_imports(tree(path), module_name(path), is_package=path.name == "__init__.py", lazy=False)


def _walk_imports(node: ast.AST, module: str, *, is_package: bool, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, lazy)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module, is_package)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, lazy)
        else:
            inner = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child)
            yield from _walk_imports(child, module, is_package=is_package, lazy=inner)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


SOURCES = python_files("agentrl_jax", "envs/agentrl_envs")
CONFIGS = python_files("configs")
TESTED = [*SOURCES, *CONFIGS, *python_files("tests", "benchmarks", "tpu")]
MODULES = {module_name(path): path for path in SOURCES}
OURS = {"agentrl_jax", "agentrl_envs"}


def test_every_package_has_a_row_in_the_table():
    packages = {package_of(module) for module in MODULES} - {""}
    assert packages <= set(ALLOWED), f"no arrows are declared for {sorted(packages - set(ALLOWED))}"


def test_arrows_point_one_way():
    broken = []
    for path in [*SOURCES, *CONFIGS]:
        package = package_of(module_name(path))
        for imported in imports_of(path):
            if imported.module.split(".")[0] not in OURS:
                continue
            target = package_of(imported.module)
            # "" with a name of its own is a name of agentrl_jax/__init__.py: the version, which anyone may read.
            if target in {package, "", "__version__"} | ANYONE_MAY_IMPORT | ALLOWED.get(package, set()):
                continue
            broken.append(f"{where(path, imported.line)}: {package} imports {target} ({imported.module})")
    assert not broken, "\n".join(broken)


def test_environments_see_one_file_of_the_package():
    seen = {
        (where(path, imported.line), imported.module)
        for path in python_files("envs/agentrl_envs")
        for imported in imports_of(path)
        if imported.module.startswith("agentrl_jax")
    }
    other = [entry for entry in seen if entry[1].split(".")[:2] != ["agentrl_jax", "protocol"]]
    assert not other, sorted(other)


@functools.cache
def eager_imports(module: str) -> frozenset[str]:
    """Modules of this repository that importing `module` runs, parents included."""
    found = set()
    for imported in imports_of(MODULES[module]):
        if imported.lazy or imported.module.split(".")[0] not in OURS:
            continue
        parts = imported.module.split(".")
        found.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return frozenset(found & set(MODULES) - {module})


def test_no_import_cycles():
    done: set[str] = set()
    stack: list[str] = []

    def visit(module: str) -> None:
        assert module not in stack, " -> ".join([*stack[stack.index(module) :], module])
        if module in done:
            return
        stack.append(module)
        # A package's __init__ runs before its submodules: that edge is the language's and no cycle.
        for target in sorted(eager_imports(module)):
            if not module.startswith(f"{target}."):
                visit(target)
        stack.pop()
        done.add(module)

    for module in sorted(MODULES):
        visit(module)


def no_jax_modules() -> list[str]:
    return [module for module in sorted(MODULES) if package_of(module) in {"", *NO_JAX}]


def test_no_jax_modules_name_no_jax():
    broken = [
        f"{where(MODULES[module], imported.line)}: {imported.module}"
        for module in no_jax_modules()
        for imported in imports_of(MODULES[module])
        if imported.module.split(".")[0] in LOADS_JAX
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("chosen", ["the packages without JAX", "the command line"])
def test_importing_them_loads_no_jax(chosen):
    """In a fresh interpreter: catches what a third-party package drags in, which the syntax trees cannot show."""
    modules = ["agentrl_jax.cli.main"]
    if chosen == "the packages without JAX":
        modules = [module for module in no_jax_modules() if not module.endswith("__main__")]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'jax' not in sys.modules and 'jaxlib' not in sys.modules, name + ' loads JAX'\n"
    )
    search = [str(ROOT), str(ROOT / "envs")]
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {search!r}\n{program}", *modules],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert child.returncode == 0, child.stderr


def test_third_party_imports_are_declared_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = _names_of(project["dependencies"]) | {"jaxlib"}
    extras = _names_of(line for lines in project["optional-dependencies"].values() for line in lines)
    distributions = packages_distributions()
    undeclared = []
    for path in SOURCES:
        for imported in imports_of(path):
            top = imported.module.split(".")[0]
            if top in OURS or top in sys.stdlib_module_names:
                continue
            providers = {_canonical(name) for name in distributions.get(top, [])}
            # What an extra brings may be imported where it is used; elsewhere it would be needed by everyone.
            optional = (imported.lazy or SERVER in path.parents) and (_canonical(top) in extras or providers & extras)
            if not providers & declared and not optional:
                undeclared.append(f"{where(path, imported.line)}: {top}")
    assert not undeclared, "\n".join(undeclared)


def _names_of(requirements: Iterable[str]) -> set[str]:
    return {_canonical(re.split(r"[\[<>=!~ ;]", line)[0]) for line in requirements}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_pin_everything_and_name_no_host():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    loose = [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+( ; .+)?", line)]
    assert pins and not loose, loose


def test_size_budgets():
    broken = []
    for path in TESTED:
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > MOST_LINES_OF_A_FILE:
            broken.append(f"{path.relative_to(ROOT)}: {len(lines)} lines, at most {MOST_LINES_OF_A_FILE}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    broken.append(f"{where(path, node.lineno)}: {node.name} has {length} lines")
    assert not broken, "\n".join(broken)


def test_the_mathematics_is_short_functions_that_say_what_they_compute():
    broken = []
    for path in sorted((ROOT / "agentrl_jax" / "rl").glob("*.py")):
        for node in tree(path).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_LINES_OF_A_FORMULA:
                broken.append(f"{where(path, node.lineno)}: {node.name} has {length} lines")
            if not node.name.startswith("_") and not ast.get_docstring(node):
                broken.append(f"{where(path, node.lineno)}: {node.name} has no docstring")
    assert not broken, "\n".join(broken)


# Words that stand for one of ours, as whole names or as parts between underscores.
FOREIGN_WORDS = {
    "logps": "behavior_logprobs, old_logprobs or ref_logprobs",
    "logp": "logprobs",
    "adv": "advantages",
    "loss_mask": "action_mask",
    "completion_mask": "action_mask",
    "response_mask": "action_mask",
    "loss_scale": "weights",
    "is_weight": "ratio",
    "is_weights": "ratio",
    "chat_template": "renderer",
    "staleness": "lag",
    "optimiser": "optimizer",
    "behaviour_logprobs": "behavior_logprobs",
    "proximal_logprobs": "old_logprobs",
}
# Foreign only as the whole name of a field or an argument: `done` hides which of the two ends of an episode it was.
FOREIGN_FIELDS = {"done": "terminated or truncated"}
SPEAKS_OF_TRAJECTORIES = ("protocol", "batch", "rl", "learner", "sampler", "rollout", "agentrl_envs")


def names(path: Path) -> Iterator[tuple[str, int]]:
    """Whatever a file calls its functions, classes, arguments, fields and variables."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
    yield from fields(path)


def fields(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno


def test_one_vocabulary():
    broken = set()
    for path in SOURCES:
        if package_of(module_name(path)) not in SPEAKS_OF_TRAJECTORIES:
            continue
        for name, line in names(path):
            for foreign, ours in FOREIGN_WORDS.items():
                if f"_{foreign}_" in f"_{name.lower()}_":
                    broken.add(f"{where(path, line)}: {name}: our word is {ours}")
        for name, line in fields(path):
            if name in FOREIGN_FIELDS:
                broken.add(f"{where(path, line)}: {name}: our words are {FOREIGN_FIELDS[name]}")
    assert not broken, "\n".join(sorted(broken))


def test_nothing_is_left_for_later():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\braise NotImplementedError\b")
    found = [
        where(path, number)
        for path in [*SOURCES, *CONFIGS]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marks.search(line)
    ]
    assert not found, found
