"""A streamer that knows where tokens came from."""

import torch

from selfspec import DraftTree, StepRecord
from selfspec.cli.live_text import OWN, SEVERAL, LiveText
from selfspec.records import Evidence
from tests.tiny import make_tokenizer

LUT, CONTEXT = Evidence("lut"), Evidence("context")


def step(tokens, evidence, own):
    """A chain that was accepted whole, and the model's own token behind it."""
    tree = DraftTree.of_root(0)
    for node, (token, seen) in enumerate(zip(tokens, evidence, strict=True)):
        tree.add(node, token, 0.5, seen)
    path = list(range(len(tree)))
    return StepRecord(row=0, tree=tree, path=path, committed_ids=[*tokens, *own])


def make_live():
    tokenizer = make_tokenizer()
    shown = []
    live = LiveText(tokenizer, [], lambda piece, origin: shown.append((piece, origin)))
    live.put(torch.tensor([[9, 9]]))  # the prompt
    return live, shown, tokenizer("abcd", add_special_tokens=False)["input_ids"]


def test_tokens_wait_for_their_record():
    live, shown, (a, b, c, d) = make_live()
    live.put(torch.tensor([a]))
    assert not shown
    live.hear(step([], [], own=[a]))
    for token in (b, c, d):
        live.put(torch.tensor([token]))
    live.hear(step([b, c], [(LUT, LUT), (LUT, CONTEXT)], own=[d]))
    live.end()
    assert shown == [("a", OWN), ("b", "lut"), ("c", SEVERAL), ("d", OWN)]
