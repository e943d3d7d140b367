"""Configs: loading a program, typed overrides, and errors that name the setting and what to type."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.cli.configs import apply_overrides, describe, load
from agentrl_jax.errors import UserError

if TYPE_CHECKING:
    from nowhere import Unknown


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def clip(low: float, high: float) -> Callable[[float], float]:
    def surrogate(ratio: float) -> float:
        return min(max(ratio, low), high)

    return surrogate


CLIP = clip(0.8, 1.2)


@dataclass(frozen=True)
class Inner:
    steps: int = 60
    rate: float = 2e-4
    group: int = 8
    tasks: int = 16
    skip: bool = False
    schedule: Literal["constant", "cosine"] = "constant"
    cap: float | None = None
    widths: tuple[int, ...] = (64, 128)
    pair: tuple[int, str] = (1, "a")
    colour: Colour = Colour.RED
    path: Path = Path("here")

    def __post_init__(self) -> None:
        if self.group > self.tasks:
            raise ValueError(f"group={self.group} exceeds tasks={self.tasks}")


@dataclass(frozen=True)
class Named:
    name: str
    rows: int = 4


@dataclass(frozen=True)
class Outer:
    name: str = "trial"
    loop: Inner = field(default_factory=Inner)
    off: Inner | None = None
    options: Mapping[str, object] = field(default_factory=lambda: {"handles": "short", "max_calls": 6})
    parts: tuple[Named, ...] = (Named("first"), Named("second"))
    surrogate: Callable[[float], float] = CLIP
    typed_elsewhere: Unknown | None = None


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("loop.steps=3", lambda c: c.loop.steps, 3),
        ("loop.steps=1_000", lambda c: c.loop.steps, 1000),
        ("loop.rate=1e-3", lambda c: c.loop.rate, 1e-3),
        ("loop.skip=true", lambda c: c.loop.skip, True),
        ("loop.schedule=cosine", lambda c: c.loop.schedule, "cosine"),
        ("loop.cap=2", lambda c: c.loop.cap, 2.0),
        ("loop.cap=none", lambda c: c.loop.cap, None),
        ("loop.widths=1,2,3", lambda c: c.loop.widths, (1, 2, 3)),
        ("loop.widths=[7]", lambda c: c.loop.widths, (7,)),
        ("loop.widths=()", lambda c: c.loop.widths, ()),
        ("loop.pair=5,x", lambda c: c.loop.pair, (5, "x")),
        ("loop.colour=blue", lambda c: c.loop.colour, Colour.BLUE),
        ("loop.path=a/b", lambda c: c.loop.path, Path("a/b")),
        ("name=x=y", lambda c: c.name, "x=y"),
        ("options.handles=real", lambda c: c.options["handles"], "real"),
        ("options.max_calls=9", lambda c: c.options["max_calls"], 9),
        ('options.kinds=["cancel"]', lambda c: c.options["kinds"], ["cancel"]),
        ("parts.second.rows=9", lambda c: (c.parts[0].rows, c.parts[1].rows), (4, 9)),
        ("parts.0.rows=9", lambda c: (c.parts[0].rows, c.parts[1].rows), (9, 4)),
    ],
)
def test_an_override_is_read_by_the_field_s_type(override, read, value):
    found = read(apply_overrides(Outer(), [override]))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loop.stepz=3", ["'loop.stepz'", "did you mean loop.steps?"]),
        ("lop.steps=3", ["'lop'", "did you mean loop?"]),
        ("zebra=3", ["'zebra'", "it has name, loop"]),
        ("loop.steps=3.5", ["loop.steps=3.5", "expected int", "'3.5'"]),
        ("loop.steps=", ["loop.steps=", "expected int"]),
        ("loop.rate=fast", ["loop.rate=fast", "expected float"]),
        ("loop.rate=nan", ["expected float"]),
        ("loop.skip=1", ["expected true or false"]),
        ("loop.schedule=linear", ["one of 'constant', 'cosine'"]),
        ("loop.cap=high", ["expected float or none"]),
        ("loop.widths=1,x", ["loop.widths=1,x", "expected a list of int"]),
        ("loop.pair=5", ["expected a list (int, str)"]),
        ("loop.colour=green", ["one of 'red', 'blue'"]),
        ("loop=3", ["group of settings", "loop.steps"]),
        ("surrogate=clip", ["is a function; set it in the config file"]),
        ("name.first=x", ["name.first=x", "has no settings of its own"]),
        ("off.steps=3", ["off.steps=3", "off is none"]),
        ("parts.third.rows=1", ["'third'", "first, second"]),
        ("loop.group=32", ["loop.group=32", "group=32 exceeds tasks=16"]),
        ("steps", ["'steps'", "expected name=value"]),
        ("=3", ["expected name=value"]),
    ],
)
def test_a_bad_override_is_one_line_that_names_it(override, words):
    with pytest.raises(UserError) as error:
        apply_overrides(Outer(), [override])
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_overrides_are_applied_together_so_that_no_half_way_state_is_refused():
    config = apply_overrides(Outer(), ["loop.group=32", "loop.tasks=64"])
    assert (config.loop.group, config.loop.tasks) == (32, 64)


def test_a_setting_given_twice_is_refused_since_one_of_them_has_no_effect():
    with pytest.raises(UserError, match=r"loop\.steps is set twice"):
        apply_overrides(Outer(), ["loop.steps=3", "loop.steps=4"])


def test_an_annotation_for_type_checkers_only_leaves_the_other_fields_settable():
    assert apply_overrides(Outer(), ["loop.cap=0.5", "name=y"]).name == "y"


@given(st.integers(), st.floats(allow_nan=False), st.lists(st.integers(), max_size=5))
def test_what_python_prints_is_read_back(steps, rate, widths):
    config = apply_overrides(
        Outer(), [f"loop.steps={steps}", f"loop.rate={rate!r}", f"loop.widths={','.join(map(str, widths))}"]
    )
    assert (config.loop.steps, config.loop.rate, config.loop.widths) == (steps, rate, tuple(widths))


def test_describe_is_json_and_names_functions_with_what_they_closed_over():
    found = json.loads(json.dumps(describe(Outer(loop=Inner(cap=float("inf"))))))
    assert found["loop"]["cap"] == "inf" and found["loop"]["colour"] == "red" and found["loop"]["path"] == "here"
    assert found["surrogate"]["function"].endswith("clip.<locals>.surrogate")
    assert found["surrogate"]["with"] == {"low": 0.8, "high": 1.2}
    assert describe(functools.partial(clip, 0.5, high=2.0))["with"] == {"0": 0.5, "high": 2.0}
    assert describe(json.dumps) == "json.dumps"


def test_two_configs_that_differ_only_in_a_closed_over_number_are_told_apart():
    assert describe(Outer(surrogate=clip(0.8, 1.2))) != describe(Outer(surrogate=clip(0.8, 1.3)))


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale


def test_callable_objects_are_described_by_what_they_hold_not_by_their_address():
    assert describe(Scaled(2)) == describe(Scaled(2)) != describe(Scaled(3))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


GOOD = """
from dataclasses import dataclass
@dataclass(frozen=True)
class C:
    n: int = 3
def config():
    return C()
"""


def test_load_runs_the_file(tmp_path):
    config = load(write(tmp_path / "good.py", GOOD))
    assert config.n == 3 and apply_overrides(config, ["n=4"]).n == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def config():\n    return 1 / 0\n", ["bad.py:2: ZeroDivisionError"]),
        ("import nothing_of_this_name\n", ["bad.py:1: ModuleNotFoundError", "nothing_of_this_name"]),
        ("def config(:\n", ["bad.py:1: SyntaxError"]),
        ("raise SystemExit(3)\n", ["bad.py:1: SystemExit"]),
        ("raise ValueError('two\\nlines')\n", ["ValueError: two lines"]),
        ("x = 1\n", ["defines no function `config`"]),
        ("def config():\n    return 3\n", ["returned int, expected a frozen dataclass"]),
    ],
)
def test_a_config_that_raises_is_one_line_that_names_file_and_line(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        load(write(tmp_path / "bad.py", text))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_missing_config_names_near_files(tmp_path):
    write(tmp_path / "quickstart.py", GOOD)
    with pytest.raises(UserError, match=r"quickstrat\.py: no such config file.*did you mean .*quickstart\.py"):
        load(tmp_path / "quickstrat.py")
    with pytest.raises(UserError, match="is a directory"):
        load(tmp_path)


def test_load_refuses_another_kind_of_record(tmp_path):
    with pytest.raises(UserError, match="returned C, expected Outer"):
        load(write(tmp_path / "good.py", GOOD), Outer)
