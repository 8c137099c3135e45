"""Draws a draft tree: what was guessed, what was right, and the model's own token after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from selfspec.cli.shared.live_text import origin_of
from selfspec.cli.shared.paint import style_of
from selfspec.records import DraftTree, StepRecord, sources_of

_ACCEPTED = "bold"
_REJECTED = "dim"


def best_step(records: Sequence[StepRecord]) -> StepRecord | None:
    """The step with the longest accepted path; None if nothing was drafted."""
    drafted = [record for record in records if len(record.tree) > 1]
    return max(drafted, key=lambda record: record.num_accepted, default=None)


def readable(tokenizer: Any, token_id: int) -> str:
    """A token as a Python string literal, or the vocabulary's name of a part of a character.

    So a newline is shown as '\\\\n' and a space in front of a word stays visible.
    """
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    if not text or "\ufffd" in text:
        return f"<{tokenizer.convert_ids_to_tokens(token_id)}>"
    return repr(text)


def draw(record: StepRecord, tokenizer: Any) -> Tree:
    """The tree below the last committed token, the accepted path marked."""
    accepted = record.accepted_nodes()
    root = Tree(readable(tokenizer, record.tree.tokens[0]), highlight=False, guide_style="dim")
    branches = [root]
    for node in range(1, len(record.tree)):
        label = _label(record.tree, node, tokenizer, accepted=node in accepted)
        branches.append(branches[record.tree.parents[node]].add(label))
    if record.num_accepted < len(record.committed_ids):
        last = branches[accepted[-1] if accepted else 0]
        own = readable(tokenizer, record.committed_ids[-1])
        note = ("  the model's own next", "dim")
        last.add(Text.assemble("=> ", (own, "bold underline"), note, no_wrap=True))
    return root


def _label(tree: DraftTree, node: int, tokenizer: Any, *, accepted: bool) -> Text:
    evidence = tree.evidence[node]
    colour = style_of(origin_of(evidence))
    sources = "+".join(sorted(set(sources_of(evidence))))
    token = readable(tokenizer, tree.tokens[node])
    return Text.assemble(
        ("✓ " if accepted else "  ", _ACCEPTED),
        (token, f"{_ACCEPTED} {colour}" if accepted else _REJECTED),
        (f"  {tree.scores[node]:.2f} {sources}", _REJECTED),
        no_wrap=True,
    )
