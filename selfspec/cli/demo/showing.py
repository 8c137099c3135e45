"""`selfspec demo`: shows a few continuations, then times the same ones against stock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from selfspec import __version__
from selfspec.cli.demo.differences import Difference, differences, explain
from selfspec.cli.demo.snippets import Snippet
from selfspec.cli.demo.tables import Row, origins_table, summarise, times_table
from selfspec.cli.demo.timing import Timed, measure, warm_up
from selfspec.cli.demo.tree_view import best_step, draw
from selfspec.cli.shared.live_text import LiveText
from selfspec.cli.shared.messages import working
from selfspec.cli.shared.paint import Painter
from selfspec.cli.shared.writer import Writer
from selfspec.config import SpecConfig
from selfspec.records import DraftTree


@dataclass
class Demo:
    """One showing; `run` says whether every text was stock's, as far as the promise goes."""

    writer: Writer
    config: SpecConfig
    snippets: Sequence[Snippet]
    rounds: int = 3
    console: Console = field(default_factory=lambda: Console(highlight=False))

    def __post_init__(self) -> None:
        self.painter = Painter(self.console)
        self.prompts = [self.writer.encode(snippet.prompt) for snippet in self.snippets]

    def run(self, *, with_tree: bool) -> bool:
        """Shows, times and compares; False where a text differs that must not."""
        with working("Warming up"):
            warm_up(self.writer, self.prompts[0], self.config)
        self._introduce()
        shown = self._show()
        timed = self._time()
        if with_tree:
            self._draw_tree(timed)
        self._report(timed)
        same = self._compare(differences(timed, shown))
        self._say(f"\n{self._outlook()}")
        return same

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
            shown.append(self.writer.new_ids(ids, spec, streamer=live))
            self.painter.show("" if live.text.endswith("\n") else "\n")
        self.console.rule(style="dim")
        return shown

    def _time(self) -> list[Timed]:
        with working("Timing") as update:
            return measure(
                self.writer,
                self.prompts,
                self.config,
                rounds=self.rounds,
                on_run=lambda which: update(f"Timing {which}"),
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
        """A console wide enough for deep nodes: a pipe takes lines of any length."""
        if self.console.is_terminal:
            return self.console
        return Console(file=self.console.file, width=80 + 4 * max(tree.depths), highlight=False)

    def _report(self, timed: Sequence[Timed]) -> None:
        rows = summarise([snippet.name for snippet in self.snippets], timed)
        many = "one round" if self.rounds == 1 else f"median of {self.rounds} rounds"
        self._say(f"Times: {many}, stock and selfspec in turns, nothing drawn meanwhile.")
        self.console.print(times_table(rows))
        self._warn(rows[-1])
        start = "with nothing" if self.writer.start.cache is None else "with the cache"
        self._say(
            f"selfspec starts {start} at the first snippet and learns from one to the next.\n"
        )
        self._say("Where the tokens came from:")
        self.console.print(origins_table(rows, self.writer.origins(self.config)))

    def _warn(self, total: Row) -> None:
        """Says when the times are too unsteady to be quoted."""
        if self.rounds == 1:
            self._say("One round can't show how much the times vary: more --rounds can.", "yellow")
        elif total.is_unsteady:
            self._say(
                f"The rounds differ widely ({total.spread}), so the machine is busy with other "
                "work: take the times as a rough guide, or try more --rounds.",
                "yellow",
            )

    def _compare(self, found: Sequence[Difference]) -> bool:
        total = len(self.snippets)
        explained = [self._explained(each) for each in found]
        is_same = all(is_allowed for *_, is_allowed in explained)
        if is_same:
            same = f"{total - len(found)} of {total} are stock generate()'s, token for token."
            self._say(f"Same text: {same}", "yellow" if found else "bold green")
        if found and is_same:
            self._say(
                f"In {self.writer.dtype} a wider forward rounds differently, so texts may part at "
                "near-ties:"
            )
        for name, line, is_allowed in explained:
            if is_allowed:
                self._say(f"  {name}: {line}")
            else:
                self._say(f"NOT the same text: {name}: {line}", "bold red")
        return is_same

    def _explained(self, difference: Difference) -> tuple[str, str, bool]:
        """The snippet, a line on where it differs, and whether that is allowed."""
        index = difference.snippet
        return self.snippets[index].name, *explain(self.writer, self.prompts[index], difference)

    def _outlook(self) -> str:
        """What all this means for a model of the reader's own, and the command that says it."""
        if self.writer.loaded.is_embedded:
            return (
                "This tiny model only shows the way; a trained one gains most where its text "
                "repeats the prompt or itself, and nothing where nobody can guess it: measure "
                "yours in a minute with 'selfspec check your/model'."
            )
        return (
            "Other texts gain more or less than these: 'selfspec check' measures several kinds in "
            "a minute."
        )

    def _say(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style))
