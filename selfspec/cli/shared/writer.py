"""A loaded model that continues prompts, with drafts or as stock does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.building.limits import choice_of
from selfspec.cli.shared.model_loading import Loaded
from selfspec.cli.shared.options import Sampling
from selfspec.errors import CliError
from selfspec.records import DRAFT_MODEL

if TYPE_CHECKING:
    from selfspec import SelfSpec, SpecConfig
    from selfspec.cache import CacheContents


class Start(NamedTuple):
    """What every `SelfSpec` of a command starts with."""

    cache: CacheContents | None = None
    remember: str | None = None
    draft_model: Any = None

    def new_spec(self, config: SpecConfig, tokenizer: Any) -> SelfSpec:
        """A new `SelfSpec`, which knows what the cache and the remembered file hold."""
        from selfspec import SelfSpec

        options: dict[str, Any] = {"remember": self.remember, "draft_model": self.draft_model}
        if self.cache is None:
            return SelfSpec(config, tokenizer=tokenizer, **options)
        return SelfSpec.from_contents(self.cache, config=config, **options)


class Writer:
    """One model with the settings of one command."""

    def __init__(
        self, loaded: Loaded, sampling: Sampling, max_new_tokens: int, start: Start | None = None
    ) -> None:
        import torch

        from selfspec import attach

        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        attach(self.model)
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.start = start or Start()
        # Without a given seed one is drawn, since torch starts every process with the same one.
        self.seed = torch.seed() % 2**32 if sampling.seed is None else sampling.seed
        self.reseed()

    @property
    def samples(self) -> bool:
        """Is the next token drawn, not the likeliest one?"""
        temperature = self.sampling.temperature
        return bool(self.model.generation_config.do_sample if temperature is None else temperature)

    @property
    def dtype(self) -> str:
        """The name of the model's dtype, as in ``--dtype``."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def in_half_precision(self) -> bool:
        """Does a forward of another width round so much that near-ties fall differently?"""
        return self.dtype in ("bfloat16", "float16")

    def __str__(self) -> str:
        if not self.samples:
            return "greedy"
        temperature = self.sampling.temperature or self.model.generation_config.temperature
        return f"sampling at temperature {temperature}, seed {self.seed}"

    def new_spec(self, config: SpecConfig) -> SelfSpec:
        """A new `SelfSpec` with the command's own start."""
        return self.start.new_spec(config, self.tokenizer)

    def origins(self, config: SpecConfig) -> list[str]:
        """Where drafted tokens can come from.

        A corpus is only in a cache. The n-grams that the context keeps come only from branches.
        """
        cache = self.start.cache
        has_corpus = cache is not None and cache.corpus is not None
        origins = [name for name in config.sources if name != "corpus" or has_corpus]
        if "context" in origins and config.num_branches:
            origins.insert(origins.index("context") + 1, "grams")
        return origins if self.start.draft_model is None else [*origins, DRAFT_MODEL]

    def reseed(self) -> None:
        """Makes the next draws the same as those after the start."""
        import torch

        torch.manual_seed(self.seed)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt; refuses one that leaves no room for `max_new_tokens`."""
        ids: list[int] = self.tokenizer(prompt)["input_ids"] if prompt else []
        if not ids:
            raise CliError("the prompt must not be empty (got no tokens); write some text")
        self.loaded.check_length(len(ids), self.max_new_tokens)
        return ids

    def encode_prediction(self, text: str | None) -> list[int] | None:
        """The ids of what the answer will probably look like, however long it is."""
        return None if text is None else self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def write(
        self,
        ids: Sequence[int],
        spec: SelfSpec | None,
        *,
        streamer: Any = None,
        kv: Any = None,
        max_new_tokens: int | None = None,
        prediction: Sequence[int] | None = None,
    ) -> Any:
        """Calls `generate()` with `ids`; without a `spec` it is the stock one.

        A streamer that has a method `hear` gets the record of each step, too.
        """
        import torch

        from selfspec.compat.generation import with_kv

        input_ids = torch.tensor([list(ids)], device=self.model.device)
        hear = getattr(streamer, "hear", None)
        hearing = spec.listening(hear) if spec and hear else nullcontext()
        with hearing:
            return self.model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant=spec,
                prediction=prediction,
                streamer=streamer,
                **with_kv(kv),
                return_dict_in_generate=True,
                max_new_tokens=max_new_tokens or self.max_new_tokens,
                **self.choice(),
            )

    def new_ids(self, ids: Sequence[int], spec: SelfSpec | None, **options: Any) -> list[int]:
        """What `write` writes behind the prompt; waits for the device."""
        output = self.write(ids, spec, **options)
        new_ids: list[int] = output.sequences[0, len(ids) :].tolist()
        return new_ids

    def choice(self) -> dict[str, Any]:
        """How the next token is chosen, as arguments of `generate()`."""
        temperature = self.sampling.temperature
        return {} if temperature is None else choice_of(temperature)
