"""How transformers names the weights of a checkpoint, for models that are read in parts.

transformers has no public function that tells these names without loading weights. This module is
imported only when a model is streamed. If transformers drops one of the names, the import fails,
and nothing is loaded wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from selfspec.errors import WeightsError


class Part(NamedTuple):
    """A tensor of a checkpoint, or one of `number` equal parts of its rows."""

    name: str
    which: int = 0
    number: int = 1


def names_in_float32(model: PreTrainedModel) -> list[str]:
    """Parts of the names of weights that stay in float32 in whatever dtype a model is loaded."""
    return list(model._get_dtype_plan(model.dtype))


def parts_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, list[Part]]:
    """The parts of stored tensors that are joined to make the weights of a model, in their order.

    Tensors that the model does not use are left out, as in transformers.
    """
    weights, mapping = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    converter_of = {pattern: step for step in converters for pattern in step.source_patterns}
    parts: dict[str, list[Part]] = {}
    groups: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
    for name in sorted(names, key=dot_natural_key):
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        if target not in weights:
            target, pattern = rename_source_key(name, [], [], prefix, weights)
        if target in weights and pattern is None:
            parts[target] = [Part(name)]
        elif target in weights:
            group = groups.setdefault(target, (converter_of[pattern], defaultdict(list)))
            group[1][pattern].append(name)
    for target, (converter, lists) in groups.items():
        parts.update(_converted(target, converter, lists))
    return parts


def _converted(
    target: str, converter: WeightConverter, group: Mapping[str, Sequence[str]]
) -> dict[str, list[Part]]:
    """The parts of the weights that a conversion in transformers makes of stored tensors."""
    steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    lists = [group[pattern] for pattern in converter.source_patterns if pattern in group]
    if steps == [(MergeModulelist, 0), (Concatenate, 1)]:
        return {target: [Part(name) for names in zip(*lists, strict=True) for name in names]}
    is_list = steps == [(MergeModulelist, 0)] and len(lists) == 1
    if is_list or steps == [(Concatenate, 0)]:
        return {target: [Part(name) for names in lists for name in names]}
    if steps == [(Chunk, 0)] and len(lists) == 1 and len(lists[0]) == 1:
        first, number = converter.target_patterns[0], len(converter.target_patterns)
        return {
            target.replace(first, name): [Part(lists[0][0], which, number)]
            for which, name in enumerate(converter.target_patterns)
        }
    raise WeightsError(
        f"{target} must lie in the files as the model holds it to be streamed (it takes "
        f"{converter.operations} to load it); load this model with from_pretrained()"
    )
