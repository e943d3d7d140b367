"""The Metamath reader and checker: whole databases, wrong proofs, and the `metamath` program as a second route."""

import itertools
import random
import re
import shutil
import subprocess
from importlib.resources import files

import pytest
from agentrl_envs import data
from agentrl_envs.proof import generated
from agentrl_envs.proof.checker import StepError, check, problem_of, proves, run, steps_of
from agentrl_envs.proof.facts import Move, derive, labels_of, moves_of
from agentrl_envs.proof.metamath import MetamathError, parse
from agentrl_envs.proof.syntax import Grammar
from agentrl_envs.proof.tasks import Options, problem_from, proof_of, tasks
from agentrl_envs.sets.metamath import METAMATH
from hypothesis import given, settings
from hypothesis import strategies as st

EMPTY = {"hypotheses": [], "goal": "|- p"}
CALCULUS = files("agentrl_envs.proof").joinpath("calculus.mm").read_text()
OPTIONS = Options(source="calculus", kinds=generated.KINDS, most_steps=24, facts=64)
THEOREMS = {"demo0": 1, "miu": 1, "peano": 0, "hol": 151, "ql": 1140}


@pytest.fixture(scope="module")
def databases():
    if data.locate(METAMATH) is None:
        pytest.skip("the metamath set is not here: set AGENTRL_DATA")
    return {name: parse(data.load(METAMATH)[f"{name}.mm"]) for name in THEOREMS}


def theorems(database):
    return [assertion for assertion in database.assertions.values() if assertion.proof is not None]


@pytest.mark.parametrize("count", [99, 297])
def test_how_deep_the_caller_stands_changes_no_parse(count):
    problem = problem_from(tasks(OPTIONS, "train", 1, 0)[0].data)
    variable = next(iter(Grammar(problem).types))
    negated = ("~",) * count + (variable,)

    def below(frames: int) -> object:
        return Grammar(problem).prove(Grammar(problem).types[variable], negated) if not frames else below(frames - 1)

    assert below(0) == below(700) is not None


def test_every_proof_of_every_database_checks(databases):
    for name, count in THEOREMS.items():
        found = theorems(databases[name])
        assert len(found) == count
        for assertion in found:
            check(databases[name], assertion)


def test_moves_and_labels_prove_what_the_database_proves(databases):
    """A theorem's own proof, turned into steps over facts and back into labels, passes the checker."""
    for name in ("demo0", "miu", "hol", "ql"):
        for assertion in theorems(databases[name])[::30]:
            problem = problem_of(databases[name], assertion)
            moves = moves_of(problem, steps_of(assertion))
            grammar, facts = Grammar(problem), []
            for move in moves:
                facts.append(derive(problem, grammar, facts, move))
            assert facts[-1] == problem.goal
            labels = labels_of(problem, grammar, moves, 3000)
            assert labels is None or proves(problem, labels)


def test_a_proof_uses_only_what_stands_before(databases):
    """Each theorem of hol, proved by itself or by anything later, is unknown to its own problem."""
    database = databases["hol"]
    for assertion in theorems(database)[::10]:
        problem = problem_of(database, assertion)
        for label in database.order[assertion.index :: 20]:
            with pytest.raises(StepError, match="nothing is called"):
                problem.find(label)


def test_a_disjointness_that_is_not_declared_is_needed(databases):
    """Without the theorem's own $d statements, proofs of hol that rest on one fail, and only these."""
    database = databases["hol"]
    failed = []
    for assertion in theorems(database):
        problem = problem_of(database, assertion)
        bare = type(problem)(database, problem.goal, problem.hypotheses, frozenset(), problem.limit)
        moves = moves_of(problem, steps_of(assertion))
        grammar, facts = Grammar(bare), []
        try:
            for move in moves:
                facts.append(derive(bare, grammar, facts, move))
        except StepError as error:
            assert "disjoint" in str(error) or "share" in str(error)
            failed.append(assertion)
    assert 20 < len(failed) < 120
    assert all(assertion.scope_disjoint for assertion in failed)


DISJOINT = """
$c |- set = T $. $v x y $. vx $f set x $. vy $f set y $.
${ $d x y $. apart $a |- x = y $. $}
"""


@pytest.mark.parametrize(
    "text, right",
    [
        ("${ $d x y $. good $p |- x = y $= vx vy apart $. $}", True),
        ("bad $p |- x = y $= vx vy apart $.", False),  # not declared here
        ("bad $p |- x = x $= vx vx apart $.", False),  # one variable on both sides
        ("${ $d x y $. bad $p |- y = y $= vy vy apart $. $}", False),
        ("bad $p |- x = y $= ? $.", False),
        ("bad $p |- x = y $= vx ? apart $.", False),
        ("bad $p |- x = y $= ( ? ) A $.", False),
        ("bad $p |- x = y $= bad $.", False),
        ("bad $p |- x = y $= vx vy $.", False),
        ("bad $p |- x = y $= apart $.", False),
        ("bad $p |- x = y $= $.", False),
        ("bad $p |- x = y $= ( apart $.", False),
        ("bad $p |- x = y $= ( apart ) ABZ $.", False),
        ("${ $d x y $. good $p |- x = y $= ( apart ) ABC $. $}", True),
        ("${ $d x y $. bad $p |- x = y $= ( apart ) ABCU $. $}", False),
        ("${ $d x y $. bad $p |- x = y $= ( apart ) ABCCZZ $. $}", False),
        ("${ h $e |- y = x $. bad $p |- x = y $= h $. $}", False),
        ("${ h $e |- y = x $. good $p |- y = x $= h $. $}", True),
    ],
)
def test_small_proofs(text, right):
    database = parse(DISJOINT + text)
    assertion = theorems(database)[0]
    if right:
        check(database, assertion)
        return
    with pytest.raises(StepError):
        check(database, assertion)


@pytest.mark.parametrize(
    "text",
    [
        "$c a", "$c a a $.", "$c $.", "$( open", "$( $( $)", "$[ file.mm $]", "${", "$}", "${ $c a $. $}", "x",
        "$c a $. $v a $.", "$c a $. x $a b $.", "$c a $. x $a a $. x $a a $.", "$c a $. $v v $. x $a a v $.",
        "$c a $. $v v $. f $f a v $. g $f a v $.", "$c a $. $v v $. f $f a v v $.", "$c a $. $v v $. $d v $.",
        "$c a $. $v v $. f $f v v $.", "$c a $. x $p a $.", "$c a $. x y $a a $.", "$c a $. x! $a a $.",
        "$c a $. $v v w $. ${ f $f a v $. $} x $a a v $.", "$c a $. a $a a $.", "$c a $. x $a a $( half $.",
    ],
)  # fmt: skip
def test_malformed_databases_are_refused(text):
    with pytest.raises(MetamathError):
        parse(text)


def drawn(count):
    return tasks(OPTIONS, "train", count, 5)


def as_labels(task):
    problem = problem_from(task.data)
    labels = labels_of(problem, Grammar(problem), proof_of(task), 5000)
    assert labels is not None
    return problem, labels


def spoiled(labels, rng):
    """The proof with one thing wrong, as a rule."""
    labels = list(labels)
    at = rng.randrange(len(labels))
    change = rng.choice(("drop", "replace", "swap", "double"))
    if change == "drop":
        del labels[at]
    elif change == "replace":
        labels[at] = rng.choice(labels)
    elif change == "double":
        labels.insert(at, labels[at])
    else:
        other = rng.randrange(len(labels))
        labels[at], labels[other] = labels[other], labels[at]
    return labels


def test_the_metamath_program_says_the_same(tmp_path):
    """Sixty generated proofs and sixty spoiled ones, in one file: the program and the checker accept the same."""
    program = shutil.which("metamath")
    if program is None:
        pytest.skip("metamath is not installed: apt-get install metamath")
    rng = random.Random(0)
    text, ours = [CALCULUS], {}
    for number, task in enumerate(drawn(60)):
        problem, labels = as_labels(task)
        for name, proof in ((f"good{number}", labels), (f"bad{number}", spoiled(labels, rng))):
            unique = {label: f"{name}.{label}" for label, _ in task.data["hypotheses"]}
            hypotheses = " ".join(f"{unique[label]} $e {words} $." for label, words in task.data["hypotheses"])
            said = " ".join(unique.get(label, label) for label in proof)
            text.append(f"${{ {hypotheses} {name} $p {task.data['goal']} $= {said} $. $}}")
            ours[name] = proves(problem, proof)
    lines = "\n".join(text)
    (tmp_path / "all.mm").write_text(re.sub(r"(.{60,70}) ", r"\1\n", lines) + "\n")
    done = subprocess.run(
        [program, "read all.mm", *(f"verify proof {name}" for name in ours), "exit"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    parts = re.split(r"MM> verify proof (\S+)\n", done.stdout)
    theirs = {name: "Error" not in said for name, said in zip(parts[1::2], parts[2::2], strict=True)}
    assert theirs == ours
    assert all(ours[name] for name in ours if name.startswith("good"))
    assert sum(not right for right in ours.values()) > 40


TERMS = st.recursive(
    st.integers(0, 3).map(lambda n: "s " * n + "0") | st.sampled_from(["a", "b", "c"]),
    lambda inner: st.tuples(inner, st.sampled_from("+*"), inner).map(lambda t: f"( {t[0]} {t[1]} {t[2]} )"),
    max_leaves=4,
)
FORMULAS = st.recursive(
    st.sampled_from(["p", "q", "r"]),
    lambda inner: st.tuples(inner, inner).map(lambda t: f"( {t[0]} -> {t[1]} )") | inner.map(lambda f: f"~ {f}"),
    max_leaves=5,
)


def truth(fact, world):
    """Evaluates a formula or an equation of the calculus: shares no code with the checker."""
    words = list(fact[1:])

    def read():
        if words[0] == "~":
            words.pop(0)
            return not read()
        left = term()
        if words and words[0] == "=":
            words.pop(0)
            return left == term()
        return left

    def term():
        word = words.pop(0)
        if word == "s":
            return term() + 1
        if word == "0":
            return 0
        if word != "(":
            return world[word]
        left, sign, right = read(), words.pop(0), read()
        assert words.pop(0) == ")"
        return {"->": lambda: (not left) or right, "+": lambda: left + right, "*": lambda: left * right}[sign]()

    value = read()
    assert not words
    return value


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_is_derived_without_hypotheses_is_true(drawn_data):
    """Soundness by a second route: facts of random steps hold under every truth value and for all small numbers."""
    problem = problem_from({"database": "calculus", "label": "", "limit": len(generated.database().order), **EMPTY})
    grammar, facts = Grammar(problem), []
    provable = [a for a in generated.database().assertions.values() if a.symbols[0] == "|-"]
    for _ in range(10):
        rule = drawn_data.draw(st.sampled_from(provable))
        needed = sum(not h.floating for h in rule.hypotheses)
        uses = tuple(drawn_data.draw(st.integers(0, len(facts))) for _ in range(needed))
        fixed = {s for h in rule.hypotheses if not h.floating for s in h.symbols}
        values = tuple(
            (h.symbols[1], drawn_data.draw(FORMULAS if h.symbols[0] == "wff" else TERMS))
            for h in rule.hypotheses if h.floating and h.symbols[1] not in fixed
        )  # fmt: skip
        try:
            facts.append(derive(problem, grammar, facts, Move(rule.label, uses, values)))
        except StepError:
            continue
    for fact in facts:
        for values in itertools.product((False, True), repeat=3):
            for numbers in ((0, 1, 2), (3, 0, 1)):
                world = dict(zip("pqr", values, strict=True)) | dict(zip("abc", numbers, strict=True))
                assert truth(fact, world), fact


def test_an_expression_that_doubles_is_stopped():
    """Nested substitution grows as 2 ** n; it ends in an error, not in memory."""
    problem = problem_from({"database": "calculus", "label": "", "limit": len(generated.database().order), **EMPTY})
    labels = ["wp"]
    with pytest.raises(StepError, match="symbols"):
        stack = run(problem, labels)
        for _ in range(40):
            stack = run(problem, ["imp"], (*stack, *stack))
