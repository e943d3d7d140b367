"""Slots of a group: on one device where one has room, on the freest first."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.rollout.places import nearby


def test_groups_of_a_light_load_go_to_different_devices():
    idle, taken = set(range(16)), []
    for _ in range(4):
        slots = nearby(idle, 2, 4)
        taken.append({slot // 4 for slot in slots})
        idle -= set(slots)
    assert taken == [{0}, {1}, {2}, {3}]


def test_a_group_goes_where_it_fits_and_else_to_the_freest_devices():
    assert nearby({0, 4, 5, 6, 8}, 3, 4) == [4, 5, 6]
    assert nearby({0, 4, 5, 8, 9, 10}, 5, 4) == [8, 9, 10, 4, 5]
    assert nearby({3}, 2, 4) == [3]


@given(st.sets(st.integers(0, 31)), st.integers(0, 32), st.integers(1, 32))
def test_only_idle_slots_are_given_each_once(idle, count, near):
    found = nearby(idle, count, near)
    assert set(found) <= idle and len(found) == len(set(found)) == min(count, len(idle))


@given(st.sets(st.integers(0, 31), min_size=1), st.data())
def test_one_device_holds_all_where_it_can(idle, data):
    most = max(sum(slot // 8 == device for slot in idle) for device in range(4))
    found = nearby(idle, data.draw(st.integers(1, most)), 8)
    assert len({slot // 8 for slot in found}) == 1
