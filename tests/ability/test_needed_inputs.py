"""Which arguments a plain step needs is tried, for their names and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache, LlamaForCausalLM

from selfspec import SpecConfig
from selfspec import runner as run_module
from selfspec.ability.inputs import missing_inputs_reason, of_plain_steps
from selfspec.ability.look import look_at
from selfspec.compat.generation import KV
from selfspec.runner import ModelRunner
from tests.fakes import prompt, tiny_model
from tests.zoo import ARCHITECTURES, NO_SPECIAL


class Typed(LlamaForCausalLM):
    """Zeros change nothing; other types of tokens do."""

    def forward(self, *args: Any, token_type_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if token_type_ids is not None:
            outputs.logits = outputs.logits + token_type_ids[:, -1:, None]
        return outputs


def typed(value: int) -> tuple[Any, ...]:
    config = AutoConfig.for_model("llama", **ARCHITECTURES["llama"].config | NO_SPECIAL)
    ids, how = prompt()["input_ids"], SimpleNamespace(prefill_chunk_size=None)
    types = torch.full_like(ids, value)
    return Typed(config).eval(), ids, how, {KV: DynamicCache(), "token_type_ids": types}


def test_zeros_that_change_nothing_say_nothing_of_ones() -> None:
    kinds = []
    for value, reason in ((0, None), (1, "its plain steps need 'token_type_ids', which")):
        model, ids, how, arguments = typed(value)
        kinds.append(of_plain_steps(model, ids, arguments))
        assert (missing_inputs_reason(model, ids, how, arguments) or "").startswith(reason or "")
        assert (reason is None) == (missing_inputs_reason(model, ids, how, arguments) is None)
        assert arguments[KV].get_seq_length() == 0  # Asking changes nothing.
    assert kinds[0] != kinds[1]


def test_text_alone_needs_no_trial() -> None:
    ids = prompt()["input_ids"]
    assert of_plain_steps(tiny_model(), ids, {KV: DynamicCache(), "use_cache": True}) is None


def test_a_verdict_is_kept_for_the_names_and_values(monkeypatch: Any) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(run_module, "missing_inputs_reason", lambda *given: tried.append(given))
    model, ids, how, zeros = typed(0)
    runner = ModelRunner(model, SpecConfig())
    ones = {**zeros, "token_type_ids": zeros["token_type_ids"] + 1}
    for arguments in (zeros, zeros, ones, ones, zeros):
        runner.missing_inputs_reason(look_at(model), ids, how, arguments)
    assert len(tried) == 2
