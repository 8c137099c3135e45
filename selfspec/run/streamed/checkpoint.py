"""Which bytes of a checkpoint's files belong to which weight of a model.

Names are translated as transformers does it, so that a checkpoint whose tensors are merged or cut
when it is loaded is read straight from its files too. Knows models and files; reads no weights.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from selfspec.compat.checkpoints import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    find_file,
    get_model_conversion_mapping,
    rename_source_key,
)
from selfspec.errors import WeightsError
from selfspec.run.streamed.files import Shard, StoredTensor

__all__ = ["Piece", "find_files", "open_shards", "pieces_of"]

_Groups = dict[str, list[StoredTensor]]  # the stored tensors by the pattern that names them


class Piece(NamedTuple):
    """A stored tensor, and the index of the weight's element at which it begins."""

    stored: StoredTensor
    start: int


def find_files(name: str) -> list[Path]:
    """The safetensors files of a folder or of a repository on the Hub, downloaded if need be."""
    index = find_file(name, SAFE_WEIGHTS_INDEX_NAME)
    if index is not None:
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{index} must name the files of the weights (got {error!r:.200}); download the "
                "model again"
            ) from error
        return [_required(name, shard) for shard in sorted(shards)]
    file = find_file(name, SAFE_WEIGHTS_NAME)
    if file is not None:
        return [file]
    for old in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if find_file(name, old) is not None:
            raise WeightsError(
                f"weights must be in safetensors files to be streamed (got {old} in {name!r}); "
                "load the model with from_pretrained() once, and save it with save_pretrained()"
            )
    raise WeightsError(f"{name!r} must hold {SAFE_WEIGHTS_NAME} (got none); name another model")


def open_shards(paths: Iterable[Path]) -> list[Shard]:
    """All files, opened; if one of them can't be used, none stays open."""
    shards: list[Shard] = []
    try:
        for path in paths:
            shards.append(Shard(path))
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return shards


def pieces_of(model: Any, shards: Iterable[Shard]) -> dict[str, list[Piece]]:
    """The pieces of each weight of the model that the files hold.

    What the model has no use for is left out, as transformers does it.
    """
    stored = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    weights, mapping = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    pieces: dict[str, list[Piece]] = {}
    groups: dict[str, tuple[WeightConverter, _Groups]] = {}
    for name in sorted(stored, key=dot_natural_key):
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        if target not in weights:
            target, pattern = rename_source_key(name, [], [], prefix, weights)
        if target not in weights:
            continue
        if pattern is None:
            pieces[target] = [Piece(stored[name], 0)]
        else:
            converter = converter_of[pattern]
            groups.setdefault(target, (converter, defaultdict(list)))[1][pattern].append(
                stored[name]
            )
    for target, (converter, group) in groups.items():
        pieces.update(_converted(target, converter, group))
    _check_shapes(weights, pieces)
    return pieces


def _converted(
    target: str, converter: WeightConverter, group: _Groups
) -> Mapping[str, list[Piece]]:
    """The pieces of the weights that a conversion of transformers makes of some stored tensors."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    lists = [group[pattern] for pattern in converter.source_patterns if pattern in group]
    if kinds == [(MergeModulelist, 0)] and len(lists) == 1:
        return {target: _joined(lists[0])}
    if kinds == [(MergeModulelist, 0), (Concatenate, 1)]:
        return {target: _joined([each for part in zip(*lists, strict=True) for each in part])}
    if kinds == [(Concatenate, 0)]:
        return {target: _joined([each for part in lists for each in part])}
    if kinds == [(Chunk, 0)] and len(lists) == 1 and len(lists[0]) == 1:
        first, *_ = names = converter.target_patterns
        cut = _cut(lists[0][0], len(names))
        return {
            target.replace(first, name): [Piece(part, 0)]
            for name, part in zip(names, cut, strict=True)
        }
    raise WeightsError(
        f"{target} must lie in the files as the model holds it to be streamed (it takes "
        f"{converter.operations} to load it); load this model with from_pretrained()"
    )


def _joined(tensors: Sequence[StoredTensor]) -> list[Piece]:
    """One after the other."""
    pieces, start = [], 0
    for tensor in tensors:
        pieces.append(Piece(tensor, start))
        start += tensor.numel
    return pieces


def _cut(tensor: StoredTensor, number: int) -> list[StoredTensor]:
    """As many equal parts along the first dimension."""
    rows, *rest = tensor.shape
    shape = (rows // number, *rest)
    part = tensor._replace(shape=shape)
    return [part._replace(offset=tensor.offset + i * part.num_bytes) for i in range(number)]


def _check_shapes(weights: Mapping[str, Any], pieces: Mapping[str, Sequence[Piece]]) -> None:
    """Refuses tensors that don't fill the weight that they are for."""
    for name, parts in pieces.items():
        wanted = tuple(weights[name].shape)
        one = len(parts) == 1
        if sum(part.stored.numel for part in parts) != weights[name].numel() or (
            one and parts[0].stored.shape != wanted
        ):
            shapes = [part.stored.shape for part in parts]
            raise WeightsError(
                f"{name} must have shape {wanted}, as the model's config says (got "
                f"{shapes[0] if one else shapes} in {parts[0].stored.shard.path}); "
                "use the config that belongs to the weights"
            )


def _required(name: str, file: str) -> Path:
    path = find_file(name, file)
    if path is None:
        raise WeightsError(
            f"{name!r} must hold {file}, which its index names (it is missing); download the "
            "model again"
        )
    return path
