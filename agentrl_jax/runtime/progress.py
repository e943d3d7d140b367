"""What the terminal shows while a run works: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT = 20  # steps that the speed is averaged over


class Progress:
    """Shows the stage, step i of n, success, reward, tokens per second and time left.

        with Progress("quickstart") as progress:
            progress.stage("rl", total=45)
            progress.update(3, success=0.4, reward=0.5, tokens_per_s=2100)
            progress.note("held-out success 41 %")

    On a terminal it redraws in place; elsewhere it prints a line at most every `interval_s` seconds (the first and
    the last step of a stage always). `quiet` shows nothing.
    """

    def __init__(
        self,
        title: str,
        *,
        quiet: bool = False,
        file: TextIO | None = None,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(file=file, quiet=quiet, highlight=False)
        self._title, self._interval_s, self._clock = title, interval_s, clock
        self._started, self._printed = clock(), float("-inf")
        self._stages: list[_Stage] = []
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def stage(self, name: str, total: int, done: int = 0) -> None:
        """Begins a stage of `total` steps; `done` of them lie behind us when a run resumes."""
        self._stages.append(_Stage(name, total, done, self._clock()))
        self._printed = float("-inf")

    def update(self, step: int, **numbers: float | None) -> None:
        """Step `step` (counted from 1) of the current stage is done. `numbers` are shown by name; None is left out."""
        stage = self._stages[-1]
        stage.advance(step, numbers, self._clock())
        due = self._clock() - self._printed >= self._interval_s or step >= stage.total
        if self._live is None and due:
            self._printed = self._clock()
            self._console.print(stage.line(), soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a checkpoint, a warning."""
        stage = self._stages[-1].name if self._stages else self._title
        self._console.print(f"{stage:>4}  {text}", soft_wrap=True, markup=False)

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for stage in self._stages:
            table.add_row(*stage.row(self._clock()))
        head = Text.assemble((self._title, "bold"), (f"   {duration(self._clock() - self._started)}", "dim"))
        numbers = self._stages[-1].numbers_text() if self._stages else Text()
        return Group(head, table, numbers)


class _Stage:
    """One stage's position, speed and recent numbers."""

    def __init__(self, name: str, total: int, done: int, now: float) -> None:
        self.name, self.total, self.step, self.begun = name, total, done, now
        self.numbers: dict[str, deque[float]] = {}
        self.marks: deque[tuple[float, int]] = deque([(now, done)], maxlen=_RECENT + 1)
        self.ended: float | None = now if done >= total else None

    def advance(self, step: int, numbers: dict[str, float | None], now: float) -> None:
        self.step = step
        self.marks.append((now, step))
        if step >= self.total:
            self.ended = now
        for name, value in numbers.items():
            if value is not None:
                self.numbers.setdefault(name, deque(maxlen=32)).append(float(value))

    def left_s(self) -> float | None:
        (first, first_step), (last, last_step) = self.marks[0], self.marks[-1]
        if last_step <= first_step:
            return None
        return (last - first) / (last_step - first_step) * (self.total - self.step)

    def line(self) -> str:
        left = self.left_s()
        numbers = "  ".join(f"{words(name)} {number(name, series[-1])}" for name, series in self.numbers.items())
        tail = f"  {duration(left)} left" if left is not None and self.step < self.total else ""
        return f"{self.name:>4}  step {self.step}/{self.total}  {numbers}{tail}"

    def row(self, now: float) -> tuple[RenderableType, ...]:
        over, left = self.ended is not None, self.left_s()
        mark = Text("✓" if over else "▸", "green" if over else "cyan")
        bar = ProgressBar(total=max(self.total, 1), completed=self.step, width=32, finished_style="green")
        spent = duration((self.ended if self.ended is not None else now) - self.begun)
        rest = "" if over else (f"{duration(left)} left" if left is not None else "…")
        return mark, Text(self.name, "bold"), bar, Text(f"{self.step}/{self.total}"), Text(spent, "dim"), Text(rest)

    def numbers_text(self) -> Text:
        text = Text()
        for name, series in self.numbers.items():
            text.append(f"  {words(name)} ", "dim")
            text.append(number(name, series[-1]), "bold")
            text.append(f" {sparkline(list(series)[-12:])}", "cyan")
        return text


def words(name: str) -> str:
    return {"tokens_per_s": "tokens/s"}.get(name, name.replace("_", " "))


def number(name: str, value: float) -> str:
    """A number as wide as it deserves: rates in percent, counts in full, the rest in three figures."""
    if value != value:
        return "nan"
    if name in ("success", "held_out") or name.endswith("_rate"):
        return f"{100 * value:.1f} %"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: list[float]) -> str:
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if len(finite) < 2 or max(finite) == min(finite):
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_BLOCKS[round((v - low) / span * (len(_BLOCKS) - 1))] for v in finite)
