"""A loaded model that continues prompts, with drafts or as stock does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from selfspec.cli.shared.messages import show_log, working
from selfspec.cli.shared.options import DraftOptions, ModelOptions, RunOptions, WriteOptions
from selfspec.errors import CliError
from selfspec.machine.memory import amount_in_bytes
from selfspec.records import DRAFT_MODEL

if TYPE_CHECKING:
    from selfspec import SelfSpec, SpecConfig
    from selfspec.cache import CacheContents
    from selfspec.cli.shared.model_loading import Loaded

T = TypeVar("T")

# Under --max-memory each of many texts has room for this number of tokens, if layers have to be
# streamed. Two more have room beside them: one that is being read, and one for dividing rows anew.
TOKENS_A_TEXT = 512
OTHER_TEXTS = 2


class Start(NamedTuple):
    """What every `SelfSpec` of a command starts with."""

    cache: CacheContents | None = None
    remember: str | None = None
    draft_model: Any = None

    def new_spec(self, config: SpecConfig, tokenizer: Any) -> SelfSpec:
        """A new `SelfSpec`, which knows what the cache and the remembered file hold."""
        from selfspec import SelfSpec

        options: dict[str, Any] = {"remember": self.remember, "draft_model": self.draft_model}
        return SelfSpec(config, tokenizer=tokenizer, contents=self.cache, **options)


def checked(asked: ModelOptions, config: T) -> T:
    """Refuses models and amounts that can't be, without torch; shows the log from now on."""
    from selfspec.cli.shared.model_loading import check_model

    show_log(asked.verbose)
    check_model(asked.model)
    if isinstance(asked, RunOptions) and asked.max_memory is not None:
        amount_in_bytes(asked.max_memory, whole=1, name="--max-memory")
    if isinstance(asked, DraftOptions):
        check_model(asked.draft_model, "--draft-model")
    return config


@contextmanager
def loaded(asked: WriteOptions, *, chats: bool = False, num_texts: int = 0) -> Iterator[Writer]:
    """The model, loaded and ready to write."""
    with working(f"Loading {asked.title}"):
        model, start = opened(asked, chats=chats, num_texts=num_texts)
        writer = Writer(model, asked, start)
    yield writer


def opened(asked: DraftOptions, *, chats: bool = False, num_texts: int = 0) -> tuple[Loaded, Start]:
    """The model, and what drafts start with.

    Under `--max-memory` room is set aside for `num_texts` texts, or for a long one. Tokenizer and
    caches are quick to read, so their faults are told before the model is read.
    """
    from selfspec.cache import Remembered, load_cache
    from selfspec.cli.shared.model_loading import TINY, Loaded, load_model, load_tokenizer

    tokenizer = load_tokenizer(asked)
    if chats and not tokenizer.chat_template:
        raise CliError(
            f"chat needs a MODEL with a chat template, and {asked.model!r} has none; name another, "
            "or continue text with 'selfspec generate'"
        )
    held = None if asked.cache is None else load_cache(asked.cache, tokenizer=tokenizer)
    if asked.remember is not None:
        Remembered(asked.remember, tokenizer, saves=False)  # Refuses a file of another tokenizer.
    small = None
    if asked.draft_model is not None:
        options = ModelOptions(model=asked.draft_model, device=asked.device, dtype=asked.dtype)
        small = load_model(options, "draft model")
    room = (TOKENS_A_TEXT, num_texts + OTHER_TEXTS) if num_texts else (2048, 1)
    model = load_model(asked, max_length=room[0], max_texts=room[1], draft_model=small)
    loaded = Loaded(asked.model or TINY.name, model, tokenizer)
    return loaded, Start(held, asked.remember, small)


def memory_of_texts(
    model: Any, draft_model: Any, max_memory: str | None, num_texts: int
) -> int | None:
    """What the keys and values of all texts may take: what the models leave of `--max-memory`."""
    if max_memory is None:
        return None
    from selfspec.run.backends import kv_bytes_per_token

    num_tokens = TOKENS_A_TEXT * (num_texts + OTHER_TEXTS)
    weights, set_aside = _weight_bytes(model), num_tokens * kv_bytes_per_token(model)
    left = amount_in_bytes(max_memory, weights + set_aside) - weights
    if draft_model is not None:  # It keeps the texts' keys and values, too.
        left -= _weight_bytes(draft_model) + num_tokens * kv_bytes_per_token(draft_model)
    return max(left, set_aside)


def _weight_bytes(model: Any) -> int:
    return sum(each.nbytes for each in model.parameters())


class Writer:
    """One model with the settings of one command."""

    def __init__(self, loaded: Loaded, asked: WriteOptions, start: Start | None = None) -> None:
        import torch

        from selfspec import attach

        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        attach(self.model)
        self.asked = asked
        self.start = start or Start()
        # Without a given seed one is drawn, since torch starts every process with the same one.
        self.seed = torch.seed() % 2**32 if asked.seed is None else asked.seed
        self.reseed()

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        own, temperature = self.model.generation_config, self.asked.temperature
        if not (own.do_sample if temperature is None else temperature):
            return "greedy"
        return f"sampling at temperature {temperature or own.temperature}, seed {self.seed}"

    def new_spec(self, config: SpecConfig) -> SelfSpec:
        """A new `SelfSpec` with the command's own start."""
        return self.start.new_spec(config, self.tokenizer)

    def origins(self, config: SpecConfig) -> list[str]:
        """Where drafted tokens can come from. A corpus is only in a cache."""
        cache = self.start.cache
        has_corpus = cache is not None and cache.corpus is not None
        origins = [name for name in config.sources if name != "corpus" or has_corpus]
        return origins if self.start.draft_model is None else [*origins, DRAFT_MODEL]

    def reseed(self) -> None:
        """Makes the next draws the same as those after the start."""
        import torch

        torch.manual_seed(self.seed)

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
        with spec.listening(hear) if spec and hear else nullcontext():
            return self.model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant=spec,
                prediction=prediction,
                streamer=streamer,
                **with_kv(kv),
                return_dict_in_generate=True,
                max_new_tokens=max_new_tokens or self.asked.max_new_tokens,
                **self.choice(),
            )

    def new_ids(self, ids: Sequence[int], spec: SelfSpec | None, **options: Any) -> list[int]:
        """What `write` writes behind the prompt; waits for the device."""
        output = self.write(ids, spec, **options)
        new_ids: list[int] = output.sequences[0, len(ids) :].tolist()
        return new_ids

    def choice(self) -> dict[str, Any]:
        """How the next token is chosen, as arguments of `generate()`."""
        from selfspec.serving.schema import choice_of

        temperature = self.asked.temperature
        return {} if temperature is None else choice_of(temperature)
