"""What a model can verify: a tree, a chain, or nothing beyond its next token.

Found out by trying: a few tokens are run as a tree through the very code that drafting uses, and
compared with plain forwards. So a model that ignores 4-D masks or counts positions by itself is
never given a tree, whether or not anybody knew of it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from selfspec.kv import can_hold_trees
from selfspec.layout import Window
from selfspec.plugin.backends import AttentionTypes, ChainBackend, TreeBackend
from selfspec.records import DraftTree

__all__ = ["Ability", "attention_for_trees", "attention_types", "probe", "try_backend"]

_ATTENTIONS = ("sdpa", "eager")
_NUM_PROBE_IDS = 11
_SLACK_EPS = 16  # right logits are off by no more units of rounding than this, or
_SLACK_ROUNDING = 8  # by no more than so many times what another plain way is off,
_MOST_SLACK = 4  # but for so many times the former: what is off by more is no rounding


class Ability(NamedTuple):
    """`mode` is ``"tree"``, ``"chain"`` or ``"plain"``; `reason` says why it is no tree."""

    mode: str
    reason: str | None
    attention: AttentionTypes | None


def attention_types(config: Any) -> AttentionTypes | str:
    """Reads the layers' types off a config, as transformers' own mask code does; or why not."""
    config = config.get_text_config(decoder=True)
    for name in ("window_size", "attention_window", "local_attention_window", "attention_types"):
        if getattr(config, name, None):
            return f"its config sets {name!r}, a window of the model's own making"
    sliding = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    known = {
        "full_attention": Window(),
        "sliding_attention": Window("sliding", sliding or 0),
        "chunked_attention": Window("chunked", chunk or 0),
    }
    types = getattr(config, "layer_types", None)
    if types is None:
        only = "sliding_attention" if sliding else "chunked_attention" if chunk else None
        types = [only or "full_attention"] * config.num_hidden_layers
    for name in types:
        if name not in known:
            return f"it has layers of type {name!r}, which can't branch"
    period = config.floor_scale if getattr(config, "attn_temperature_tuning", None) else 0
    windows = {name: known[name] for name in dict.fromkeys(types)}
    return AttentionTypes(tuple(types), windows, int(period))


def probe(model: Any) -> Ability:
    """Tries a tree, then a chain; costs up to eight forwards of a few tokens, once a model.

    Leaves the global random stream as it was: a model in training mode draws for its dropout, fails
    here for it, and is decoded plainly with the draws that stock would make.
    """
    ids = _probe_ids(model)
    if ids is None:
        return Ability("plain", "its vocabulary is too small to try a draft on", None)
    with _trying(model):
        types, reason = _try_tree(model, ids)
        if reason is None:
            return Ability("tree", None, types)
        chain_reason = _attempt(_check_chain, model, ids)
    if chain_reason is None:
        return Ability("chain", f"{reason}; drafting chains instead of trees", None)
    return Ability("plain", f"{reason}; and no chain either: {chain_reason}", None)


def try_backend(model: Any, types: AttentionTypes, new_backend: Callable[..., Any]) -> str | None:
    """Tries trees on another backend than `TreeBackend`, made with the same arguments.

    For a model that can verify trees; returns why they don't come out right, None where they do.
    """
    ids = _probe_ids(model)
    assert ids is not None
    with _trying(model):
        return _attempt(_check_tree, model, ids, types, new_backend)


def attention_for_trees(model: Any) -> AttentionTypes | str:
    """A model's attention as its code and config show it; or why trees are out of the question."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids"
    used = getattr(model.config, "_attn_implementation", None)
    if used not in _ATTENTIONS:
        return f"{used!r} attention takes no 4-D mask (sdpa and eager do)"
    types = attention_types(model.config)
    return f"{type(model).__name__}: {types}" if isinstance(types, str) else types


@contextmanager
def _trying(model: Any) -> Iterator[None]:
    """Leaves no trace in the random stream."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        yield


def _try_tree(model: Any, ids: list[int]) -> tuple[AttentionTypes | None, str | None]:
    types = attention_for_trees(model)
    if isinstance(types, str):
        return None, types
    return types, _attempt(_check_tree, model, ids, types, TreeBackend)


def _attempt(check: Any, model: Any, *args: Any) -> str | None:
    """A check's verdict; an exception inside the model's own code is a verdict too."""
    try:
        verdict: str | None = check(model, *args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(model).__name__} fails on it ({type(error).__name__}: {error})"
    return verdict


def _probe_ids(model: Any) -> list[int] | None:
    """A few different ordinary tokens."""
    config = model.config.get_text_config(decoder=True)
    special: set[int | None] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, list) else [value])
    ordinary = (i for i in range(3, config.vocab_size) if i not in special)
    ids = list(itertools.islice(ordinary, _NUM_PROBE_IDS))
    return ids if len(ids) == _NUM_PROBE_IDS else None


def _run(model: Any, ids: Sequence[int], cache: DynamicCache | None = None) -> torch.Tensor:
    """Plain logits (1, L, V)."""
    input_ids = torch.tensor([list(ids)], device=model.device)
    output = model(input_ids=input_ids, past_key_values=cache, use_cache=cache is not None)
    return output.logits  # type: ignore[no-any-return]


def _again(model: Any, prompt: Sequence[int], rest: Sequence[int]) -> torch.Tensor:
    """The plain logits of `rest` by another way, prompt first: what differs is rounding."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    _run(model, prompt, cache)
    return _run(model, rest, cache)[0]


def _check_tree(
    model: Any, ids: list[int], types: AttentionTypes, new_backend: Callable[..., Any]
) -> str | None:
    """A root with wrong children and one right one, b, with a child c; root-b-c is kept, d follows.

    The wrong children shift the right one's place in the KV away from its position. Those of d
    make both trees need the same width; then d is read by itself, as in a plain step.
    """
    prompt, (root, *wrong, b, c, d) = ids[:4], ids[4:]
    right = [root, b, c, d]
    truth = _run(model, [*prompt, *right])[0, 4:]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    _run(model, prompt, cache)
    if reason := can_hold_trees(cache):
        return reason
    position = torch.full((1, 1), len(prompt), device=model.device)
    backend = new_backend(model, cache, types, position, None, room=16)
    tree, last = _bush(root, wrong), _bush(d, [*wrong, b, c])
    path = [0, tree.add(0, b, 0.4)]
    path.append(tree.add(path[1], c, 0.3))
    first = backend.forward(backend.lay_out([tree]))[0, path]
    backend.commit([path])
    second = backend.forward(backend.lay_out([last]))[0, :1]
    third = backend.forward(backend.lay_out([DraftTree.of_root(d)]))[0]
    backend.release()
    got, truth = torch.cat([first, second, third]), torch.cat([truth, truth[-1:]])
    again = _again(model, prompt, right)
    again = torch.cat([again, again[-1:]])
    return _verdict(got, truth, again, "a tree's mask and positions")


def _bush(root: int, tokens: Sequence[int]) -> DraftTree:
    tree = DraftTree.of_root(root)
    for token in tokens:
        tree.add(0, token, 0.5)
    return tree


def _check_chain(model: Any, ids: list[int]) -> str | None:
    """A chain of three drafts of which one is kept, then one token behind it."""
    prompt, (root, a, b, c, d) = ids[:4], ids[4:9]
    truth = _run(model, [*prompt, root, a, d])[0, 4:]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    device = model.device
    kwargs = {
        "past_key_values": cache,
        "use_cache": True,
        "position_ids": torch.arange(len(prompt) + 1, device=device)[None],
    }
    if "position_ids" not in inspect.signature(model.forward).parameters:
        del kwargs["position_ids"]
    _run(model, prompt, cache)
    if not cache.is_croppable:
        return "its KV cache can't be cropped"
    backend = ChainBackend(model, cache, torch.tensor([prompt], device=device), kwargs)
    chain = DraftTree.of_root(root)
    chain.add(chain.add(chain.add(0, a, 0.9), b, 0.8), c, 0.7)
    first = backend.forward(backend.lay_out([chain]))[0, :2]
    backend.commit([[0, 1]])
    second = backend.forward(backend.lay_out([DraftTree.of_root(d)]))[0]
    again = _again(model, prompt, [root, a, d])
    return _verdict(torch.cat([first, second]), truth, again, "a chain and its taking back")


def _verdict(got: torch.Tensor, truth: torch.Tensor, again: torch.Tensor, what: str) -> str | None:
    """Row by row, the logits must be as near to the truth as rounding lets them be."""
    slack = max(_SLACK_EPS * torch.finfo(got.dtype).eps, 1e-4)
    got, truth, again = got.float(), truth.float(), again.float()
    scale = truth.std(-1).clamp(min=1e-6)
    error = (got - truth).abs().amax(-1) / scale
    rounding = ((again - truth).abs().amax(-1) / scale).max()
    allowed = (_SLACK_ROUNDING * rounding).clamp(slack, max(_MOST_SLACK * slack, 0.02))
    if bool((error <= allowed).all()):
        return None
    return f"it does not follow {what} (logits off by {float(error.max()):.2g} standard deviations)"
