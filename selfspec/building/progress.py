"""Shows how far a build is, how fast it goes, and how long it will take."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Rate(ProgressColumn):
    """A column with the number of tokens so far, and of tokens a second."""

    def render(self, task: Task) -> Text:
        tokens, rate = task.fields["tokens"], 0.0
        if task.elapsed:
            rate = (tokens - task.fields["tokens_before"]) / task.elapsed
        return Text(f"{_short(tokens)} tokens {_short(rate)}/s" if tokens else "", no_wrap=True)


def _short(number: float) -> str:
    """A number in four characters or so.

    >>> _short(47_102_986), _short(950), _short(15_400)
    ('47M', '950', '15k')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return (
                f"{number / size:.3g}{unit}" if number < 10 * size else f"{number / size:.0f}{unit}"
            )
    return f"{number:.0f}"


class Bar:
    """The bar of one stage."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: int, tokens: int = 0) -> None:
        """Adds to what is done, and to the number of tokens."""
        before = self._progress.tasks[self._task].fields["tokens"]
        self._progress.update(self._task, advance=amount, tokens=before + tokens)

    def end(self) -> None:
        """Fills the bar: the stage is done, however much there was to do."""
        done = max(self._progress.tasks[self._task].completed, 1)
        self._progress.update(self._task, completed=done, total=done)
        self._progress.stop_task(self._task)


class Bars:
    """The bars of a build, one below the other."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=14),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._progress.live.is_started:  # Otherwise this would print an empty line.
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, highlight=False)

    def stage(self, title: str, total: int | None, *, done: int = 0, tokens: int = 0) -> Bar:
        """A bar for one stage; `total` is None as long as nobody knows it.

        Without a terminal the stage is named at once, and the bars are printed at the end.
        """
        if not self._progress.console.is_interactive:
            self.say(f"{title} ...")
        self._progress.start()
        task = self._progress.add_task(
            title, total=total, completed=done, tokens=tokens, tokens_before=tokens
        )
        return Bar(self._progress, task)
