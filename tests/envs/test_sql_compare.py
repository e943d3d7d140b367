"""Equivalence of results, against a brute-force route; and variations of a database, against its constraints."""

from __future__ import annotations

import itertools
import random
import sqlite3

import pytest
from agentrl_envs.sql import compare, variations
from agentrl_envs.sql.domains import DOMAINS, build
from agentrl_envs.sql.engine import Reader
from agentrl_envs.sql.text import select
from agentrl_envs.sql.verifier import _outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Task


def database(rows, columns="a, b"):
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute(f"CREATE TABLE t (id INTEGER PRIMARY KEY, {columns})")
    connection.executemany(f"INSERT INTO t ({columns}) VALUES (?, ?)", rows)
    content = connection.serialize()
    connection.close()
    return content


def same(rows, gold, answer):
    """Whether the answer is equivalent on a table t(id, a, b) of these rows."""
    reader = Reader(database(rows))
    try:
        wanted, given_rows = compare.expected(reader, gold), reader.run(answer)
    finally:
        reader.close()
    return len(given_rows.columns) == wanted.columns and any(
        compare.matches(given_rows.rows, wanted, order) for order in compare.orders(given_rows.rows, wanted)
    )


ROWS = [("x", 3), ("y", 1), ("z", 3), ("x", 2)]


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("SELECT a, b FROM t", "SELECT a, b FROM t ORDER BY b, a", True),
        ("SELECT a, b FROM t", "SELECT b, a FROM t", True),  # columns in another order
        ("SELECT a, b FROM t", "SELECT a, b, 1 FROM t", False),
        ("SELECT a FROM t", "SELECT DISTINCT a FROM t", False),  # duplicates count
        ("SELECT DISTINCT a FROM t", "SELECT a FROM t GROUP BY a", True),
        ("SELECT a, b FROM t ORDER BY b", "SELECT a, b FROM t ORDER BY b, a", True),  # ties in any order
        ("SELECT a, b FROM t ORDER BY b", "SELECT a, b FROM t ORDER BY b DESC", False),
        ("SELECT a FROM t ORDER BY b", "SELECT a FROM t ORDER BY b, id DESC", True),  # by a column that is not shown
        ("SELECT a FROM t ORDER BY b", "SELECT a FROM t ORDER BY a", False),
        ("SELECT a FROM t ORDER BY b DESC LIMIT 1", "SELECT 'x'", True),  # x and z tie for the first place
        ("SELECT a FROM t ORDER BY b DESC LIMIT 1", "SELECT 'z'", True),
        ("SELECT a FROM t ORDER BY b DESC LIMIT 1", "SELECT 'y'", False),
        ("SELECT a FROM t ORDER BY b DESC LIMIT 3", "SELECT a FROM t ORDER BY b DESC, id DESC LIMIT 3", True),
        ("SELECT a FROM t ORDER BY b DESC LIMIT 1 OFFSET 1", "SELECT 'x'", True),
        ("SELECT a FROM t ORDER BY b LIMIT 2, 1", "SELECT 'y'", False),
        ("SELECT a, sum(b) AS s FROM t GROUP BY 1 ORDER BY s", "SELECT a, sum(b) FROM t GROUP BY 1 ORDER BY 2",
         True),
        ("SELECT a FROM t GROUP BY a ORDER BY count(*) DESC LIMIT 1", "SELECT 'x'", True),
        ("SELECT a FROM t UNION SELECT 'w' ORDER BY a", "SELECT 'w' UNION SELECT a FROM t ORDER BY 1", True),
        ("SELECT a FROM t UNION SELECT 'w' ORDER BY a", "SELECT a FROM t UNION SELECT 'w' ORDER BY 1 DESC", False),
        ("SELECT a FROM t LIMIT 2", "SELECT a FROM t ORDER BY id DESC LIMIT 2", True),  # any two
        ("SELECT avg(b) FROM t", "SELECT 2.25000001", True),
        ("SELECT avg(b) FROM t", "SELECT 2.2501", False),
        ("SELECT count(*) FROM t", "SELECT 4.0", True),
        ("SELECT count(*) FROM t", "SELECT '4'", False),
        ("SELECT max(b) FROM t WHERE a = 'no'", "SELECT NULL", True),
        ("SELECT a FROM t WHERE 0", "SELECT b FROM t WHERE a = 'no'", True),
        ("SELECT a FROM t WHERE 0", "SELECT a FROM t", False),
        ("SELECT a -- the ORDER BY of a comment\nFROM t", "SELECT a FROM t ORDER BY id DESC", True),
    ],
)  # fmt: skip
def test_rules(gold, answer, equal):
    assert same(ROWS, gold, answer) is equal


rows = st.lists(st.tuples(st.sampled_from(["x", "y", None]), st.sampled_from([0, 1, 1.5, None])), max_size=5)


@settings(max_examples=80, deadline=None)
@given(rows, rows)
def test_unordered_equality_is_that_of_sorted_lists(ours, theirs):
    key = [sorted(map(repr, some)) for some in (ours, [tuple(r) for r in theirs])]
    wanted = compare.Expected(2, tuple(ours), (tuple(ours),) if ours else (), 0, frozenset())
    assert compare.matches(theirs, wanted, (0, 1)) is (key[0] == key[1])


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(0, 3), st.integers(0, 4))
def test_an_ordered_window_accepts_exactly_what_some_order_of_ties_gives(table, offset, limit):
    """Second route: sort by the key in Python, every arrangement of equal keys, cut the window."""
    gold = f"SELECT a, b FROM t ORDER BY b LIMIT {limit} OFFSET {offset}"
    reader = Reader(database(table))
    wanted = compare.expected(reader, gold)
    reader.close()
    by_key = sorted(table, key=lambda row: (row[1] is not None, row[1] or 0))
    groups = [list(g) for _, g in itertools.groupby(by_key, key=lambda row: (row[1] is not None, row[1] or 0))]
    right = {
        tuple(itertools.chain(*order))[offset : offset + limit]
        for order in itertools.product(*(itertools.permutations(group) for group in groups))
    }
    for candidate in itertools.permutations(table, min(limit, max(0, len(table) - offset))):
        assert compare.matches(candidate, wanted, (0, 1)) is (candidate in right), (candidate, right)


def test_columns_must_stand_in_the_same_order_on_every_database():
    """max and min of one row are equal, of others not: an answer that swaps them is caught there."""
    one, other = [(1, 5), (2, 5)], [(7, 9), (8, 9)]
    golds = [compare.Expected(2, tuple(r), (tuple(r),), 0, frozenset()) for r in (one, other)]
    swapped = [[(b, a) for a, b in r] for r in (one, other)]
    kept = [o for o in compare.orders(swapped[0], golds[0]) if compare.matches(swapped[0], golds[0], o)]
    assert kept == [(1, 0)] and all(compare.matches(swapped[1], golds[1], order) for order in kept)
    assert not compare.matches(other, golds[1], kept[0])


def test_parts_of_a_statement():
    parts = select(
        'SELECT a FROM t WHERE b IN (SELECT b FROM t ORDER BY b LIMIT 1) ORDER BY f(a, b) DESC, "c" LIMIT 2 OFFSET 3;'
    )
    assert parts.keys == ("f(a, b)", '"c"') and parts.limited and parts.offset == 3
    assert parts.unlimited.endswith('"c"') and parts.text[parts.insert_at :].startswith("FROM t WHERE")
    assert select("SELECT 'ORDER BY x' FROM (SELECT 1 ORDER BY 1)").keys is None
    assert select("SELECT DISTINCT a FROM t ORDER BY b").insert_at is None


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.name)
def test_a_variation_keeps_keys_references_and_unique_columns(domain):
    content = build(domain, "train", 5)
    for seed in range(4):
        varied = variations.vary(content, {domain.event, domain.parent.table, domain.item.table}, random.Random(seed))
        connection = sqlite3.connect(":memory:")
        connection.deserialize(varied)
        assert not connection.execute("PRAGMA foreign_key_check").fetchall()
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        before = sqlite3.connect(":memory:")
        before.deserialize(content)
        for table in (domain.event, domain.parent.table, domain.item.table):
            counts = [c.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for c in (before, connection)]
            assert 0 < counts[1] < counts[0]
        names = [{r[0] for r in c.execute(f"SELECT name FROM {domain.parent.table}")} for c in (before, connection)]
        assert names[1] < names[0]
        before.close()
        connection.close()
        assert varied == variations.vary(
            content, {domain.event, domain.parent.table, domain.item.table}, random.Random(seed)
        )


GOLD = "SELECT p.name, count(*) FROM customers p JOIN orders e ON e.customer_id = p.id GROUP BY p.id"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("SELECT (SELECT name FROM customers WHERE id = customer_id), count(*) FROM orders GROUP BY customer_id", True),
        ("SELECT count(*), c.name FROM customers c, orders o WHERE o.customer_id = c.id GROUP BY c.name", True),
        ("WITH n AS (SELECT customer_id i, count(id) k FROM orders GROUP BY 1) "
         "SELECT name, k FROM n JOIN customers ON id = i", True),
        ("SELECT p.name, count(e.id) FROM customers p LEFT JOIN orders e ON e.customer_id = p.id GROUP BY p.id", False),
        ("SELECT p.name, count(quantity) FROM customers p JOIN orders e ON e.customer_id = p.id GROUP BY p.id", False),
        ("SELECT p.name, sum(quantity) FROM customers p JOIN orders e ON e.customer_id = p.id GROUP BY p.id", False),
        ("SELECT p.name, count(*) FROM customers p JOIN orders e ON e.customer_id = p.id", False),
    ],
)  # fmt: skip
def test_rewritings_pass_and_near_misses_do_not(answer, right):
    task = Task(id="x", split="train", data={"gold": GOLD, "seed": "x"})
    assert _outcome(task, build(DOMAINS[0], "train", 3), answer, None)[0] is right


def test_a_duplicate_heavy_join_is_told_from_its_distinct_form():
    task = Task(id="x", split="train", data={"gold": "SELECT p.city FROM customers p", "seed": "x"})
    content = build(DOMAINS[0], "train", 3)
    assert _outcome(task, content, "SELECT city FROM customers ORDER BY id DESC", None)[0] is True
    assert _outcome(task, content, "SELECT DISTINCT city FROM customers", None)[0] is False
