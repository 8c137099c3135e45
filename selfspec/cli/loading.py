"""Loads what a command's options name: model, tokenizer, caches. What is wrong is one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.cli.messages import say, show_log
from selfspec.cli.options import DraftOptions, ModelOptions, RunOptions
from selfspec.errors import CliError, SelfSpecError, one_line
from selfspec.machine.memory import amount_in_bytes
from selfspec.machine.model_names import check_model_name, file_here, find_model
from selfspec.serving.encoder import Encoder
from selfspec.serving.images import ImageReader

if TYPE_CHECKING:
    from selfspec import SelfSpec, SpecConfig
    from selfspec.cache import CacheContents

TINY = Path(__file__).parents[1] / "models" / "tiny"

# Under --max-memory, `batch` and `serve` set aside the KV of 512 tokens for each text that may run,
# and for two more: one whose prompt is being read, and one for copies when rows come or go.
TOKENS_A_TEXT = 512
OTHER_TEXTS = 2
_DEVICE = re.compile("auto|[a-z]+(:[0-9]+)?")


@dataclass(frozen=True)
class Loaded:
    name: str
    model: Any
    tokenizer: Any
    cache: CacheContents | None = None
    remember: str | None = None
    draft_model: Any = None
    images: ImageReader = field(default_factory=ImageReader)

    @property
    def max_positions(self) -> int | None:
        from selfspec.forward.model import max_positions

        return max_positions(self.model)

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        from selfspec.weights import is_in_eight_bits

        size = self.model.num_parameters() / 1e6
        amount = f"{size / 1000:.1f}B" if size >= 1000 else f"{size:.1f}M"
        bits = " in 8 bits" * is_in_eight_bits(self.model)
        return f"{self.name} ({amount} parameters{bits}, {self.dtype}, {self.model.device})"

    def encoder(self, **how: Any) -> Encoder:
        """Turns prompts into tokens and arguments, within what the model allows."""
        from selfspec.forward.model import vocab_size
        from selfspec.row_rules import end_ids

        ends = end_ids(self.model.generation_config)
        limits = (vocab_size(self.model), self.max_positions)
        return Encoder(self.tokenizer, *limits, **{"images": self.images, "end_ids": ends, **how})

    def new_spec(self, config: SpecConfig) -> SelfSpec:
        from selfspec import SelfSpec

        options: dict[str, Any] = {"remember": self.remember, "draft_model": self.draft_model}
        return SelfSpec(config, tokenizer=self.tokenizer, contents=self.cache, **options)


def check_options(asked: ModelOptions) -> None:
    """Refuses names and amounts that can't be right, without torch. Shows the log from now on."""
    show_log(asked.verbose)
    if not _DEVICE.fullmatch(asked.device):
        rule = "--device must be auto, cpu, or another device of torch such as cuda or cuda:1"
        raise CliError(f"{rule} (got {asked.device!r:.40})")
    names = {"MODEL": asked.model}
    if isinstance(asked, RunOptions) and asked.max_memory is not None:
        amount_in_bytes(asked.max_memory, whole=1, name="--max-memory")
    if isinstance(asked, DraftOptions):
        names["--draft-model"] = asked.draft_model
    for option, name in names.items():
        if name is not None:
            check_model_name(name, option)


def load_all(
    asked: DraftOptions,
    *,
    chats: bool = False,
    num_texts: int = 0,
    sees: bool = False,
    packs: bool = False,
) -> Loaded:
    """The model, and what drafts start with, whose errors come before the model is read.

    Under `--max-memory` room is set aside for `num_texts` texts, or for a long one. With `sees`, a
    model that can read images is loaded with what it reads them with. With `packs`, weights are
    packed in place where that pays.
    """
    from selfspec.cache import RememberedFile, load_cache

    _check_device(asked.device)
    tokenizer = load_tokenizer(asked)
    if chats and not tokenizer.chat_template:
        raise CliError(
            f"chat needs a MODEL with a chat template, and {asked.model!r} has none; name another, "
            "or continue text with 'selfspec generate'"
        )
    if note := memory_note(asked):
        say(note)
    cache = None if asked.cache is None else load_cache(asked.cache, tokenizer=tokenizer)
    if asked.remember is not None:
        RememberedFile(
            asked.remember, tokenizer, saves=False
        )  # Refuses a file of another tokenizer.
    small = None
    if asked.draft_model is not None:
        options = ModelOptions(model=asked.draft_model, device=asked.device, dtype=asked.dtype)
        small = load_model(options, "draft model")
    room = (TOKENS_A_TEXT, num_texts + OTHER_TEXTS) if num_texts else (2048, 1)
    images = images_of(asked) if sees else ImageReader()
    sizes: Any = {"max_length": room[0], "max_texts": room[1], "draft_model": small}
    model = load_model(asked, sees=images.processor is not None, packs=packs, **sizes)
    return Loaded(asked.model or TINY.name, model, tokenizer, cache, asked.remember, small, images)


def _check_device(name: str) -> None:
    """Refuses a device that this machine lacks."""
    import torch

    try:
        torch.empty(0, dtype=torch.float32, device="cpu" if name == "auto" else name)
    except (AssertionError, RuntimeError) as error:
        rule = "--device must be one that this machine has"
        raise CliError(f"{rule} (got {name!r}: {one_line(error):.120})") from error


def memory_note(asked: RunOptions) -> str | None:
    """What to do if the weights take more memory than there is; None if they fit.

    It is no error, since the system may swap. A model that is not downloaded yet gets no note.
    """
    import torch

    from selfspec.machine.memory import free_memory
    from selfspec.weights import missing_for_eight_bits
    from selfspec.weights.streamed.files import stored_bytes

    is_on_gpu = asked.device != "cpu" and (asked.device != "auto" or torch.cuda.is_available())
    folder = file_here(asked.model or str(TINY), "config.json").parent
    if asked.max_memory is not None or is_on_gpu or not folder.is_dir():
        return None
    try:
        wanted = torch.int8 if asked.weights is not None else getattr(torch, asked.dtype, None)
        needed = stored_bytes(str(folder), wanted)
    except (OSError, ValueError):
        return None  # Weights of another kind, or what their loader will refuse.
    free, less = free_memory(), ""
    if needed <= free:
        return None
    if asked.weights is None and missing_for_eight_bits() is None:
        rounded = stored_bytes(str(folder), torch.int8)
        less = f", and with --weights int8 they take {rounded / 1e9:.1f} GB"
    return (
        f"note: the weights of {asked.title} take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of "
        f"memory are free; --max-memory {0.8 * free / 1e9:.1f}GB leaves the rest on the disk{less}"
    )


def images_of(options: RunOptions) -> ImageReader:
    """What reads images for the model; knows the reason if nothing does."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoProcessor

    source = options.model or str(TINY)
    with _one_line(f"the config of {source!r}"):
        kind = type(AutoConfig.from_pretrained(source))
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
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


def load_tokenizer(options: ModelOptions) -> Any:
    from transformers import AutoTokenizer

    source = options.model or str(TINY)
    find_model(source, "MODEL")
    with _one_line(f"the tokenizer of {source!r}"):
        return AutoTokenizer.from_pretrained(source)


def load_model(
    options: ModelOptions,
    what: str = "model",
    *,
    sees: bool = False,
    packs: bool = False,
    **room: Any,
) -> Any:
    """Loads the model by `selfspec.load()`, if that packs it or the options need it.

    `room` says what `--max-memory` sets aside for texts and a draft model. Without that option,
    `sees` says whether the model can read images.
    """
    from selfspec.plugin.loading import load, load_whole

    source, dtype = options.model or str(TINY), options.dtype
    if options.model is None and dtype == "auto":
        dtype = "float32"  # It is saved in half precision to keep the package small.
    how: dict[str, Any] = {"dtype": dtype, "device": options.device, "sees": sees}
    memory, weights = getattr(options, "max_memory", None), getattr(options, "weights", None)
    with _one_line(f"the {what} of {source!r}"):
        if packs or memory is not None or weights is not None:
            return load(source, memory, weights=weights, **how, **room)
        return load_whole(source, **how)


def memory_of_texts(
    model: Any, draft_model: Any, max_memory: str | None, num_texts: int
) -> int | None:
    """What the keys and values of all texts may take: what the models leave of `--max-memory`."""
    if max_memory is None:
        return None
    from selfspec.weights import weight_bytes
    from selfspec.weights.streamed.memory_plan import kv_bytes

    num_tokens = TOKENS_A_TEXT * (num_texts + OTHER_TEXTS)
    weights, set_aside = weight_bytes(model), kv_bytes(model, num_tokens)
    left = amount_in_bytes(max_memory, weights + set_aside) - weights
    if draft_model is not None:  # It keeps the texts' keys and values, too.
        left -= weight_bytes(draft_model) + kv_bytes(draft_model, num_tokens)
    return max(left, set_aside)


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
    except (ImportError, OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CliError(f"{what} can't be loaded: {one_line(error)}") from error
