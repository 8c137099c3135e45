"""Loads the model and the tokenizer that the user named, or says in one line why it can't."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.cli.shared.options import ModelOptions, RunOptions
from selfspec.errors import CliError, SelfSpecError, one_line

TINY = Path(__file__).parents[2] / "models" / "tiny"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Loaded:
    """A model on its device, with its tokenizer and a name for it."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def max_positions(self) -> int | None:
        """The number of positions that the model has; None if its config doesn't say."""
        from selfspec.run.model import max_positions

        return max_positions(self.model)

    def __str__(self) -> str:
        size = self.model.num_parameters() / 1e6
        amount = f"{size / 1000:.1f}B" if size >= 1000 else f"{size:.1f}M"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"{self.name} ({amount} parameters, {dtype}, {self.model.device})"


def quieten() -> None:
    """From now on transformers and the Hub's client log only errors and show no progress bars."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_model(name: str | None, option: str = "MODEL") -> None:
    """Refuses what is neither a model's folder nor has the form of a Hub id."""
    if name is None:
        return
    path = Path(name)
    if (path / "config.json").is_file() or (not path.exists() and _HUB_ID.fullmatch(name)):
        return
    raise CliError(
        f"{option} must be a folder with a config.json, or a Hub id such as "
        f"HuggingFaceTB/SmolLM2-135M-Instruct (got {name!r})"
    )


def load_tokenizer(options: ModelOptions) -> Any:
    """Loads the tokenizer. That is quick, so its faults are told before the model is read."""
    from transformers import AutoTokenizer

    source = options.model or str(TINY)
    with _one_line(f"the tokenizer of {source!r}"):
        return AutoTokenizer.from_pretrained(source)


def load_model(options: ModelOptions, what: str = "model", **room: Any) -> Any:
    """Loads the model, in the dtype and onto the device that the options name.

    Within a memory, `room` says what `selfspec.load()` sets aside for texts and a draft model.
    """
    from transformers import AutoModelForCausalLM

    import selfspec

    source, dtype, device = options.model or str(TINY), _dtype(options), _device(options.device)
    with _one_line(f"the {what} of {source!r}"):
        if isinstance(options, RunOptions) and (amount := options.max_memory) is not None:
            return selfspec.load(source, max_memory=amount, dtype=dtype, device=device, **room)
        model, info = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True
        )
        # transformers would make them up, and only warn.
        if missing := sorted(info["missing_keys"]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"its files lack the weights {missing[0]!r}{more}")
        return model.to(device)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turns what a loader finds wrong with files, their place or the memory into one line."""
    from safetensors import SafetensorError

    quieten()
    try:
        yield
    except SelfSpecError:
        raise
    except (ImportError, OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CliError(f"{what} can't be loaded: {one_line(error)}") from error


def _device(name: str) -> Any:
    """The device, on which torch must be able to put a tensor."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise CliError(
            f"--device must be one that torch can use here (got {name!r}: {one_line(error)})"
        ) from error


def _dtype(options: ModelOptions) -> Any:
    """What `from_pretrained` takes: ``auto`` is the checkpoint's own.

    The embedded model is saved in half precision to keep the package small, and runs in float32,
    in which the promise of the same text holds to the last token.
    """
    import torch

    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    return torch.float32 if options.model is None else "auto"
