"""Attention over drafts in two parts: the committed text, and the tree behind it.

Every node sees the whole committed text, so this part needs no mask, and torch's fast kernel
computes it for all nodes at once. The tree has few keys, which a small product asks under the mask
of ancestors. The two are joined by their log-sum-exp: beside the tree's keys, the committed text
is one more key. Its score is its log-sum-exp, and its value is what the first part gave.

Knows tensors and clocks; not models, nor when a mask leaves the committed text open.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping
from time import perf_counter
from typing import NamedTuple

import torch

from selfspec.compat.kernels import attention_and_sums

__all__ = ["Parts", "Splits", "TwoParts", "in_two_parts"]

_PAYS = 0.9  # Two parts are chosen only if they cut the time by at least 10 %.
_ROUNDS = 3
_REPEATS = 4  # On CUDA, this many at once show more than the time to launch one.
_LEAST_COLUMNS = 512  # Behind a shorter text, attention is a small part of a forward.
_SAME = 0.02  # Rounding is far below this share of an outcome's length, a wrong kernel above it.

_log = logging.getLogger("selfspec")
_Way = Callable[[], torch.Tensor]


class Parts(NamedTuple):
    """What one layer asks; heads that share keys are joined into one with more queries."""

    query: torch.Tensor  # (B, H, N, D)
    key: torch.Tensor  # (B, H, columns, D)
    value: torch.Tensor
    mask: torch.Tensor  # (B, 1, N, nodes): additive, over the last columns; the others are open
    scale: float

    @property
    def num_open(self) -> int:
        """How many columns every query sees."""
        return self.key.shape[2] - self.mask.shape[-1]


class TwoParts:
    """Tells for each kind of attention whether two parts are faster. Safe to use from threads."""

    def __init__(self) -> None:
        self._pays: dict[Hashable, bool] = {}

    def pay(
        self, query: torch.Tensor, key: torch.Tensor, num_open: int, split: _Way, whole: _Way
    ) -> bool:
        """Whether `split` takes at most 90 % of the time of `whole`, and gives the same.

        Both ways are run the first time that a kind comes, which takes as long as some thirty
        layers' attention.
        """
        if num_open < _LEAST_COLUMNS:
            return False
        kind = _kind(query, key)
        if kind not in self._pays:
            share = _share_of_time(split, whole, query.device)
            self._pays[kind] = share <= _PAYS
            at = (query.shape[2], num_open)
            _log.info(
                "attention of %d nodes behind %d tokens: in two parts %.2f of the time", *at, share
            )
        return self._pays[kind]


class Splits(NamedTuple):
    """What a forward needs: its masks that hide nothing of the committed text."""

    two_parts: TwoParts
    num_open: Mapping[int, int]  # by the id of a mask: how many columns every query sees


def in_two_parts(parts: Parts) -> torch.Tensor:
    """The outcome (B, H, N, D); equal to that of masked attention, except for rounding."""
    front = parts.num_open
    text, score = attention_and_sums(
        parts.query, parts.key[:, :, :front], parts.value[:, :, :front], parts.scale
    )
    # In half precision a rounded score would be off by more than torch's own kernels are.
    nodes = parts.query.float() @ parts.key[:, :, front:].float().mT
    scores = torch.cat([nodes * parts.scale + parts.mask, score[..., None]], dim=-1)
    weights = scores.softmax(dim=-1)
    tree = weights[..., :-1] @ parts.value[:, :, front:].float()
    return torch.addcmul(tree, text.float(), weights[..., -1:]).to(parts.query.dtype)


def _kind(query: torch.Tensor, key: torch.Tensor) -> Hashable:
    """What the faster way depends on: all shapes, with those that grow taken by doublings."""
    (rows, heads, width, dim), (_, shared, columns, _) = query.shape, key.shape
    sizes = (rows, heads, shared, dim, width.bit_length(), columns.bit_length())
    return query.device, query.dtype, sizes, torch.get_num_threads()


def _share_of_time(split: _Way, whole: _Way, device: torch.device) -> float:
    """A short trial on a real layer; infinite if two parts can't be had, or are not the same."""
    try:
        found, expected = split().float(), whole().float()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return math.inf
    difference = torch.linalg.vector_norm(found - expected)
    if not difference <= _SAME * torch.linalg.vector_norm(expected):
        return math.inf
    rounds = [(_seconds(split, device), _seconds(whole, device)) for _ in range(_ROUNDS)]
    return min(ours for ours, _ in rounds) / min(others for _, others in rounds)


def _seconds(way: _Way, device: torch.device) -> float:
    _wait_for(device)
    start = perf_counter()
    for _ in range(_REPEATS):
        way()
    _wait_for(device)
    return perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
