"""Ghidorah's attention in two parts computes what masked attention does."""

from __future__ import annotations

import torch

from eval.units.two_parts import Parts, in_two_parts


def test_two_parts_are_one():
    query, text, tree = (torch.randn(*s, 16) for s in ((1, 2, 3), (2, 1, 2, 7), (2, 1, 2, 3)))
    mask = torch.zeros(1, 1, 3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -1e9)
    keys, values = torch.cat([text, tree], dim=3)
    whole = torch.nn.functional.pad(mask, (7, 0))
    scores = query @ keys.mT * 0.25 + whole
    found = in_two_parts(Parts(query, tuple(text), tuple(tree), mask))
    torch.testing.assert_close(found, scores.softmax(-1) @ values)
