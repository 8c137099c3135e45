"""Finds out what a model can verify: a tree, a chain, or nothing beyond its next token.

A few tokens are run as a tree, through the code that drafting uses. The output must not depend on
tokens that a node must not see, and it must be far nearer to the right answer than to any wrong
one that a fault would give. Real models in half precision round a lot, so no bound on rounding
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.ability.chain_trials import check_chain, check_prompt, states_reason
from selfspec.ability.families import NO_TREES, PLAIN, family_reason
from selfspec.ability.look import look_at
from selfspec.ability.readings import Decoder
from selfspec.ability.trial_layers import TrialLayers
from selfspec.ability.trials import check_tree
from selfspec.attention import EXACT_ATTENTION
from selfspec.compat.authors import layer_that_mixes_tokens
from selfspec.compat.generation import attention_implementation
from selfspec.compat.kernels import is_out_of_memory
from selfspec.compat.states import state_functions
from selfspec.errors import UnsupportedError
from selfspec.forward.backends import TreeBackend
from selfspec.forward.layout import Window
from selfspec.forward.model import STATE_TYPES, AttentionTypes, device_of, takes
from selfspec.machine.device import seeded

_ATTENTIONS = ("sdpa", "eager", EXACT_ATTENTION)
_NUM_PROBE_IDS = 10
_CROWD = 16  # Number of nodes tried at once that others must not see.
_SAME = 1e-3  # Outcomes that differ by less, in standard deviations, count as the same.
# The attention that layers with running states have beside them; None: no attention.
_WITH_STATES: dict[str, str | None] = {
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
    **dict.fromkeys((*STATE_TYPES, "mlp", "moe")),  # The last two keep nothing at all.
}
_MIXES = (
    "which compute a token otherwise if another token of the forward is large; "
    "4 bits or no quantisation let drafts be tried"
)


IN_CHAINS = "; drafting chains instead of trees"  # The end of reasons for chains.


class DraftSupport(NamedTuple):
    """What a model can verify.

    `mode` is ``"tree"``, ``"chain"`` or ``"plain"``; `reason` says why it is not ``"tree"``.
    `read_at_once_reason` says why its prompts must be read at once; None if they need not be.
    """

    mode: str
    reason: str | None
    attention: AttentionTypes | None
    read_at_once_reason: str | None = None

    @classmethod
    def of_chains(cls, reason: str) -> DraftSupport:
        return cls("chain", f"{reason}{IN_CHAINS}", None)


def attention_types(config: PreTrainedConfig) -> AttentionTypes | str:
    """The layers' types in a config, as transformers' own code for masks reads them.

    Returns the reason if the layers can't verify trees.
    """
    if reason := family_reason(config, NO_TREES):
        return reason
    config = config.get_text_config(decoder=True)
    # Llama 4 scales queries by KV column, so no tree may cross a multiple of this number.
    period = int(config.floor_scale) if getattr(config, "attn_temperature_tuning", None) else 0
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
        if name not in known and name not in _WITH_STATES:
            return f"it has layers of type {name!r}, which can't branch"
    by_layer = [_WITH_STATES.get(name, name) for name in types]
    windows = {name: known[name] for name in dict.fromkeys(by_layer) if name is not None}
    states = frozenset(index for index, name in enumerate(types) if name in _WITH_STATES)
    return AttentionTypes(tuple(by_layer), windows, period, states)


def probe(model: PreTrainedModel) -> DraftSupport:
    """Tries a tree, then a chain, in some forwards of a few tokens.

    If the first layers show enough, the forwards stop after them, so that all together cost a few
    plain steps. Where code runs that is no library's, all layers are run. An error that says that
    memory is short is raised.
    """
    ordinary = _ordinary_ids(model)
    ids, crowds = _probe_ids(ordinary), _crowds(ordinary)
    if ids is None:
        return DraftSupport("plain", "its vocabulary is too small to try a draft on", None)
    tried = Decoder(model) if model.config.is_encoder_decoder else model
    reason = _plain_reason(model) or _attempt(tried, lambda: _draws_reason(tried, ids))
    if reason is not None:
        return DraftSupport("plain", reason, None)
    layers = cache(partial(TrialLayers.of, tried))  # An error in it is one of the trial.
    types = attention_for_trees(model)

    def tree() -> str | None:
        if isinstance(types, str):
            return types
        return check_tree(model, ids, types, layers(), TreeBackend, crowds)

    with torch.no_grad():
        reason, chain_reason, read_at_once_reason = _attempt(model, tree), None, None
        if reason is not None:
            chain_reason = _attempt(model, lambda: check_chain(tried, ids, layers(), crowds))
        if tried is model and chain_reason is None:
            read_at_once_reason = _attempt(
                model, lambda: check_prompt(model, ids, layers(), crowds)
            )
    if reason is None:
        assert not isinstance(types, str)
        return DraftSupport("tree", None, types, read_at_once_reason)
    if chain_reason is None:
        return DraftSupport.of_chains(reason)._replace(read_at_once_reason=read_at_once_reason)
    # What keeps a model from chains, which ask less of it, keeps it from trees too. But what is
    # known of a decoder says more than the error of a trial.
    is_known = isinstance(types, str) and tried is model and chain_reason.startswith("trying ")
    return DraftSupport("plain", reason if is_known else chain_reason, None)


def _plain_reason(model: PreTrainedModel) -> str | None:
    """Why a model is decoded plainly, as its modules and config show; None if it may be tried."""
    look = look_at(model)
    if look.has_adapters_of_one_call:
        return "its adapters depend on the rows and the tokens of this call"
    for module in look.modules.all:
        if mixing := layer_that_mixes_tokens(module):
            return f"it has layers of type {mixing}, {_MIXES}"
    return family_reason(model.config, PLAIN)


def try_backend(
    model: PreTrainedModel, types: AttentionTypes, new_backend: Callable[..., Any]
) -> str | None:
    """Tries trees on a backend other than `TreeBackend`, made with the same arguments.

    The model must be able to verify trees. Returns why the output is wrong, or None if it is
    right. All layers are run, since a capture has all of them.
    """
    ids = _probe_ids(_ordinary_ids(model))
    assert ids is not None
    with torch.no_grad():
        return _attempt(model, lambda: check_tree(model, ids, types, TrialLayers(), new_backend))


def attention_for_trees(model: PreTrainedModel) -> AttentionTypes | str:
    """A model's attention as its code and config show it; or why it can't verify trees."""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    used = attention_implementation(model.config)
    if used not in _ATTENTIONS:
        return (
            f"{used!r} attention takes no 4-D mask, so there are neither trees nor graphs; load it "
            "with attn_implementation='sdpa' (or 'eager')"
        )
    types = attention_types(model.config)
    if isinstance(types, str):
        return f"{type(model).__name__}: {types}"
    if types.windows and not takes(model, "position_ids"):
        return f"{type(model).__name__} takes no position_ids"
    if not types.states:
        return types
    return states_reason(model) or types._replace(functions=state_functions(model.modules()))


def _draws_reason(model: PreTrainedModel, ids: list[int]) -> str | None:
    """Whether a model in training mode draws random numbers, as dropout does.

    A forward of the same tokens then comes out otherwise with another seed. What is drawn here is
    not missing in the call.
    """
    if not any(module.training for module in model.modules()):
        return None
    devices = {device_of(model), *(parameter.device for parameter in model.parameters())}
    tokens, outputs = torch.tensor([ids], device=device_of(model)), []
    for seed in range(2):
        with torch.no_grad(), seeded(seed, sorted(devices, key=str)):
            outputs.append(model(input_ids=tokens, use_cache=False).logits.float())
    first, second = outputs
    if (first - second).std() <= _SAME * first.std():
        return None
    return "its forward draws random numbers, as in training mode"


def _attempt(model: PreTrainedModel, check: Callable[[], str | None]) -> str | None:
    """A check's verdict; an exception counts as one."""
    try:
        return check()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, UnsupportedError):
            return str(error)
        return f"trying {type(model).__name__} fails ({type(error).__name__}: {error})"


def _probe_ids(ordinary: list[int]) -> list[int] | None:
    """A few ordinary tokens, far apart, since neighbours may be unused tokens that are alike."""
    step = len(ordinary) // _NUM_PROBE_IDS
    return ordinary[step - 1 :: step][:_NUM_PROBE_IDS] if step else None


def _crowds(ordinary: list[int]) -> list[list[int]]:
    """Two sets of ordinary tokens from all over the vocabulary."""
    step = max(len(ordinary) // (2 * _CROWD), 1)
    return [ordinary[first :: 2 * step][:_CROWD] for first in (0, step)]


def _ordinary_ids(model: PreTrainedModel) -> list[int]:
    config = model.config.get_text_config(decoder=True)
    special: set[int | None] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, list) else [value])
    return [i for i in range(3, config.vocab_size) if i not in special]
