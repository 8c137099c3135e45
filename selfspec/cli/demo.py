"""`selfspec demo`: a few continuations for the eyes, then the same ones against the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from selfspec import __version__
from selfspec.cli.live import LiveText
from selfspec.cli.paint import Painter
from selfspec.cli.report import Difference, differences, explain
from selfspec.cli.snippets import Snippet
from selfspec.cli.tables import origins_table, summarise, times_table
from selfspec.cli.timing import Timed, measure, warm_up
from selfspec.cli.tree_view import best_step, draw
from selfspec.cli.writer import Writer
from selfspec.config import SpecConfig
from selfspec.records import DraftTree

__all__ = ["Demo"]


@dataclass
class Demo:
    """One showing; `run` says whether every text was the stock one."""

    writer: Writer
    config: SpecConfig
    snippets: Sequence[Snippet]
    rounds: int = 1
    console: Console = field(default_factory=lambda: Console(highlight=False))

    def __post_init__(self) -> None:
        self.painter = Painter(self.console)
        self.prompts = [self.writer.encode(snippet.prompt) for snippet in self.snippets]

    def run(self, *, with_tree: bool) -> bool:
        """Shows, times and compares."""
        warm_up(self.writer, self.prompts[0], self.config)
        self._introduce()
        shown = self._show()
        timed = self._time()
        if with_tree:
            self._draw_tree(timed)
        self._report(timed)
        return self._compare(differences(timed, shown))

    def _introduce(self) -> None:
        self._say(f"selfspec {__version__} with {self.writer.loaded}, {self.writer}")
        if self.painter.in_colour:
            self.console.print(self.painter.legend(self.writer.origins(self.config)))

    def _show(self) -> list[list[int]]:
        """Streams every snippet; one `SelfSpec` goes through all of them, as in real use."""
        spec = self.writer.new_spec(self.config)
        shown = []
        for snippet, ids in zip(self.snippets, self.prompts, strict=True):
            self.console.rule(Text(snippet.name), align="left", style="dim")
            self.painter.write(snippet.prompt, "dim")
            self.writer.reseed()
            live = LiveText(self.writer.tokenizer, ids, self.painter.show)
            output = self.writer.write(ids, spec, live=live)
            shown.append(output.sequences[0, len(ids) :].tolist())
            self.painter.show("" if live.text.endswith("\n") else "\n")
        self.console.rule(style="dim")
        if spec.stats.disabled_reason:
            self._say(f"not drafted as asked: {spec.stats.disabled_reason}")
        return shown

    def _time(self) -> list[Timed]:
        with self.console.status("timing") as status:
            return measure(
                self.writer,
                self.prompts,
                self.config,
                rounds=self.rounds,
                on_run=lambda place: status.update(f"timing: {place}"),
            )

    def _draw_tree(self, timed: Sequence[Timed]) -> None:
        record = best_step([record for runs in timed for record in runs.drafted[0].records])
        if record is None:
            self._say("No tree to draw: nothing was drafted.")
            return
        size = f"{len(record.tree) - 1} tokens drafted, {record.num_accepted} accepted"
        self._say(f"The step with the longest accepted path ({size}), each with its score:")
        self._wide_console(record.tree).print(draw(record, self.writer.tokenizer))
        self.console.print()

    def _wide_console(self, tree: DraftTree) -> Console:
        """A pipe takes lines of any length: deep nodes need not be cut off there."""
        if self.console.is_terminal:
            return self.console
        return Console(file=self.console.file, width=80 + 4 * max(tree.depths), highlight=False)

    def _report(self, timed: Sequence[Timed]) -> None:
        rows = summarise([snippet.name for snippet in self.snippets], timed)
        many = "one round" if self.rounds == 1 else f"median of {self.rounds} rounds"
        self._say(f"Times: {many}, both in turns, warmed up, nothing drawn meanwhile.")
        self.console.print(times_table(rows))
        start = "cold" if self.writer.cache is None else "with the cache"
        self._say(
            f"selfspec meets the first snippet {start} and keeps what it learns for the next.\n"
        )
        self._say("Where the tokens came from:")
        self.console.print(origins_table(rows, self.writer.origins(self.config)))

    def _compare(self, found: Sequence[Difference]) -> bool:
        total = len(self.snippets)
        if not found:
            same = f"{total} of {total} are stock generate()'s, token for token."
            self._say(f"Same text: {same}", "bold green")
        for difference in found:
            name = self.snippets[difference.snippet].name
            why = explain(self.writer, self.prompts[difference.snippet], difference)
            self._say(f"NOT the same text: {name}: {why}", "bold red")
        return not found

    def _say(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style))
