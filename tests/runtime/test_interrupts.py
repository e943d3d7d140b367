"""Signals wait for a safe point, once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from agentrl_jax.runtime.interrupts import Interrupted, Interrupts


@pytest.fixture(autouse=True)
def python_handlers() -> Iterator[None]:
    """The handlers of a program in the foreground, whatever the test runner was started with."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_for_a_check(number: int) -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        os.kill(os.getpid(), number)
        with pytest.raises(Interrupted) as caught:
            interrupts.check()
    assert caught.value.number == number and isinstance(caught.value, KeyboardInterrupt)


def test_the_second_signal_does_not_wait() -> None:
    with Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_come_back_as_they_were() -> None:
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_the_process_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.check()


def test_another_thread_leaves_the_handlers_alone() -> None:
    def work() -> None:
        with Interrupts() as interrupts:
            interrupts.check()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
