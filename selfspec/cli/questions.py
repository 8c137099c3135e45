"""What `selfspec check` and `selfspec demo` ask: prompts of their own, or the user's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.cli.prompt_files import read_prompts
from selfspec.serving.encoder import Encoded
from selfspec.serving.images import has_images
from selfspec.serving.schema import Settings

if TYPE_CHECKING:
    from selfspec.cli.loading import Loaded

_PASSAGE = """\
The harbour of Lindal was built twice. The first quay, of oak, was finished in 1871 and lasted for \
eleven winters, until ice broke it from below. The second one, of granite from the quarry at Sorn, \
took nine years and cost three times as much as the town had set aside. To pay for it, the council \
sold the right to fish in the bay to a company from the capital, and for forty years the fishermen \
of Lindal had to sail beyond the islands for their catch. The granite quay still stands. In 1923 \
the town bought its fishing rights back, and since then the first herring of every spring has been \
given away on the quay, free of charge, to whoever comes with a basket."""

_CODE = """\
def total_price(items, tax):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        if item["discount"]:
            price = price - price * item["discount"]
        total = total + price
    return total + total * tax
"""

_QUESTIONS = {
    "edit": f"Rename the argument items to goods, and change nothing else:\n\n{_CODE}",
    "summary": f"Summarize this text in three sentences:\n\n{_PASSAGE}",
    "question": f"{_PASSAGE}\n\nWhy did the fishermen have to sail so far? Quote the sentences.",
    "code": "Write a Python class for a queue with put, get, peek and len.",
    "chat": "What should I pack for a week of walking in the mountains?",
}


class Question(NamedTuple):
    name: str
    prompt: Any  # A text, or messages.
    is_turn: bool = False  # Is the text what a user would say to a model that can chat?

    @property
    def has_images(self) -> bool:
        return has_images(self.prompt)

    def encoded(self, loaded: Loaded) -> Encoded:
        prompt = self.prompt
        if self.is_turn and loaded.tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}]
        return loaded.encoder().encoded(prompt, Settings())


# What the embedded model continues. Each ends in the middle of something that is frequent in
# Python's library, and what the model adds makes sense for about fifty tokens.
SNIPPETS = (
    Question(
        "comparison",
        """    def __lt__(self, other):
        if not isinstance(other, Date):
            return NotImplemented
        return self.value < other.value

    def __le__(self, other):
        if not""",
    ),
    Question(
        "visitor",
        """    def visit_Name(self, node):
        self.write(node.id)

    def visit_Constant(self, node):""",
    ),
    Question(
        "options",
        """def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('-v', '--verbose', action='store_true',
                        help='print more')
    parser.add_argument('-q', '--quiet',""",
    ),
)


def questions_of(path: Path | None) -> list[Question]:
    """Those of the file, each named by its line. Without a file, one of each kind of work."""
    if path is None:
        return [Question(name, text, is_turn=True) for name, text in _QUESTIONS.items()]
    lines = read_prompts(path, "--prompts")
    return [Question(f"prompt {line.number}", line.prompt) for line in lines]
