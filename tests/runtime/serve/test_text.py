"""However a turn comes in pieces, what is sent is the same text, cut at the same place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.runtime.serve.pump import Piece
from agentrl_jax.runtime.serve.text import Cutter


def decode(ids):
    return bytes(ids).decode("utf-8", "replace")


def feed(cutter, ids, sizes, stop="stop"):
    deltas, at = [], 0
    sizes = [*sizes, len(ids) or 1]
    while not (deltas and deltas[-1].finish):
        part = tuple(ids[at : at + sizes[0]])
        at, sizes = at + len(part), sizes[1:] or [len(ids)]
        marks = tuple(float(-i) for i in range(len(part)))
        deltas.append(cutter.take(Piece(part, marks, (0,) * len(part), stop if at == len(ids) else None)))
    return deltas


texts = st.text(st.sampled_from("abé漢🙂 "), max_size=24)
sizes = st.lists(st.integers(1, 5), min_size=30, max_size=30)


@given(texts, sizes, st.lists(st.sampled_from(["ab", "b é", "漢", "🙂a", "aba"]), max_size=2), st.booleans())
def test_pieces_add_up_to_the_text_before_the_first_stop(text, sizes, stops, live):
    ids = list(text.encode())
    deltas = feed(Cutter(decode, stops, live=live), ids, sizes)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = min(ends, default=None)  # the stop that is complete first ends the turn
    expected, count = text, len(ids)
    if first is not None:
        heard = text[:first]
        expected = heard[: min(heard.find(stop) for stop in stops if stop in heard)]
        count = len(heard.encode())
    assert "".join(delta.text for delta in deltas) == expected
    assert [index for delta in deltas for index in delta.ids] == ids[:count]
    assert all(len(d.ids) == len(d.logprobs) == len(d.versions) for d in deltas)
    if live:
        assert all("�" not in delta.text for delta in deltas)


def test_bytes_that_never_become_a_character_come_with_the_end():
    deltas = feed(Cutter(decode), [97, 0xE6, 0xBC], [1, 1, 1], stop="length")
    assert [delta.text for delta in deltas] == ["a", "", "�"] and deltas[-1].finish == "length"


@pytest.mark.parametrize("sizes", [[1] * 9, [2] * 9, [9]])
def test_a_stop_id_is_the_last_id(sizes):
    deltas = feed(Cutter(decode, stop_ids=[99]), [97, 98, 99, 100], sizes)
    assert [index for delta in deltas for index in delta.ids] == [97, 98, 99] and deltas[-1].finish == "stop"
