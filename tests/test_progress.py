"""The progress line with the remaining time, read through a pseudo-terminal."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pty
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lazyscope import progress
from lazyscope.progress import Bar, quiet, track

Screen = Callable[[], str]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """Show bars without delay on a terminal. The first call replaces stderr by one, and the second reads the screen.

    The fixture cannot replace stderr, as pytest restores it before the test.
    """
    master, slave = pty.openpty()
    monkeypatch.setattr(progress, "DELAY", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    with os.fdopen(slave, "w") as terminal:

        def call() -> str:
            if sys.stderr is not terminal:
                monkeypatch.setattr(sys, "stderr", terminal)
                return ""
            terminal.write("[end]")
            terminal.flush()
            text = ""
            while not text.endswith("[end]"):
                text += os.read(master, 1 << 16).decode()
            return text.removesuffix("[end]")

        yield call
        monkeypatch.undo()
    os.close(master)


def wait_for(bar: Bar) -> None:
    for _ in range(500):
        if bar.shown:
            return
        time.sleep(0.01)
    raise AssertionError("the bar was not shown")


def test_a_line_with_percentage_and_time_left_which_is_cleared(screen: Screen) -> None:
    screen()
    with Bar("tangent kernel", total=4) as bar:
        bar.advance()
        wait_for(bar)
        time.sleep(0.3)
    text = screen()
    assert "tangent kernel" in text
    assert " 25%" in text
    assert " left" in text
    assert text.endswith("\x1b[2K")  # the line is erased
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # and the cursor is at the start


def test_nothing_in_the_first_seconds(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen()
    monkeypatch.setattr(progress, "DELAY", 60.0)
    with Bar("tangent kernel", total=4) as bar:
        bar.advance(4)
    assert screen() == ""
    assert progress.DELAY == 60.0


def test_only_the_outermost_bar_is_shown(screen: Screen) -> None:
    screen()
    with Bar("outer", total=2) as outer:
        wait_for(outer)
        with Bar("inner", total=2) as inner:
            time.sleep(0.3)
            assert not inner.shown
    text = screen()
    assert "outer" in text
    assert "inner" not in text


def test_an_error_clears_the_line_and_the_next_bar_is_shown(screen: Screen) -> None:
    screen()
    with contextlib.suppress(KeyboardInterrupt), Bar("first") as bar:
        wait_for(bar)
        raise KeyboardInterrupt
    assert not bar.shown
    with Bar("second") as bar:
        wait_for(bar)
    assert "second" in screen()


def _silently() -> None:
    with Bar("unseen", total=1) as bar:
        time.sleep(0.2)
        assert not bar.shown


def test_quiet_and_the_variable_and_other_threads(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen()
    with quiet():
        _silently()
    thread = threading.Thread(target=_silently)
    thread.start()
    thread.join()
    monkeypatch.setenv(progress.VARIABLE, "1")
    _silently()
    monkeypatch.setenv(progress.VARIABLE, "0")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())  # as in a worker process
    _silently()
    assert screen() == ""


def test_nothing_where_stderr_is_not_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.01)
    _silently()
    assert capfd.readouterr() == ("", "")


def test_words() -> None:
    bar = Bar("spectrum", total=10)
    assert bar.words(3.0) == "0:03 so far"
    bar.reach(2)
    assert bar.words(30.0) == " 20%  2:00 left"
    bar.reach(11)
    assert bar.words(30.0) == "100%  0:00 left"
    assert Bar("spectrum").words(3725.0) == "1:02:05 so far"


def test_track_goes_through_all_items() -> None:
    assert list(track(range(3), "items")) == [0, 1, 2]
    assert list(track((i for i in range(3)), "items", total=3)) == [0, 1, 2]


def test_a_bar_costs_next_to_nothing() -> None:
    with Bar("loop", total=10**4) as bar:
        began = time.perf_counter()
        for _ in range(10**4):
            bar.advance()
        assert time.perf_counter() - began < 1  # 0.1 μs each, mostly the run-time type checks of the tests
    assert bar.done == 10**4
