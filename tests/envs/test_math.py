"""The math environment: what an answer is, what it equals, and what is no answer."""

import itertools
import random
from fractions import Fraction

import pytest
from agentrl_envs import data
from agentrl_envs.math import KINDS, suite
from agentrl_envs.math.answers import FORMS, Unreadable, equal, read, to_sympy
from agentrl_envs.math.calculator import Refused, evaluate, write
from agentrl_envs.math.tasks import SPLITS, final, gsm8k, program
from agentrl_envs.sets.gsm8k import GSM8K
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Action, Snapshot, Status, ToolCall

MATH = suite()


def answer(value):
    return ToolCall(name="answer", arguments={"value": value})


def do(environment, *calls):
    return environment.step(Action(text="", calls=calls))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_succeeds_and_attacks_do_not(play, kind):
    chosen = suite(kinds=(kind,))
    for task in chosen.tasks("train", 3, 0):
        played = play(chosen, task, chosen.solve(task))
        assert played.verdict.success and played.verdict.quality == 1.0, (task, played.verdict)
        assert all(seen.status is Status.OK for seen in played.observations)
        assert all(seen.evidence_gain == 1.0 for seen in played.observations[:1])
        for name, script in chosen.attacks(task).items():
            for turn in [script, *([item] for item in script)]:
                assert not play(chosen, task, turn).verdict.success, (name, turn)


def test_splits_share_no_problem():
    texts = {split: {task.data["text"] for task in MATH.tasks(split, 60, 0)} for split in SPLITS}
    assert [len(found) for found in texts.values()] == [60] * 3
    assert len(set.union(*texts.values())) == 180


@pytest.mark.parametrize(
    "form, one, other, same",
    [
        ("number", "72", "72.0", True), ("number", "1,234", "1234", True), ("number", "$72", "72", True),
        ("number", "-0.5", "-1/2", True), ("number", r"\boxed{\frac{7}{4}}", "1.75", True),
        ("number", ".5", "1/2", True),
        ("number", "0.333333", "1/3", False), ("number", "72", "73", False), ("number", "7.", "7", True),
        ("expanded", "x^2 + 2x + 1", "1 + 2*x + x**2", True), ("expanded", "x^2 - 1", "x^2 + 1", False),
        ("expanded", "3/2*x", "1.5x", True), ("expanded", "x*y", "y*x", True), ("expanded", "-(x)", "-x", True),
        ("factored", "(x-1)(x+1)", "(x + 1)*(x - 1)", True), ("factored", "2(x-1)*(x+1)", "(2x-2)(x+1)", True),
        ("factored", "(x-1)^2", "(1-x)^2", True), ("factored", "(x-1)(x+2)", "(x+1)(x-2)", False),
        ("radical", "3*sqrt(2)", "sqrt(2)*3", True), ("radical", r"3\sqrt{2}", "3*sqrt(2)", True),
        ("radical", "1 + sqrt(2)", "sqrt(2) + 1", True), ("radical", "3*sqrt(2)", "2*sqrt(3)", False),
        ("radical", "3*sqrt(2)/2", "1.5*sqrt(2)", True),
    ],
)  # fmt: skip
def test_answers_are_compared_exactly(form, one, other, same):
    assert equal(read(form, one), read(form, other)) is same
    assert equal(read(form, other), read(form, one)) is same


@pytest.mark.parametrize(
    "form, text",
    [
        *(("number", text) for text in (
            "", " ", "5 or 6", "5, 6", "5;6", "5 6", "[5]", "2+3", "17*23", "x", "nan", "inf", "1e3", "5%", "1,23",
            "1/0",
            "--5", "٣", "0x10", "1_000", "9" * 50, "\\boxed{5}\\boxed{6}", "5\n6", "=5", "5=5", "1/2/3", "1.5/2",
        )),
        *(("expanded", text) for text in (
            "(x+1)(x-1)", "x*(x+1)", "(x+1)^2", "x + x", "2*3*x", "x + 0", "x; y", "x, y", "x = 1", "f(x)", "x^99",
            "x^x",
            "1/x", "x/0", "sqrt(x)", "x 2", "((x)", "x)", "+", "x^-1", "x" * 300, "x*" * 99 + "x", "x.__class__", "2 3",
        )),
        ("factored", "(" * 199), ("factored", "(a + b + c + n + x + y + z)^12"),
        *(("factored", text) for text in ("x^2 - 1", "(x^2-1)*(x+2)", "(x+1)(x-1) + 1", "(x+x)(x-1)", "sqrt(2)*x")),
        *(("radical", text) for text in (
            "sqrt(50)", "sqrt(8) + 1", "sqrt(2) + sqrt(2)", "sqrt(2)*sqrt(3)", "sqrt(4)", "sqrt(1/2)", "2*3*sqrt(5)",
            "sqrt(sqrt(2))", "sqrt(99999999999)", "sqrt(2)^2", "sqrt 2", "3*sqrt(2) + 0",
        )),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused(form, text):
    with pytest.raises(Unreadable):
        read(form, text)


def test_math_verify_says_the_same():
    """Another library, over right and wrong answers of every kind."""
    verify = pytest.importorskip("math_verify", reason="pip install math-verify")
    tasks = suite(kinds=("linear", "expand")).tasks("train", 16, 2)
    told = 0
    for one, other in itertools.product(tasks, tasks[:8]):
        if one.data["form"] != other.data["form"]:
            continue
        left, right = (verify.parse(f"${task.data['answer'].replace('*', '')}$") for task in (one, other))
        ours = equal(*(read(task.data["form"], task.data["answer"]) for task in (one, other)))
        letters = {letter for letter in one.data["answer"] + other.data["answer"] if letter in "xyn"}
        if left and right and len(letters) < 2 and one.data["form"] in ("number", "expanded"):
            assert verify.verify(left, right, timeout_seconds=None) == ours, (one.data, other.data)
            told += 1
    assert told > 30


POLYNOMIALS = st.lists(st.tuples(st.integers(-9, 9).filter(bool), st.integers(0, 4)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(POLYNOMIALS, st.randoms(use_true_random=False))
def test_polynomials_equal_themselves_in_any_order_and_nothing_else(terms, rng):
    """By a second route: values at ten points decide polynomials of degree 4."""
    terms = list({power: (value, power) for value, power in terms}.values())
    other = list(terms)
    rng.shuffle(other)
    if rng.random() < 0.5:
        value, power = other[0]
        other[0] = (value + rng.choice((-1, 1)), power)
        if not other[0][0]:
            other[0] = (7, power)

    def said(parts):
        return " + ".join(f"{value}*x^{power}" if power else str(value) for value, power in parts)

    def at(parts, x):
        return sum(value * x**power for value, power in parts)

    same = all(at(terms, x) == at(other, x) for x in range(10))
    left, right = read("expanded", said(terms)), read("expanded", said(other))
    assert equal(left, right) is same
    assert to_sympy(left).subs("x", 3) == at(terms, 3)


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str) | st.decimals(0, 99, places=2).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(EXPRESSIONS)
def test_the_calculator_computes_what_python_does(text):
    """Against Python's own evaluation of the same program over fractions."""
    shown = program(text).splitlines()[-1].removeprefix("print(").removesuffix(")")
    try:
        expected = Fraction(eval(shown, {"F": Fraction}))
    except ZeroDivisionError:
        with pytest.raises(Refused, match="division by zero"):
            evaluate(text)
        return
    if len(text) <= 300:
        assert evaluate(text) == expected
        head = write(expected).partition(" ")[0]
        assert Fraction(head) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "9**9**9", "10**1000", "2**65", "2**0.5", "(" * 150 + "1" + ")" * 150, "a", "x", "__import__('os')", "abs",
        "abs()",
        "gcd(0.5)", "isqrt(-1)", "1 if 2 else 3", "[1]", "1, 2", "1 < 2", "2x", "1(2)", "abs(1, 2)", "'a'",
        "1j", "0x10",
        "1_0", "min(*1)", "1 and 2", "lambda", "~1", "1 << 9", "not 1", "2(3)", "(2)(3)", "max(key=1)",
        "1" * 301, "1e5", "é",
        "9" * 150 + "**3", "((99**60)**9)**9", "\n", "1\n2", "007",
    ],
)  # fmt: skip
def test_the_calculator_refuses_the_rest(text):
    with pytest.raises(Refused):
        evaluate(text)


def test_errors_can_be_acted_on_and_one_answer_ends_it():
    task = suite(kinds=("linear",)).tasks("train", 1, 0)[0]
    environment = MATH.make()
    opening = environment.reset(task, 0).content[0].content
    assert task.data["text"] in opening and "one number" in opening
    seen = do(environment, ToolCall(name="calculate", arguments={"expression": "1/3"}), answer("2 or 3"))
    assert seen.content[0].content == "1/3 (about 0.333333)"
    assert seen.status is Status.INVALID_ACTION and "one number" in seen.content[1].content and not seen.terminated
    seen = do(environment, answer("999"), answer(task.data["answer"]))
    assert seen.terminated and seen.content[1].content == "the task is over"
    final_state = environment.snapshot()
    verdict = MATH.verify(task, final_state, [Action(text="", calls=(answer("999"),))], final_state)
    assert verdict.outcome is False and not verdict.violated


def test_an_answer_that_nobody_gave_is_a_violation(play):
    task = MATH.tasks("train", 1, 0)[0]
    played = play(MATH, task, MATH.solve(task))
    verdict = MATH.verify(task, played.initial, [], played.final)
    assert verdict.outcome and verdict.violated and not verdict.success


def test_without_sympy_expressions_are_unscored(play, monkeypatch):
    chosen = suite(kinds=("expand",))
    task = chosen.tasks("train", 1, 0)[0]
    played = play(chosen, task, chosen.solve(task))
    monkeypatch.setitem(__import__("sys").modules, "sympy", None)
    verdict = chosen.verify(task, played.initial, played.actions, played.final)
    assert verdict.outcome is None and "pip install" in verdict.evidence[0]


def test_siblings_of_one_snapshot_are_alone():
    task = MATH.tasks("train", 1, 1)[0]
    calls = MATH.solve(task)
    origin, one, two = (MATH.make() for _ in range(3))
    origin.reset(task, 0)
    do(origin, calls[0])
    kept = origin.snapshot()
    one.restore(kept)
    two.restore(Snapshot(data=kept.data, hash=kept.hash))
    do(one, *calls[1:])
    assert two.snapshot() == origin.snapshot() == kept
    do(two, *calls[1:])
    assert two.snapshot() == one.snapshot() != kept


def test_gsm8k():
    if data.locate(GSM8K) is None:
        pytest.skip("the gsm8k set is not here: set AGENTRL_DATA")
    rows = data.load(GSM8K)
    assert (len(rows["train.jsonl.gz"]), len(rows["test.jsonl.gz"])) == (7473, 1319)
    for row in [*rows["train.jsonl.gz"], *rows["test.jsonl.gz"]]:
        assert isinstance(read("number", final(row["answer"])), Fraction)
    texts = {split: {text for text, _ in gsm8k(split, 16)} for split in SPLITS}
    assert len(texts["heldout"]) == 1319 and len(texts["train"]) + len(texts["validation"]) == 7473
    assert 650 < len(texts["validation"]) < 850 and len(set.union(*texts.values())) == 7473 + 1319


def test_gsm8k_is_played(play):
    if data.locate(GSM8K) is None:
        pytest.skip("the gsm8k set is not here: set AGENTRL_DATA")
    chosen = suite(source="gsm8k")
    for task in chosen.tasks("heldout", 6, 0):
        assert play(chosen, task, chosen.solve(task)).verdict.success
        for name, script in chosen.attacks(task).items():
            assert not play(chosen, task, script).verdict.success, name


def test_programs_run_in_a_sandbox(play):
    """The same problems with Python as the tool: references succeed, programs share nothing and see no answers."""
    sandbox = pytest.importorskip("agentrl_envs.sandbox", reason="the sandbox package is not here")
    if not any(reason is None for name, reason in sandbox.available().items() if name != "unsafe"):
        pytest.skip("this machine has no sandbox")
    chosen = suite(tool="python")
    for task in chosen.tasks("train", 3, 0):
        assert play(chosen, task, chosen.solve(task)).verdict.success
    environment = chosen.make()
    try:
        environment.reset(chosen.tasks("train", 1, 0)[0], 0)

        def run(code):
            return do(environment, ToolCall(name="run_code", arguments={"code": code}))

        assert run("open('kept', 'w').write('x'); print(6*7)").content[0].content == "42"
        seen = run("print(open('kept').read())")
        assert seen.status is Status.DENIED and "FileNotFoundError" in seen.content[0].content
        assert run("\x00").status is run("\ud800").status is Status.DENIED
        assert run("import agentrl_envs").status is Status.DENIED
        assert run("while True: pass").status is Status.TIMEOUT
        assert run("print('still here')").content[0].content == "still here"
    finally:
        environment.close()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"source": "web"}, "expected one of generated, gsm8k"),
        ({"tool": "bash"}, "expected one of calculator, python"),
        ({"kinds": ("hard",)}, "expected some of shopping"),
        ({"calls": 1}, "expected 2 or more"),
    ],
)
def test_unknown_options_name_the_known_ones(options, words):
    with pytest.raises(ValueError, match=words):
        suite(**options)
    with pytest.raises(ValueError, match="train, validation, heldout"):
        MATH.tasks("test", 1, 0)


def test_every_form_is_asked_for():
    rng = random.Random(0)
    assert {suite(kinds=(kind,)).tasks("train", 1, rng.randrange(9))[0].data["form"] for kind in KINDS} == set(FORMS)
