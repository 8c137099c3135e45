"""Loads what a command's options name: model, tokenizer, caches. What is wrong is one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from selfspec.cli.messages import say, show_log
from selfspec.cli.options import TINY, DraftOptions, ModelOptions, RunOptions
from selfspec.config import ROUNDED
from selfspec.errors import CliError, SelfSpecError, one_line
from selfspec.machine.hub import MODEL_FILES, ask_once, check_model_name
from selfspec.machine.memory import amount_in_bytes
from selfspec.serving.images import ImageReader
from selfspec.serving.translator import PromptTranslator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Self

    from selfspec import SelfSpec, SpecConfig
    from selfspec.cache import CacheContents

# Under --max-memory, `batch` and `serve` set aside the KV of 512 tokens for all texts that may run,
# and for two more: one whose prompt is being read, and one for copies when rows come or go.
TOKENS_A_TEXT = 512
OTHER_TEXTS = 2


@dataclass
class Loaded:
    """What a command has loaded by its options."""

    options: DraftOptions
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: CacheContents | None = None
    draft_model: PreTrainedModel | str | None = None
    images: ImageReader = field(default_factory=ImageReader)

    @classmethod
    def load(
        cls,
        options: DraftOptions,
        *,
        chats: bool = False,
        num_texts: int = 0,
        sees: bool = False,
        packs: bool = False,
    ) -> Self:
        """The model, and what drafts start with, whose errors come before the model is read.

        Under `--max-memory`, memory is set aside for `num_texts` texts, or for a long one. With
        `sees`, a model that can read images is loaded with what it reads them with. With `packs`,
        weights are packed in place where that pays.
        """
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
        draft_model: PreTrainedModel | str | None = None
        if options.draft_model in ROUNDED:
            draft_model = options.draft_model
        elif options.draft_model is not None:
            _find_model(options.draft_model, "--draft-model")
            small = ModelOptions(
                model=options.draft_model, device=options.device, dtype=options.dtype
            )
            draft_model = load_model(small, "draft model", packs=True)
        images = images_of(options) if sees else ImageReader()
        model = load_model(
            options,
            sees=images.processor is not None,
            packs=packs,
            max_length=TOKENS_A_TEXT if num_texts else 2048,
            max_texts=num_texts + OTHER_TEXTS if num_texts else 1,
            draft_model=draft_model,
        )
        return cls(options, model, tokenizer, cache, draft_model, images)

    @property
    def name(self) -> str:
        return self.options.model or TINY.name

    @property
    def max_positions(self) -> int | None:
        from selfspec.forward.model import max_positions

        return max_positions(self.model)

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        from selfspec.weights import rounded_bits

        size = self.model.num_parameters() / 1e6
        amount = f"{size / 1000:.1f}B" if size >= 1000 else f"{size:.1f}M"
        least = rounded_bits(self.model)
        bits = "" if least is None else f" in {least} bits"
        return f"{self.name} ({amount} parameters{bits}, {self.dtype}, {self.model.device})"

    def translator(self, **settings: Any) -> PromptTranslator:
        """Turns prompts into tokens and arguments, within what the model allows."""
        from selfspec.forward.model import vocab_size
        from selfspec.row_rules import end_ids

        settings = {"images": self.images, **settings}
        return PromptTranslator(
            self.tokenizer,
            vocab_size(self.model),
            self.max_positions,
            end_ids=end_ids(self.model.generation_config),
            **settings,
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

    def memory_of_texts(self, num_texts: int) -> int | None:
        """What keys and values of all texts may take: what the models leave of `--max-memory`."""
        if self.options.max_memory is None:
            return None
        from selfspec.neural.rounded_copy import copy_bytes
        from selfspec.weights import weight_bytes
        from selfspec.weights.streamed.memory_plan import kv_bytes

        num_tokens = TOKENS_A_TEXT * (num_texts + OTHER_TEXTS)
        weights, set_aside = weight_bytes(self.model), kv_bytes(self.model, num_tokens)
        left = amount_in_bytes(self.options.max_memory, weights + set_aside) - weights
        if isinstance(self.draft_model, str):
            left -= copy_bytes(self.model, self.draft_model)
        elif self.draft_model is not None:  # It keeps the texts' keys and values, too.
            left -= weight_bytes(self.draft_model) + kv_bytes(self.draft_model, num_tokens)
        return max(left, set_aside)


def check_options(options: ModelOptions) -> None:
    """Refuses names and amounts that can't be right, without torch. Shows the log from now on."""
    show_log(options.verbose)
    names = {"MODEL": options.model}
    if isinstance(options, RunOptions) and options.max_memory is not None:
        amount_in_bytes(options.max_memory, whole=1, name="--max-memory")
    if isinstance(options, DraftOptions):
        names["--draft-model"] = None if options.draft_model in ROUNDED else options.draft_model
    for option, name in names.items():
        if name is not None:
            check_model_name(name, option)


def _find_model(name: str, option: str) -> None:
    """Refuses a name that is no model here if the Hub can't be asked for it, which is done once."""
    from huggingface_hub.errors import HfHubHTTPError

    check_model_name(name, option)
    if Path(name).exists():
        return
    try:
        ask_once(name, *MODEL_FILES)
    except HfHubHTTPError:
        return  # There may be no such model, or no such route on a mirror: the loader says so.
    except Exception as error:  # Errors of the client's HTTP library have no name of their own.
        raise CliError(
            f"{option} must be a folder with a config.json, or the id of a model on the Hub (got "
            f"{name!r}, which is no folder here, and the Hub can't be asked: {one_line(error)})"
        ) from error


def memory_note(options: RunOptions) -> str | None:
    """What to do if the weights take more memory than is free; None if they fit.

    It is no error, since the system may swap. A model that is not downloaded yet gets no note.
    """
    import torch

    from selfspec.machine.memory import free_memory
    from selfspec.weights import rounding_reason
    from selfspec.weights.streamed.files import stored_bytes

    is_on_gpu = options.device != "cpu" and (options.device != "auto" or torch.cuda.is_available())
    has_less = options.max_memory is not None or options.weights is not None
    if has_less or is_on_gpu or (folder := _folder_of(options.source)) is None:
        return None
    try:
        needed = stored_bytes(str(folder), getattr(torch, options.dtype, None))
    except (OSError, ValueError):
        return None  # Not safetensors, or what their loader will refuse.
    if needed <= (free := free_memory()):
        return None
    less = "" if rounding_reason(8) else ", and --weights int8 or int4 takes less"
    return (
        f"note: the weights of {options.title} take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB "
        f"of memory are free; --max-memory {0.8 * free / 1e9:.1f}GB leaves the rest on the disk"
        f"{less}"
    )


def _folder_of(name: str) -> Path | None:
    """The folder of a model on this machine; None if it was not downloaded. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    if Path(name).is_dir():
        return Path(name)
    file = try_to_load_from_cache(name, "config.json")
    return Path(file).parent if isinstance(file, str) else None


def images_of(options: RunOptions) -> ImageReader:
    """What reads images for the model; knows the reason if nothing does."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoProcessor

    source = options.source
    with _one_line(f"the config of {source!r}"):
        config = AutoConfig.from_pretrained(source)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return ImageReader()
    if options.max_memory is not None:
        return ImageReader(
            reason="under --max-memory it is loaded without what reads them; leave that option out"
        )
    try:
        processor = AutoProcessor.from_pretrained(source)
    except (ImportError, OSError, ValueError) as error:
        return ImageReader(reason=f"its image processor can't be loaded: {one_line(error):.200}")
    has_images = getattr(processor, "image_processor", None) is not None
    return ImageReader(processor) if has_images else ImageReader()


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    _find_model(options.source, "MODEL")
    with _one_line(f"the tokenizer of {options.source!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(options.source)
        return tokenizer


def load_model(
    options: ModelOptions,
    what: str = "model",
    *,
    sees: bool = False,
    packs: bool = False,
    **set_aside: Any,
) -> PreTrainedModel:
    """Loads the model by `selfspec.load()`, if that packs it or the options need it.

    `set_aside` says for which texts and draft model `--max-memory` must do. Without that option,
    `sees` says whether the model can read images.
    """
    from selfspec.plugin.loading import load, load_whole

    dtype = options.dtype
    if options.model is None and dtype == "auto":
        dtype = "float32"  # It is saved in half precision to keep the package small.
    common: dict[str, Any] = {"dtype": dtype, "device": options.device, "sees": sees}
    memory, weights = getattr(options, "max_memory", None), getattr(options, "weights", None)
    model: PreTrainedModel
    with _one_line(f"the {what} of {options.source!r}"):
        if packs or memory is not None or weights is not None:
            model = load(options.source, memory, weights=weights, **common, **set_aside)
        else:
            model = load_whole(options.source, **common)
    return model


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turns what a loader finds wrong with files, device or memory into one line.

    From now on transformers and the Hub's client log only errors and show no progress bars.
    """
    from huggingface_hub.utils import logging as hub_logging
    from safetensors import SafetensorError
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except SelfSpecError:
        raise
    except Exception as error:  # A broken file may be any of them.
        is_told = isinstance(error, (ImportError, OSError, RuntimeError, ValueError))
        kind = "" if is_told or isinstance(error, SafetensorError) else f"{type(error).__name__}: "
        why = shorten(one_line(error), 300, placeholder=" …")  # Some name all models there are.
        raise CliError(f"{what} can't be loaded: {kind}{why}") from error
