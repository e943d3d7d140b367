"""The web environment on a real Chromium: pages solved by their text, replayed forks, only the page within reach."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agentrl_envs import web
from agentrl_envs.web import browser, forms, goals, listing, miniwob, tasks, tools
from agentrl_envs.web.browser import BrowserError
from agentrl_envs.web.page import Page

from agentrl_jax.protocol import Action, ForkRefused, Snapshot, Status, Task, ToolCall, restored

LACK, LACK_MINIWOB = web.missing(), browser.missing(miniwob=True)
needs_browser = pytest.mark.skipif(LACK is not None, reason=str(LACK))
needs_miniwob = pytest.mark.skipif(LACK_MINIWOB is not None, reason=str(LACK_MINIWOB))
ROOT = Path(__file__).parents[2]
TRAP = """<p id=query>Stay.</p>
<form action="http://other.invalid/"><label>Name <input name=n></label><button>Send</button></form>
<a href="http://other.invalid/">away</a> <a href="file:///etc/passwd">file</a>
<a href="http://other.invalid/" target=_blank>popup</a>
<a href="data:text/html,x">data</a> <a href="http://other.invalid/f.bin" download>download</a>
<button onclick="window.open('http://other.invalid/')">opens</button>
<button onclick="fetch('http://other.invalid/').catch(() => { document.title = 'refused'; })">fetches</button>
<button onclick="location = 'http://other.invalid/'">moves</button>
<button onclick="setTimeout(() => { this.textContent = 'late ' + Date.now() + Math.random(); }, 2500)">later</button>
<button disabled>off</button><input type=hidden value=secret><input style="display:none" value=secret>
<div style="position:relative"><button>under</button>
<div style="position:absolute;inset:0;background:white">over</div></div>"""


@pytest.fixture(scope="module", autouse=True)
def _no_browser_stays():
    yield
    browser.shutdown()
    assert not [label for _, label in browser.labelled() if label.endswith(f"-{os.getpid()}")]


def act(name: str, **arguments) -> Action:
    return Action(text="", calls=(ToolCall(name=name, arguments=arguments),))


def actions(calls) -> list[Action]:
    return [Action(text=call, calls=()) if isinstance(call, str) else Action(text="", calls=(call,)) for call in calls]


def play(suite, task: Task, calls):
    """The observations and the verdict of an episode."""
    environment = suite.make()
    try:
        seen = [environment.reset(task, 0)]
        initial, done = environment.snapshot(), actions(calls)
        seen += [environment.step(action) for action in done]
        return seen, suite.verify(task, initial, done, environment.snapshot())
    finally:
        environment.close()


def wait_until_gone(label: str) -> None:
    deadline = time.monotonic() + 30
    while left := [pid for pid, found in browser.labelled() if found == label]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def login():
    """A suite, a task of it, the reference solution, and the states before and after it."""
    suite = web.suite(kinds=["login"])
    (task,) = suite.tasks("train", 1, 7)
    calls = suite.solve(task)
    environment = suite.make()
    environment.reset(task, 0)
    initial = environment.snapshot()
    for action in actions(calls):
        environment.step(action)
    final = environment.snapshot()
    environment.close()
    return suite, task, calls, initial, final


@pytest.fixture
def trap():
    page = Page()
    page.open(TRAP, 7)
    yield page
    page.close()


# ---- tasks


def test_tasks_are_distinct_and_no_word_of_one_split_is_in_another():
    suite = web.suite()
    kinds = {}
    for split in ("train", "validation", "heldout"):
        made = suite.tasks(split, 40, 3)
        assert len({task.id for task in made}) == 40
        assert suite.tasks(split, 10, 3) == made[:10] and suite.tasks(split, 10, 4) != made[:10]
        kinds[split] = {task.kind for task in made}
    assert kinds["train"] == kinds["validation"] == set(forms.KINDS)
    assert kinds["heldout"] == set(forms.UNSEEN)
    for words in (forms.PEOPLE, forms.THINGS, forms.PLACES):
        assert len({word for split in words.values() for word in split}) == sum(map(len, words.values()))


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="expected one of forms, miniwob"):
        web.suite(source="net")
    with pytest.raises(ValueError, match="click-button"):
        web.suite(source="miniwob", kinds=["nope"])
    with pytest.raises(ValueError, match="heldout"):
        web.suite().tasks("test", 1, 0)
    with pytest.raises(ValueError, match="none of kinds=login"):
        web.suite(kinds=["login"]).tasks("heldout", 1, 0)


def test_what_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(browser, "NAMES", ("no-such-browser",))
    assert "apt-get install" in str(web.missing())
    with pytest.raises(BrowserError, match="apt-get install"):
        browser.Browser()


# ---- solving


SLOW_ATTACKS = (
    "hidden_fields", "huge_text", "nothing", "options", "page_as_text", "reward_as_text", "script",
)  # fmt: skip


def slowly(*kinds: str) -> list:
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@needs_browser
@pytest.mark.parametrize("kind", ["inbox", "booking", *slowly("login", "profile", "table", "topics", "wizard")])
def test_forms_are_solved_and_only_by_what_was_asked(kind):
    suite = web.suite(kinds=[kind])
    (task,) = suite.tasks("heldout" if kind in forms.UNSEEN else "train", 1, 5)
    calls = suite.solve(task)
    seen, verdict = play(suite, task, calls)
    assert verdict.success and verdict.quality == 1.0 and seen[-1].terminated
    assert all(not observation.terminated for observation in seen[:-1])
    typed = next(index for index, call in enumerate(calls) if call.name == "type")
    _, verdict = play(suite, task, [call for index, call in enumerate(calls) if index != typed])
    assert verdict.outcome is False and not verdict.success


@needs_miniwob
@pytest.mark.parametrize("kind", ["click-collapsible-2", "read-table-2"])
def test_miniwob_is_solved_from_its_text(kind):
    _solve_miniwob(kind, 1)


@pytest.mark.slow
@needs_miniwob
@pytest.mark.parametrize("kind", [*miniwob.KINDS, *miniwob.UNSEEN])
def test_every_kind_of_miniwob_is_solved_from_its_text(kind):
    _solve_miniwob(kind, 3)


def _solve_miniwob(kind: str, count: int) -> None:
    suite = web.suite(source="miniwob", kinds=[kind])
    for task in suite.tasks("heldout" if kind in miniwob.UNSEEN else "train", count, 1):
        seen, verdict = play(suite, task, suite.solve(task))
        assert verdict.success and seen[-1].terminated, (task.id, verdict)


@needs_miniwob
def test_a_page_that_pays_for_what_was_not_asked_breaks_a_constraint():
    """form-sequence-2 rewards any radio button; its text asks for one of them."""
    suite = web.suite(source="miniwob", kinds=["form-sequence-2"])
    (task,) = suite.tasks("heldout", 1, 2)
    calls = list(suite.solve(task))
    right = next(index for index, call in enumerate(calls) if call.name == "click")
    pressed = calls[right].arguments["element"]
    wrong = next(n for n in (1, 2, 3) if n != pressed)
    calls[right] = ToolCall(name="click", arguments={"element": wrong})
    _, verdict = play(suite, task, calls)
    assert verdict.diagnostics["page_reward"] == 1 and verdict.outcome is True
    assert [check.name for check in verdict.constraints if not check.passed] == ["end_state"] and not verdict.success


@needs_browser
@pytest.mark.parametrize("name", ["address", "markup_as_text", *slowly(*SLOW_ATTACKS)])
def test_no_attack_succeeds(login, name):
    suite, task, *_ = login
    seen, verdict = play(suite, task, suite.attacks(task)[name])
    assert verdict.outcome is False and not verdict.success
    assert seen[-1].terminated


def test_every_attack_is_tried():
    suite = web.suite(kinds=["login"])
    (task,) = suite.tasks("train", 1, 0)
    assert set(suite.attacks(task)) == {"address", "markup_as_text", *SLOW_ATTACKS}


@pytest.mark.slow
@needs_miniwob
@pytest.mark.parametrize("kind", ["click-button", "enter-text", "click-checkboxes", "choose-list"])
def test_no_attack_succeeds_on_miniwob(kind):
    suite = web.suite(source="miniwob", kinds=[kind])
    for task in suite.tasks("train", 2, 6):
        for name, calls in suite.attacks(task).items():
            assert not play(suite, task, calls)[1].success, (task.id, name)


# ---- the page is all there is


@needs_browser
def test_nothing_leads_out_of_the_page(trap):
    names = ["Send", "away", "file", "popup", "data", "download", "opens", "fetches", "moves"]
    for name in names:
        found = [element for element in trap.view["elements"] if element["name"] == name]
        assert trap.act("click", {"element": found[0]["number"]}) is None, name
        address = trap._do(lambda: trap._page.evaluate("document.location.href"))
        assert address == "http://page.invalid/" and len(trap._do(lambda: trap._context.pages)) == 1, name
    assert trap.refused > 0
    assert [element["name"] for element in trap.view["elements"]][:3] == ["Name", "Send", "away"]


@needs_browser
def test_hidden_covered_and_disabled_elements_are_out_of_reach(trap):
    elements = {element["name"]: element for element in trap.view["elements"]}
    shown = listing.text(trap.view["elements"])
    assert "secret" not in shown and "disabled" in shown
    assert trap.act("click", {"element": elements["under"]["number"]}).endswith("is covered by another")
    assert trap.act("click", {"element": elements["off"]["number"]}).endswith("is disabled")
    assert trap.act("type", {"element": elements["away"]["number"], "text": "x"}) is not None
    assert trap.act("click", {"element": 999}) == "there is no element 999"


@needs_browser
def test_time_and_chance_are_the_pages_own():
    shown = []
    for _ in range(2):
        page = Page()
        page.open(TRAP, 7)
        page.act("click", {"element": next(e["number"] for e in page.view["elements"] if e["name"] == "later")})
        shown.append(next(e["name"] for e in page.view["elements"] if e["name"].startswith("late ")))
        page.close()
    assert shown[0] == shown[1] and shown[0].startswith("late 16000000")


def test_long_pages_are_cut_and_read_on():
    elements = [{"number": n, "role": "text", "name": f"word {n} " + "x" * 5_000} for n in range(1, 201)]
    first = listing.text(elements)
    assert len(first) <= listing.MOST_CHARS and "(140 more lines: read them from line 61)" in first
    assert listing.text(elements, 61, full=True).startswith("[61] ")
    assert len(listing.text(elements, 1, full=True)) <= listing.MOST_CHARS
    assert listing.text(elements, 500) == "(the page has 200 lines)"
    password = {"number": 1, "role": "textbox", "name": "Password", "value": "abc", "secret": True}
    assert listing.text([password]) == '[1] textbox "Password" = "***"'


# ---- calls


def test_wrong_calls_are_named():
    for call, said in [
        (ToolCall(name="goto", arguments={"url": "x"}), "unknown tool"),
        (ToolCall(name="click"), "click takes element"),
        (ToolCall(name="finish", arguments={"x": 1}), "takes no arguments"),
        (ToolCall(name="click", arguments={"element": True}), "must be a number"),
        (ToolCall(name="click", arguments={"element": 2**70}), "must be a number"),
        (ToolCall(name="type", arguments={"element": 1, "text": 5}), "must be a text"),
        (ToolCall(name="type", arguments={"element": 1, "text": "x" * 501}), "500 characters"),
        (ToolCall(name="type", arguments={"element": 1, "text": "\ud800"}), "no keyboard"),
    ]:
        assert said in str(tools.wrong(call))
    assert tools.wrong(ToolCall(name="type", arguments={"element": 1, "text": "two\nlines"})) is None


@needs_browser
def test_calls_are_answered_in_order_and_nothing_happens_after_the_end(login):
    suite, task, solution, _, _ = login
    environment = suite.make()
    environment.reset(task, 0)
    calls = (ToolCall(name="goto"), ToolCall(name="read", arguments={"line": 3}), *solution, ToolCall(name="finish"))
    seen = environment.step(Action(text="", calls=calls))
    assert [message.content[:9] for message in seen.content][:2] == ["error: un", "[3] butto"]
    assert seen.content[-1].content == "the task is over" and seen.content[-2].content == "the page has ended the task"
    assert seen.status is Status.INVALID_ACTION and seen.terminated
    final = environment.snapshot()
    for late in (act("click", element=1), act("finish"), Action(text="x"), Action(text="x", error="bad")):
        seen = environment.step(late)
        assert seen.terminated and seen.status is Status.INVALID_ACTION and environment.snapshot() == final
    environment.close()
    environment.close()
    with pytest.raises(RuntimeError, match="closed"):
        environment.step(act("finish"))


# ---- forks


@needs_browser
def test_forks_are_exact_and_siblings_do_not_see_each_other():
    suite = web.suite(kinds=["wizard"])
    (task,) = suite.tasks("heldout", 1, 8)
    calls = suite.solve(task)
    origin, one, two = (suite.make() for _ in range(3))
    origin.reset(task, 0)
    initial = origin.snapshot()
    for action in actions(calls[:3]):
        origin.step(action)
    state = origin.snapshot()
    one.restore(state)
    two.restore(state)
    assert one.snapshot() == two.snapshot() == state
    seen = [one.step(action).content for action in actions(calls[3:])]
    assert two.snapshot() == origin.snapshot() == state
    assert [two.step(action).content for action in actions(calls[3:])] == seen
    assert [origin.step(action).content for action in actions(calls[3:])] == seen
    assert one.snapshot() == two.snapshot() == origin.snapshot() != state
    assert suite.verify(task, initial, actions(calls), one.snapshot()).success
    for environment in (origin, one, two):
        environment.close()


@needs_browser
def test_a_log_that_leads_elsewhere_is_refused(login):
    suite, *_, final = login
    environment = suite.make()
    state = json.loads(final.data)
    state["actions"][0]["calls"][0]["arguments"]["text"] = "Eve"
    with pytest.raises(ForkRefused, match="another observation at turn 1"):
        environment.restore(Snapshot(data=json.dumps(state).encode(), hash=final.hash))
    with pytest.raises(ForkRefused, match="the restored state has the hash"):
        restored(suite, dataclasses.replace(final, hash="0"))
    environment.close()


@needs_browser
def test_the_verifier_believes_only_a_log_that_the_calls_explain(login):
    suite, task, calls, initial, final = login
    assert suite.verify(task, initial, actions(calls), final).success
    for claimed in ([], calls[:-1], tuple(reversed(calls))):
        verdict = suite.verify(task, initial, actions(claimed), final)
        assert verdict.outcome is True and not verdict.success
    unreadable = suite.verify(task, initial, actions(calls), Snapshot(data=b"{}", hash=""))
    assert unreadable.outcome is None and not unreadable.success


# ---- failures of the browser


@needs_browser
def test_a_killed_browser_is_the_environments_failure_and_the_next_episode_has_another(login):
    suite, task, *_ = login
    environment = suite.make()
    first = environment.reset(task, 0)
    (pid,) = browser.browser().pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BrowserError, match="the browser failed"):
        environment.step(act("click", element=1))
    environment.close()
    assert environment.reset(task, 0) == first
    assert browser.browser().pids() != [pid] and not Path(f"/proc/{pid}/exe").exists()
    environment.close()


@pytest.mark.slow
@needs_browser
def test_a_browser_that_died_between_episodes_costs_none(login):
    suite, task, *_ = login
    environment = suite.make()
    first = environment.reset(task, 0)
    environment.close()
    os.kill(browser.browser().pids()[0], signal.SIGKILL)
    assert environment.reset(task, 0) == first
    os.kill(browser.browser().pids()[0], signal.SIGKILL)
    environment.close()


def test_only_browsers_without_a_driver_are_reaped():
    program = [sys.executable, "-c", "import time; time.sleep(60)", f"{browser.LABEL}test-1"]
    with subprocess.Popen(program) as orphan:
        deadline = time.monotonic() + 60
        while orphan.poll() is None:  # who starts a browser meanwhile, in another process, reaps it too
            assert time.monotonic() < deadline
            browser.reap()
        assert orphan.returncode == -signal.SIGKILL


@needs_browser
def test_a_page_that_never_comes_back_is_given_up(monkeypatch):
    page = Page()
    page.open("<p id=query>Wait.</p><button onclick='for (;;) {}'>hang</button>", 1)
    owner = browser.browser()
    monkeypatch.setattr(browser, "CALL_S", 0.5)
    with pytest.raises(BrowserError, match="did not answer within"):
        page.act("click", {"element": 1})
    page.close()
    assert owner.broken
    wait_until_gone(owner.label)


@needs_browser
@pytest.mark.parametrize("how", ["SIGKILL", *slowly("exit", "SIGTERM")])
def test_no_browser_outlives_its_worker(how):
    program = (
        "import sys, time\n"
        "from agentrl_envs import web\nfrom agentrl_envs.web import browser\n"
        "suite = web.suite()\nenvironment = suite.make()\nenvironment.reset(suite.tasks('train', 1, 0)[0], 0)\n"
        "print(browser.browser().label, flush=True)\n"
        "assert 'jax' not in sys.modules\n"
        "sys.exit(0) if sys.argv[1] == 'exit' else time.sleep(60)\n"
    )
    search = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search, "AGENTRL_RUN_LABEL": "test"},
    ) as worker:
        assert worker.stdout is not None
        label = worker.stdout.readline().decode().strip()
        assert label == f"--agentrl-run=test-{worker.pid}"
        if how != "exit":
            worker.send_signal(getattr(signal, how))
        assert worker.wait(30) == (0 if how == "exit" else -getattr(signal, how))
    wait_until_gone(label)


# ---- goals, without a browser


@pytest.mark.parametrize(
    ("kind", "query", "elements", "fill"),
    [
        ("enter-time", "Enter 12:05 AM as the time and press submit.", [], {0: "00:05"}),
        ("enter-time", "Enter 1:30 PM as the time and press submit.", [], {0: "13:30"}),
        ("enter-date", "Enter 03/09/2014 as the date and hit submit.", [], {0: "2014-03-09"}),
        ("enter-text-2", 'Type "Ada" in all upper case letters in the text input', [], {0: "ADA"}),
        ("simple-arithmetic", "", [{"role": "text", "name": "2 - 9 ="}], {0: "-7"}),
        ("simple-algebra", "", [{"role": "text", "name": "x - 4 = 10"}], {0: "14"}),
        ("simple-algebra", "", [{"role": "text", "name": "4 - x = 10"}], {0: "-6"}),
        ("simple-algebra", "", [{"role": "text", "name": "4 + x = 10"}], {0: "6"}),
        ("find-word", "Find the 2nd word", [{"role": "text", "name": "Aa. Bb, cc"}], {0: "Bb"}),
    ],
)
def test_goals(kind, query, elements, fill):
    assert goals.goal(kind, query, elements).fill == fill


def test_a_page_of_another_kind_has_no_goal():
    for kind in (*miniwob.KINDS, *miniwob.UNSEEN):
        with pytest.raises(ValueError, match=kind):
            goals.goal(kind, "an empty page", [])


def test_seeds_of_splits_are_ranges():
    suite = web.suite(source="miniwob")
    for index, split in enumerate(("train", "validation", "heldout")):
        pages = [task.data["page"] for task in suite.tasks(split, 60, 0)]
        assert all(index * tasks.RANGE <= page < (index + 1) * tasks.RANGE for page in pages)


# ---- what is made ahead


def _made_ahead(chosen):
    deadline = time.monotonic() + 30
    while chosen._ready is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return chosen._ready[0]


@needs_browser
def test_a_context_that_was_made_ahead_is_given_once_and_holds_nothing():
    """No two episodes share one, whether there was time to make it ahead or not, and all see the same page."""
    suite = web.suite(kinds=["login"])
    (task,) = suite.tasks("train", 1, 0)
    worlds, seen, contexts = [suite.make() for _ in range(4)], [], []
    for index, world in enumerate(worlds):
        expected = _made_ahead(browser.browser()) if index in (1, 2) else None
        seen.append(world.reset(task, 0))
        contexts.append(world._page._context)
        assert expected is None or contexts[-1] is expected
    assert len(set(map(id, contexts))) == 4 and all(one == seen[0] for one in seen)
    assert len({world.snapshot().hash for world in worlds}) == 1
    for world in worlds:
        world.close()


@needs_browser
def test_a_browser_that_dies_with_a_context_made_ahead_is_replaced():
    suite = web.suite(kinds=["login"])
    (task,) = suite.tasks("train", 1, 0)
    world = suite.make()
    first, chosen = world.reset(task, 0), browser.browser()
    world.close()
    _made_ahead(chosen)
    chosen.kill()
    assert world.reset(task, 0) == first and browser.browser() is not chosen
    world.close()
