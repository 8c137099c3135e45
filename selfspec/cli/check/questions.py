"""What `selfspec check` and `selfspec demo` ask: prompts of their own, or the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from selfspec.cli.shared.text_files import read_prompts

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


class Question(NamedTuple):
    """What is asked, what kind of work it is, and the answer that somebody might expect."""

    kind: str
    prompt: Any  # a text, messages, or a tuple with one question
    prediction: str | None = None


# What the embedded model continues. Each ends in the middle of something that Python's library
# often says, and the model makes sense of it for fifty tokens or so.
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


def own_questions() -> list[Question]:
    """One of each kind."""
    return [
        Question(
            "edit, with prediction=",
            (f"Rename the argument items to goods, and change nothing else:\n\n{_CODE}",),
            _CODE.replace("items", "goods"),
        ),
        Question("summary", (f"Summarize this text in three sentences:\n\n{_PASSAGE}",)),
        Question(
            "question about a text",
            (f"{_PASSAGE}\n\nWhy did the fishermen have to sail so far? Quote the sentences.",),
        ),
        Question("code", ("Write a Python class for a queue with put, get, peek and len.",)),
        Question("chat", ("What should I pack for a week of walking in the mountains?",)),
    ]


def questions_of(path: Path | None) -> list[Question]:
    """Those of the file, each named by its line; our own where there is no file."""
    if path is None:
        return own_questions()
    prompts = read_prompts(path, "--prompts")
    return [Question(f"prompt {number}", each) for number, each in enumerate(prompts, start=1)]
