"""Loads what a command's options name: model, tokenizer, caches. What is wrong is one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from selfspec.cli.messages import show_log
from selfspec.cli.options import ModelOptions, RunOptions
from selfspec.config import ROUNDED
from selfspec.errors import CliError, SelfSpecError, one_line
from selfspec.machine.hub import MODEL_FILES, ask_once, check_model_name, find_file
from selfspec.machine.memory import amount_in_bytes
from selfspec.serving.images import ImageReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_options(options: ModelOptions) -> None:
    """Refuses names and amounts that can't be right, without torch. Shows the log from now on."""
    show_log(options.verbose)
    names = {"MODEL": options.model}
    if isinstance(options, RunOptions):
        names["--draft-model"] = None if options.draft_model in ROUNDED else options.draft_model
        if options.max_memory is not None:
            amount_in_bytes(options.max_memory, whole=1, name="--max-memory")
    for option, name in names.items():
        if name is not None:
            check_model_name(name, option)


def check_is_there(name: str, option: str) -> None:
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
    from selfspec.weights.rounded import rounding_reason
    from selfspec.weights.streamed.files import stored_bytes

    is_on_gpu = options.device != "cpu" and (options.device != "auto" or torch.cuda.is_available())
    has_less = options.max_memory is not None or options.weights is not None
    config = find_file(options.source, "config.json", fetches=False)
    if has_less or is_on_gpu or config is None:
        return None
    try:
        needed = stored_bytes(str(config.parent), getattr(torch, options.dtype, None))
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


def images_of(options: RunOptions) -> ImageReader:
    """The processor that reads images for the model, or the reason why there is none."""
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

    check_is_there(options.source, "MODEL")
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
        dtype = "float32"  # The embedded model is in half precision to be small.
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
