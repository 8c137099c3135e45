"""Loads the model and the tokenizer that the user named, or says in one line why it can't."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from selfspec.building.limits import max_positions
from selfspec.cli.shared.options import DraftOptions, ModelOptions, RunOptions
from selfspec.errors import CliError, SelfSpecError, one_line, unknown_name
from selfspec.machine.memory import amount_in_bytes

TINY = Path(__file__).parents[2] / "models" / "tiny"
_DEVICE_RULE = "--device must be one that torch can use here"
DTYPES = ("auto", "float32", "bfloat16", "float16")

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A model on its device, with its tokenizer and a name for it."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def max_positions(self) -> int | None:
        """The number of positions that the model has; None if its config doesn't say."""
        return max_positions(self.model)

    def check_length(
        self, num_ids: int, max_new_tokens: int, which: str = "", setting: str = "--max-new-tokens"
    ) -> None:
        """Refuses a prompt that leaves no room for its answer, whose length `setting` names."""
        limit = self.max_positions
        if limit is not None and num_ids + max_new_tokens > limit:
            raise CliError(
                f"prompt{which} and new tokens must fit into the model's {limit} positions (got "
                f"{num_ids} + {max_new_tokens}); shorten the prompt, or lower {setting}"
            )

    def __str__(self) -> str:
        size = self.model.num_parameters() / 1e6
        amount = f"{size / 1000:.1f}B" if size >= 1000 else f"{size:.1f}M"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"{self.name} ({amount} parameters, {dtype}, {self.model.device})"


@contextmanager
def quiet() -> Iterator[None]:
    """Meanwhile transformers shows no progress bars, and logs only errors, as the Hub's client."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    loggers = (logging, hub_logging)
    verbosities = [each.get_verbosity() for each in loggers]
    had_bars = logging.is_progress_bar_enabled()
    for each in loggers:
        each.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        for each, verbosity in zip(loggers, verbosities, strict=True):
            each.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def check_options(options: ModelOptions) -> None:
    """Refuses wrong options, as far as that is possible without importing torch."""
    source_of(options.model)
    if options.dtype not in DTYPES:
        raise CliError(unknown_name("dtype", options.dtype, DTYPES))
    if isinstance(options, RunOptions) and options.max_memory is not None:
        amount_in_bytes(options.max_memory, whole=1, name="--max-memory")
    if isinstance(options, DraftOptions) and options.draft_model is not None:
        source_of(options.draft_model, "--draft-model")


def check_template(name: str | None, template: str | None) -> None:
    """Refuses a model without a chat template."""
    if not template:
        raise CliError(
            f"chat needs a MODEL with a chat template, and {name!r} has none; name another, or "
            "continue text with 'selfspec generate'"
        )


def load_tokenizer(options: ModelOptions) -> Any:
    """Loads the tokenizer. That is quick, so its faults are told before the model is read."""
    from transformers import AutoTokenizer

    source = source_of(options.model)
    return attempt(source, "tokenizer", lambda: AutoTokenizer.from_pretrained(source))


def load_model(
    options: ModelOptions,
    tokenizer: Any,
    max_length: int = 2048,
    max_texts: int = 1,
    draft_model: Any = None,
) -> Loaded:
    """Loads the model, in the dtype and onto the device that the options name.

    Within a memory, room for `max_texts` texts of `max_length` tokens is set aside, and for a draft
    model.
    """
    import selfspec

    device = device_of(options.device)
    dtype = _dtype(options)
    source = source_of(options.model)

    def load() -> Any:
        if isinstance(options, RunOptions) and (amount := options.max_memory) is not None:
            return selfspec.load(
                source,
                max_memory=amount,
                max_length=max_length,
                max_texts=max_texts,
                draft_model=draft_model,
                dtype=dtype,
                device=device,
            )
        return _whole_model(source, dtype, device)

    model = attempt(source, "model", load)
    return Loaded(Path(source).name if options.model is None else source, model, tokenizer)


def load_draft_model(name: str | None, options: ModelOptions) -> Any:
    """Loads the small model in the options' dtype and onto their device; None if none is named."""
    if name is None:
        return None
    source, device = source_of(name, "--draft-model"), device_of(options.device)
    dtype = _dtype(ModelOptions(model=name, dtype=options.dtype))
    return attempt(source, "draft model", lambda: _whole_model(source, dtype, device))


def _whole_model(source: str, dtype: Any, device: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, output_loading_info=True
    )
    _check_complete(info)
    return model.to(device)


def source_of(name: str | None, option: str = "MODEL") -> str:
    """A folder or a Hub id; refuses what can only be a path and leads nowhere."""
    if name is None:
        if not (TINY / "config.json").is_file():
            raise CliError(f"the embedded model is missing from {TINY}; name another MODEL")
        return str(TINY)
    path = Path(name).expanduser()
    if path.is_file():
        raise CliError(
            f"{option} must be a folder or a Hub id, such as HuggingFaceTB/SmolLM2-135M (got the "
            f"file {name!r})"
        )
    if path.exists():
        if not (path / "config.json").is_file():
            raise CliError(f"{option} must be a folder with a config.json (got {name!r})")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        rule = "a folder that exists, or a Hub id such as 'owner/name'"
        raise CliError(f"{option} must be {rule} (got {name!r})")
    return name


def attempt(source: str, what: str, load: Callable[[], T]) -> T:
    """Runs a loader of transformers, and turns what it finds wrong with the files into one line."""
    from safetensors import SafetensorError

    try:
        with quiet():
            return load()
    except SelfSpecError:
        raise
    except (ImportError, OSError, RuntimeError, ValueError, SafetensorError) as error:
        message = f"the {what} of {source!r} can't be loaded: {one_line(error)}"
        raise CliError(message) from error


def _check_complete(info: dict[str, Any]) -> None:
    """Refuses files that lack weights: transformers would make them up, with a mere warning."""
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"its files lack the weights {missing[0]!r}{more}")


def device_of(name: str) -> Any:
    """The device, on which torch must be able to put a tensor."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CliError(f"{_DEVICE_RULE} (got {name!r}); try auto, cpu or cuda") from error
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise CliError(f"{_DEVICE_RULE} (got {name!r}: {one_line(error)})") from error
    return device


def _dtype(options: ModelOptions) -> Any:
    """What `from_pretrained` takes: ``auto`` is the checkpoint's own.

    The embedded model is saved in half precision to keep the package small, and runs in float32,
    in which the promise of the same text holds to the last token.
    """
    import torch

    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    return torch.float32 if options.model is None else "auto"
