"""A byte-level tokenizer and a random Llama, made in a moment."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.zoo import ARCHITECTURES

LINES = [
    "def read(self, size=-1):\n    return self.file.read(size)\n",
    "the quick brown fox jumps over the lazy dog\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
]
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]


def make_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, so that text can be cut inside a character.

    Pieces of `more` that come often are tokens too, so that such texts are short.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320 + 2 * sum(map(len, more)),
        special_tokens=["<|pad|>", "<|eos|>", *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*LINES, *more], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        additional_special_tokens=ROLES,
    )


def make_model(num_tokens: int, **changes: Any) -> LlamaForCausalLM:
    """Weights so large that the text wanders; `changes` go into the config."""
    torch.manual_seed(0)
    ids = {"vocab_size": num_tokens, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**ARCHITECTURES["llama"].config | ids | changes))
