"""A loaded model that continues prompts, with drafts or as stock does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.cli.loading import Loaded
from selfspec.cli.messages import working
from selfspec.cli.options import WriteOptions
from selfspec.serving.translator import PromptTranslator, num_tokens

if TYPE_CHECKING:
    from selfspec import SelfSpec
    from selfspec.batch.prompt_maker import PromptInputs
    from selfspec.batch.text_stream import LiveText


def load_writer(options: WriteOptions, **needs: bool | int) -> Writer:
    """Loads what the options name, and says so; `needs` are those of `Loaded.load`."""
    with working(f"Loading {options.title}"):
        return Writer.load(options, **needs)  # type: ignore[arg-type]


@dataclass
class Writer(Loaded):
    options: WriteOptions

    def __post_init__(self) -> None:
        import torch

        from selfspec import attach

        attach(self.model)
        # Without --seed one is drawn, since torch starts every process with the same one.
        self.seed = torch.seed() % 2**32 if self.options.seed is None else self.options.seed
        self.reseed()

    @property
    def sampling(self) -> str:
        """How tokens are chosen, in words."""
        how = {**self.model.generation_config.to_dict(), **self.choice()}
        if not how.get("do_sample"):
            return "greedy"
        return f"sampling at temperature {how.get('temperature') or 1.0}, seed {self.seed}"

    def reseed(self) -> None:
        import torch

        torch.manual_seed(self.seed)

    def prompt_translator(self) -> PromptTranslator:
        default = {"max_new_tokens": self.options.max_new_tokens, **self.choice()}
        return self.translator(default=default, length_option="--max-new-tokens")

    def new_ids(
        self,
        prompt: PromptInputs,
        spec: SelfSpec | None,
        *,
        streamer: LiveText | None = None,
        max_new_tokens: int | None = None,
        prediction: str | None = None,
    ) -> list[int]:
        """What `generate()` writes after a prompt; without a `spec` it is the stock one."""
        from selfspec.batch.prompt_maker import inputs_on

        ids = self.model.generate(
            **inputs_on(prompt, self.model),
            assistant=spec,
            prediction=prediction,
            tokenizer=self.tokenizer,
            streamer=streamer,
            return_dict_in_generate=False,
            max_new_tokens=max_new_tokens or self.options.max_new_tokens,
            **self.choice(),
        )
        new_ids: list[int] = ids[0, num_tokens(prompt) :].tolist()
        return new_ids

    def choice(self) -> dict[str, Any]:
        from selfspec.serving.settings import choice_of

        temperature = self.options.temperature
        return {} if temperature is None else choice_of(temperature)
