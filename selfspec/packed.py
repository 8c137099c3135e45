"""Products over weights that lie as this CPU's math library wants them, *packed*.

Projections of one input, as those to queries, keys and values are, may lie in one copy, one behind
the other: what is asked of the first is then answered for the others, too. Knows `nn.Linear` and
what such projections are called; not who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.settled import Part, counts_alone, settle

__all__ = [
    "HALVES",
    "TYPICAL",
    "Copy",
    "Group",
    "Joint",
    "Packed",
    "Way",
    "groups_of",
    "pack",
    "packed_bytes",
    "packed_dtype",
    "packed_ways",
    "settles",
]

HALVES = (torch.bfloat16, torch.float16)
TYPICAL = 8  # tokens, which weights are packed and tried for
_OF_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Group = tuple[nn.Linear, ...]  # those that share a copy


class Copy(NamedTuple):
    """The weights of a group, one behind the other, as only `Packed` and `Joint` can read them."""

    weights: torch.Tensor
    lengths: torch.Tensor | None  # of the rows as vectors, where sums can be settled by them


def groups_of(parents: Iterable[nn.Module], modules: Collection[nn.Linear]) -> list[Group]:
    """The modules, in groups of one input where their names below `parents` and shapes allow it."""
    groups = list(_groups_by_name(parents, modules))
    grouped = {module for group in groups for module in group}
    return groups + [(module,) for module in modules if module not in grouped]


def _groups_by_name(
    parents: Iterable[nn.Module], modules: Collection[nn.Linear]
) -> Iterator[Group]:
    for parent in parents:
        children = parent._modules
        for names in _OF_ONE_INPUT:
            if names[0] not in children:  # as in most: a call looks at each
                continue
            named = [children.get(name) for name in names]
            group = [m for m in named if isinstance(m, nn.Linear) and m in modules]
            if len(group) == len(names) and len(set(map(_kind, group))) == 1:
                yield tuple(group)


def _kind(module: nn.Linear) -> Hashable:
    return module.in_features, module.weight.dtype, module.bias is None


def pack(weights: Sequence[torch.Tensor]) -> Copy:
    """One copy of them. Raises `RuntimeError` where there is no such thing."""
    whole = (torch.cat(list(weights)) if len(weights) > 1 else weights[0]).detach()
    lengths = None
    if settles(whole.dtype):
        lengths = torch.linalg.vector_norm(whole, dim=-1, dtype=torch.float32)
    return Copy(_reordered(whole.to(packed_dtype(whole.dtype))), lengths)


def packed_bytes(group: Group) -> int:
    """What the copy of a group's weights takes, or a little more."""
    return sum(m.weight.numel() * packed_dtype(m.weight.dtype).itemsize for m in group)


@cache
def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of copies of such weights: wider than half precision where a CPU can't calculate in it.

    There a product takes its time for each token, and in float32 nearly the same for some as for
    one.
    """
    if dtype not in HALVES:
        return dtype
    tiny = torch.ones(TYPICAL, TYPICAL, dtype=dtype, device="cpu")
    try:
        _product(tiny, _reordered(tiny), None)
    except RuntimeError:
        return torch.float32
    return dtype


def settles(dtype: torch.dtype) -> bool:
    """Can products of such weights, worked out in float32, be settled to stock's own bits?"""
    return packed_dtype(dtype) is not dtype and counts_alone(dtype)


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL)  # type: ignore[no-any-return]
    except (AttributeError, NotImplementedError) as error:
        raise RuntimeError("this build of torch packs no weights") from error


class Packed:
    """`linear` over a packed copy of its weight. Nothing is kept for gradients.

    `settled`: to stock's own bits, where the copy allows it.
    """

    def __init__(self, copy: Copy, dtype: torch.dtype, *, settled: bool = False) -> None:
        self._weights = copy.weights
        self._lengths = copy.lengths if settled else None
        self._dtype = dtype

    def takes(self, x: torch.Tensor) -> bool:
        """False for the dtypes that `linear` converts, and the copy does not."""
        return x.dtype is self._dtype and not torch.is_autocast_enabled("cpu")

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As `linear`."""
        if not self.takes(x):
            return linear(x, weight, bias)
        return self.outcome(x, bias, [Part(weight.detach(), bias)])

    def outcome(
        self, x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[Part]
    ) -> torch.Tensor:
        """That of all weights in the copy, which are those of the parts; `bias` are theirs."""
        wide = x.to(self._weights.dtype)
        if self._lengths is None:
            bias = None if bias is None else bias.to(wide.dtype)
            return _product(wide, self._weights, bias).to(self._dtype)
        sums = _product(wide, self._weights, None)
        tokens = x.reshape(-1, x.shape[-1])
        return settle(sums.view(len(tokens), -1), tokens, parts, self._lengths).view(sums.shape)


def _product(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weights, bias, "none", [], "")  # type: ignore[no-any-return]


class _Answers(NamedTuple):
    """What a group's projections make of one input."""

    x: torch.Tensor
    version: int  # of the input, which may be written to
    outcomes: Sequence[torch.Tensor]

    def are_for(self, x: torch.Tensor) -> bool:
        return self.x is x and self.version == _version(x)


class Joint:
    """The `linear` of each of a group, over a copy of all their weights.

    The first one asked for an input is answered with the others. Who comes with another input, or
    when its answer is gone, is answered by `linear` itself.
    """

    def __init__(self, copy: Copy, group: Group, *, settled: bool = False) -> None:
        biases = [module.bias.detach() for module in group if module.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._packed = Packed(copy, group[0].weight.dtype, settled=settled)
        self._group = group
        self._sizes = [module.out_features for module in group]
        self._answers: _Answers | None = None  # taken and left whole: others may be inside, too

    def way(self, place: int) -> Way:
        """That of one of the group."""
        return partial(self._answer, place)

    def _answer(
        self, place: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not self._packed.takes(x):
            return linear(x, weight, bias)
        answers = self._ask(x) if place == 0 else self._answers
        if answers is None or not answers.are_for(x):
            return linear(x, weight, bias)
        if place == len(self._sizes) - 1:
            self._answers = None
        return answers.outcomes[place].contiguous()

    def _ask(self, x: torch.Tensor) -> _Answers:
        parts = [Part(module.weight.detach(), module.bias) for module in self._group]
        outcomes = torch.split(self._packed.outcome(x, self._bias, parts), self._sizes, dim=-1)
        answers = self._answers = _Answers(x, _version(x), outcomes)
        return answers


def _version(x: torch.Tensor) -> int:
    """How often it was written to; torch does not count that in inference mode."""
    return -1 if x.is_inference() else x._version


def packed_ways(copies: Mapping[Group, Copy], *, settled: bool = False) -> dict[nn.Linear, Way]:
    """How each module uses the copy that it has; `settled` as `Packed`."""
    ways: dict[nn.Linear, Way] = {}
    for group, copy in copies.items():
        if len(group) == 1:
            ways[group[0]] = Packed(copy, group[0].weight.dtype, settled=settled)
            continue
        joint = Joint(copy, group, settled=settled)
        ways.update((module, joint.way(place)) for place, module in enumerate(group))
    return ways
