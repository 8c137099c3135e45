"""A loaded model that continues prompts, with drafts or as stock does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selfspec.cli.loading import Loaded, load_all
from selfspec.cli.messages import working
from selfspec.cli.options import WriteOptions
from selfspec.serving.encoder import Encoder, num_tokens

if TYPE_CHECKING:
    from selfspec import SelfSpec
    from selfspec.batch.requests import PromptInputs


def loaded(asked: WriteOptions, **how: Any) -> Writer:
    with working(f"Loading {asked.title}"):
        return Writer(load_all(asked, **how), asked)


class Writer:
    def __init__(self, loaded: Loaded, asked: WriteOptions) -> None:
        import torch

        from selfspec import attach

        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        attach(self.model)
        self.asked = asked
        # Without a given seed one is drawn, since torch starts every process with the same one.
        self.seed = torch.seed() % 2**32 if asked.seed is None else asked.seed
        self.reseed()

    def __str__(self) -> str:
        own, temperature = self.model.generation_config, self.asked.temperature
        if not (own.do_sample if temperature is None else temperature):
            return "greedy"
        return f"sampling at temperature {temperature or own.temperature}, seed {self.seed}"

    def reseed(self) -> None:
        import torch

        torch.manual_seed(self.seed)

    def encoder(self) -> Encoder:
        default = {"max_new_tokens": self.asked.max_new_tokens, **self.choice()}
        return self.loaded.encoder(default=default, length_option="--max-new-tokens")

    def write(
        self,
        prompt: PromptInputs,
        spec: SelfSpec | None,
        *,
        streamer: Any = None,
        max_new_tokens: int | None = None,
        prediction: str | None = None,
    ) -> Any:
        """Calls `generate()` with a prompt; without a `spec` it is the stock one."""
        from selfspec.batch.requests import inputs_on

        return self.model.generate(
            **inputs_on(prompt, self.model),
            assistant=spec,
            prediction=prediction,
            tokenizer=self.tokenizer,
            streamer=streamer,
            return_dict_in_generate=True,
            max_new_tokens=max_new_tokens or self.asked.max_new_tokens,
            **self.choice(),
        )

    def new_ids(self, prompt: PromptInputs, spec: SelfSpec | None, **options: Any) -> list[int]:
        output = self.write(prompt, spec, **options)
        new_ids: list[int] = output.sequences[0, num_tokens(prompt) :].tolist()
        return new_ids

    def choice(self) -> dict[str, Any]:
        from selfspec.serving.schema import choice_of

        temperature = self.asked.temperature
        return {} if temperature is None else choice_of(temperature)
