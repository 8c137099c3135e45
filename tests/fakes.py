"""Test doubles: tiny random models of many architectures, and sources that draft too well or ill.

The models are small enough for thousands of calls, and their weights large enough that the text
wanders: a text that repeats one token would let a wrong draft pass unseen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any
from weakref import WeakSet

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from selfspec import SelfSpec, attach, detach
from selfspec.draft.sources import LutSource
from selfspec.records import Evidence
from selfspec.weights import packing as packing_module
from selfspec.weights.formats import packer_for
from tests.scripted import TextSource
from tests.zoo import ARCHITECTURES, ENCODERS, NO_SPECIAL, PAD, VOCAB


def new_model(
    name: str = "llama",
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """A random model, the same one at every call; `changes` go into its config."""
    kind = (ARCHITECTURES | ENCODERS)[name]
    config = AutoConfig.for_model(kind.model_type, **(NO_SPECIAL | kind.config | changes))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind.auto_class.from_config(
            config, attn_implementation=attention or kind.attentions[0]
        )
    return model.to(dtype).eval()  # type: ignore[no-any-return]


_model_made_once = cache(new_model)
SHARED: WeakSet[PreTrainedModel] = WeakSet()  # The models of `tiny_model`.


def tiny_model(
    name: str = "llama", attention: str | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """`new_model`, made once, and not attached: for tests that leave its weights as they are."""
    model = detach(_model_made_once(name, attention, dtype))
    SHARED.add(model)
    return model


@cache
def attached_model(name: str = "llama") -> PreTrainedModel:
    """A model of its own for `assistant=`."""
    return attach(new_model(name))


def with_lora(model: Any, *names: str, **changes: Any) -> PeftModel:
    """A wrapper of the model with adapters that do something; "default", if none is named."""
    torch.manual_seed(11)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    config = LoraConfig(**{"task_type": "CAUSAL_LM", **options, **changes})
    first, *others = names or ("default",)
    wrapper = get_peft_model(model, config, first)
    for name in others:
        wrapper.add_adapter(name, config)
    return wrapper.eval()


@cache
def of_library(function: Any, package: str = "torch") -> Any:
    """A function that looks as if a library had written it: as a hook it is no user's code."""
    parts = function.__code__, {**function.__globals__, "__name__": package}
    copy = FunctionType(*parts, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def packs_here(dtype: torch.dtype = torch.float32) -> bool:
    """Can this machine's torch pack weights?"""
    return packer_for(dtype) is not None


def fake_trials(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Tiny layers can be packed too, and no clock decides whether that pays.

    Each look at a model finds that packed products take the next of these shares of the time, the
    last one for good; no time at all if none is named.
    """
    left = list(shares or (0.0,))

    def pays(*_: object) -> bool:
        return (left.pop(0) if len(left) > 1 else left[0]) < 1

    monkeypatch.setattr(packing_module, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(packing_module, "_pays", pays)


def prompt(num_rows: int = 1, length: int = 17, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random ids that repeat themselves a little; the rows of a batch are left-padded unevenly."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(PAD + 1, VOCAB, (num_rows, length), generator=generator)
    ids[:, length // 2 + 1 :] = ids[:, : length - length // 2 - 1]
    mask = torch.ones_like(ids)
    for row in range(1, num_rows):
        num_pads = min(5 * row - 2, length - 1)
        ids[row, :num_pads] = PAD
        mask[row, :num_pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def lut_of(spec: SelfSpec, vocab_size: int = VOCAB) -> LutSource:
    """The first-order LUT that a `SelfSpec` holds."""
    (lut,) = (s for s in spec.learned(vocab_size).sources if s.name == "lut")
    assert isinstance(lut, LutSource)
    return lut


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a token for each id of the tiny models."""
    words = "the cat sat on that mat and then this other rat ran into the hat of a fat man"
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([words, words.upper(), "0123456789 .,;!?"], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


class WildSource(TextSource):
    """Proposes random tokens with random evidence, from random numbers of its own."""

    def __init__(self, vocab_size: int = VOCAB, width: int = 3, *, seed: int = 0) -> None:
        dice = random.Random(seed)
        super().__init__("wild", lambda _text: dice.sample(range(vocab_size), width))
        self._dice = dice

    def evidence(self, rank: int) -> Evidence:
        return Evidence(self.name, rank=rank, probability_bin=self._dice.randrange(4))


class FutureSource(TextSource):
    """Knows each row's whole text. With `doubt` it hides the truth among wrong branches.

    At each node off the truth, and with chance `doubt` on it, all that it proposes is wrong; the
    right token is never sure to be the first, but in `chains`, which are read no further than to
    the first wrong token. So accepted paths run through the whole tree.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        doubt: float = 0.0,
        seed: int = 0,
        chains: bool = False,
    ) -> None:
        super().__init__("future", self._named)
        self._texts = [tuple(map(int, text)) for text in texts]  # without padding, with prompts
        self._doubt = doubt
        self._chains = chains
        self._random = random.Random(seed)

    def _named(self, state: tuple[int, ...]) -> list[int]:
        truths = (text[len(state) :] for text in self._texts if text[: len(state)] == state)
        truth = next((rest[0] for rest in truths if rest), None)
        tokens = [] if truth is None or self._random.random() < self._doubt else [truth]
        if self._doubt:
            wrong = self._random.sample(range(1, 40), 2)
            tokens += [token for token in wrong if token != truth]
            if not self._chains:
                self._random.shuffle(tokens)
        return tokens
