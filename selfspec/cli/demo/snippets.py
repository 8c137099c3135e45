"""The prompts of the demo, in the style of Python's standard library."""

from __future__ import annotations

from typing import NamedTuple

from selfspec.cli.shared.options import ModelOptions, Sampling


class Snippet(NamedTuple):
    """A prompt and what to call it."""

    name: str
    prompt: str


# Each ends in the middle of a line, and of something that Python's library often says. The
# embedded model makes sense of these, and for fifty tokens or so.
SNIPPETS = (
    Snippet(
        "comparison",
        """    def __lt__(self, other):
        if not isinstance(other, Date):
            return NotImplemented
        return self.value < other.value

    def __le__(self, other):
        if not""",
    ),
    Snippet(
        "visitor",
        """    def visit_Name(self, node):
        self.write(node.id)

    def visit_Constant(self, node):""",
    ),
    Snippet(
        "options",
        """def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('-v', '--verbose', action='store_true',
                        help='print more')
    parser.add_argument('-q', '--quiet',""",
    ),
)


def named(prompts: list[str]) -> tuple[Snippet, ...]:
    """The user's prompts, each named by the start of its first line, or else the demo's."""
    own = (Snippet(_short(prompt.strip()), prompt) for prompt in prompts)
    return tuple(own) if prompts else SNIPPETS


def sampling_of(loading: ModelOptions, asked: Sampling) -> Sampling:
    """How the demo chooses tokens: if nothing is asked of the embedded model, at random.

    With the likeliest token alone, so small a model soon says the same line over and over.
    """
    is_asked = asked != Sampling()
    return asked if is_asked or loading.model else Sampling(temperature=0.5, seed=1)


def _short(text: str, width: int = 20) -> str:
    line = text.split("\n")[0]
    return line if len(line) <= width else line[: width - 1] + "…"
