"""A model that a command has loaded by its options, and that continues prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from selfspec.cli.loading import (
    check_is_there,
    images_of,
    load_model,
    load_tokenizer,
    memory_note,
)
from selfspec.cli.messages import say, working
from selfspec.cli.options import TINY, ModelOptions, WriteOptions
from selfspec.config import ROUNDED
from selfspec.errors import CliError
from selfspec.machine.memory import amount_in_bytes
from selfspec.serving.images import ImageReader
from selfspec.serving.translator import PromptTranslator, num_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from selfspec import SelfSpec, SpecConfig
    from selfspec.batch.prompt_maker import PromptInputs
    from selfspec.batch.text_stream import LiveText
    from selfspec.cache import CacheContents

# Under --max-memory, `batch` and `serve` set aside the KV of 512 tokens for all texts that may run,
# and for two more: one whose prompt is being read, and one for copies when rows come or go.
TOKENS_A_TEXT = 512
OTHER_TEXTS = 2


def load_writer(
    options: WriteOptions,
    *,
    chats: bool = False,
    num_texts: int = 0,
    sees: bool = False,
    packs: bool = False,
) -> Writer:
    """Loads the model and what drafts start with, whose errors come before the model is read.

    Under `--max-memory`, memory is set aside for `num_texts` texts, or for a long one. With `sees`,
    a model that can read images is loaded with what it reads them with. With `packs`, weights are
    packed in place where that pays.
    """
    with working(f"Loading {options.title}"):
        from selfspec.cache import RememberedFile, load_cache

        tokenizer = load_tokenizer(options)
        if chats and not tokenizer.chat_template:
            raise CliError(
                f"chat needs a MODEL with a chat template, and {options.model!r} has none; name "
                "another, or continue text with 'selfspec generate' without --chat"
            )
        if note := memory_note(options):
            say(note)
        cache = None if options.cache is None else load_cache(options.cache, tokenizer=tokenizer)
        if options.remember is not None:  # Refuses a file of another tokenizer.
            RememberedFile(options.remember, tokenizer, saves=False)
        draft_model = _load_draft_model(options)
        images = images_of(options) if sees else ImageReader()
        model = load_model(
            options,
            sees=images.processor is not None,
            packs=packs,
            max_length=TOKENS_A_TEXT if num_texts else 2048,
            max_texts=num_texts + OTHER_TEXTS if num_texts else 1,
            draft_model=draft_model,
        )
        return Writer(options, model, tokenizer, cache, draft_model, images)


def _load_draft_model(options: WriteOptions) -> PreTrainedModel | str | None:
    name = options.draft_model
    if name is None or name in ROUNDED:
        return name
    check_is_there(name, "--draft-model")
    small = ModelOptions(model=name, device=options.device, dtype=options.dtype)
    return load_model(small, "draft model", packs=True)


@dataclass
class Writer:
    """The models that a command has loaded; continues prompts with drafts or without."""

    options: WriteOptions
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: CacheContents | None = None
    draft_model: PreTrainedModel | str | None = None
    images: ImageReader = field(default_factory=ImageReader)

    def __post_init__(self) -> None:
        import torch

        from selfspec import attach

        attach(self.model)
        # Without --seed one is drawn, since torch starts every process with the same one.
        self.seed = torch.seed() % 2**32 if self.options.seed is None else self.options.seed
        self.reseed()

    def __str__(self) -> str:
        from selfspec.weights.rounded_model import rounded_bits

        size = self.model.num_parameters() / 1e6
        amount = f"{size / 1000:.1f}B" if size >= 1000 else f"{size:.1f}M"
        least = rounded_bits(self.model)
        bits = "" if least is None else f" in {least} bits"
        return f"{self.name} ({amount} parameters{bits}, {self.dtype}, {self.model.device})"

    @property
    def name(self) -> str:
        return self.options.model or TINY.name

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def max_positions(self) -> int | None:
        from selfspec.forward.model import max_positions

        return max_positions(self.model)

    @property
    def sampling(self) -> str:
        """How tokens are chosen, in words."""
        how = {**self.model.generation_config.to_dict(), **self._choice()}
        if not how.get("do_sample"):
            return "greedy"
        return f"sampling at temperature {how.get('temperature') or 1.0}, seed {self.seed}"

    def reseed(self) -> None:
        import torch

        torch.manual_seed(self.seed)

    def translator(self) -> PromptTranslator:
        """Turns prompts into tokens and arguments, by the options where a prompt leaves it open."""
        from selfspec.forward.model import vocab_size

        return PromptTranslator(
            self.tokenizer,
            vocab_size(self.model),
            self.max_positions,
            default={"max_new_tokens": self.options.max_new_tokens, **self._choice()},
            length_option="--max-new-tokens",
            images=self.images,
        )

    def new_spec(self, config: SpecConfig, *, kept_kv: str | None = None) -> SelfSpec:
        """A `SelfSpec` with what the options name, and `kept_kv` if the knobs leave it open."""
        from selfspec import SelfSpec

        if config.kept_kv is None:
            config = config.changed(kept_kv=kept_kv)
        return SelfSpec(
            config,
            tokenizer=self.tokenizer,
            contents=self.cache,
            remember=self.options.remember,
            draft_model=self.draft_model,
        )

    def new_ids(
        self,
        prompt: PromptInputs,
        spec: SelfSpec | None,
        *,
        streamer: LiveText | None = None,
        max_new_tokens: int | None = None,
        prediction: str | None = None,
    ) -> list[int]:
        """The new tokens of `generate()` after a prompt; without a `spec` it drafts nothing."""
        from selfspec.batch.prompt_maker import inputs_on

        ids = self.model.generate(
            **inputs_on(prompt, self.model),
            assistant=spec,
            prediction=prediction,
            tokenizer=self.tokenizer,
            streamer=streamer,
            return_dict_in_generate=False,
            max_new_tokens=max_new_tokens or self.options.max_new_tokens,
            **self._choice(),
        )
        new_ids: list[int] = ids[0, num_tokens(prompt) :].tolist()
        return new_ids

    def memory_of_texts(self, num_texts: int) -> int | None:
        """Bytes for keys and values of all texts: what the models leave of `--max-memory`."""
        if self.options.max_memory is None:
            return None
        from selfspec.neural.rounded_copy import copy_bytes
        from selfspec.weights.rounded_model import weight_bytes
        from selfspec.weights.streamed.memory_plan import kv_bytes

        tokens = TOKENS_A_TEXT * (num_texts + OTHER_TEXTS)
        weights, set_aside = weight_bytes(self.model), kv_bytes(self.model, tokens)
        left = amount_in_bytes(self.options.max_memory, weights + set_aside) - weights
        if isinstance(self.draft_model, str):
            left -= copy_bytes(self.model, self.draft_model)
        elif self.draft_model is not None:  # A draft model has keys and values of texts too.
            left -= weight_bytes(self.draft_model) + kv_bytes(self.draft_model, tokens)
        return max(left, set_aside)

    def _choice(self) -> dict[str, Any]:
        from selfspec.serving.settings import choice_of

        temperature = self.options.temperature
        return {} if temperature is None else choice_of(temperature)
