"""Builds a cache folder from a recipe and a model, in stages that can be resumed."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from selfspec.building.counting import Counting
from selfspec.building.documents import in_parts, read_documents
from selfspec.building.generations import Generations, read_answers
from selfspec.building.inputs import find_inputs, num_documents
from selfspec.building.limits import vocab_size
from selfspec.building.progress import Bars
from selfspec.building.recipe import Recipe
from selfspec.building.tokens import Encoder, Ids, each_token, encode_all, prefix_of
from selfspec.building.warmup import CallWorkers, Warmup
from selfspec.building.work_folder import WorkFolder, open_work_folder
from selfspec.cache import CacheContents, check_target, save_cache, tokenizer_info
from selfspec.draft.sources.corpus import CorpusTables
from selfspec.errors import BuildError
from selfspec.plugin.spec import SelfSpec

# What a worker counts at once holds some million tokens. More: fewer runs to merge, but more that
# a worker's end costs.
_SHARD_DOCUMENTS, _SHARD_CHARACTERS = 1 << 14, 1 << 22


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to build. None of these options changes a byte of the cache."""

    max_memory: int = 1_000_000_000  # bytes for counting n-grams, without tokenizer and model
    restart: bool = False  # Delete what an earlier start left, in place of going on from there.
    overwrite: bool = False  # Replace a cache folder that exists already.
    keep_work: bool = False  # Leave the work folder, with the generations in it.
    save_seconds: float = 10.0  # how often the warm-up writes down what was learned


class Builder:
    """One cache being built.

    Args:
        load_model: Called when the model itself is needed, not only its tokenizer.
        model_name: What the user called it; None for the embedded one.
        call_workers: Has documents read and counted by several `BuildWorker`s, elsewhere. The
            model then needs no weights here.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        load_model: Callable[[], Any],
        bars: Bars,
        options: BuildOptions,
        *,
        model_name: str | None,
        call_workers: CallWorkers | None = None,
    ) -> None:
        self._recipe = recipe
        self._inputs = find_inputs(recipe)
        self._tokenizer = tokenizer
        self._load_model = load_model
        self._bars = bars
        self._options = options
        self._model_name = model_name
        self._call_workers = call_workers
        # A model that is decoded plainly would teach nothing, so it is refused. The budget is fixed
        # because the same recipe must build the same cache, however fast the machine is.
        self._spec = SelfSpec(strict=recipe.wants_lut, budget="fixed", max_nodes=16)
        self._counts: dict[str, int] = {}
        self._min_counts: list[int] = []  # One for each length of prefix.
        self._check_template()

    def run(self, output: Path) -> CacheContents:
        """Builds the cache folder `output`; goes on where an earlier start was interrupted."""
        overwrite, restart = self._options.overwrite, self._options.restart
        target = check_target(output, overwrite=overwrite)
        self._check_data()
        with open_work_folder(target.with_suffix(""), self._identity(), restart=restart) as work:
            contents = self._contents(work)
            save_cache(target, contents, overwrite=overwrite)
            if not self._options.keep_work:
                shutil.rmtree(work.folder)
        return contents

    @cached_property
    def _model(self) -> Any:
        return self._load_model().eval()

    def _contents(self, work: WorkFolder) -> CacheContents:
        """Runs all stages one after the other; what an earlier start did is not done again."""
        recipe = self._recipe
        if recipe.generates:
            self._generate(work)
        elif recipe.wants_lut:
            self._warm_up(work)
        corpus = self._count(work) if recipe.wants_ngrams else None
        memory = self._spec.memory(vocab_size(self._model)) if recipe.wants_lut else None
        return CacheContents(
            tokenizer=tokenizer_info(self._tokenizer),
            tables=memory.tables() if memory else {},
            corpus=corpus,
            # Reading alone verifies no drafts, so there are no rates to keep.
            calibration=memory.calibration.rows() if memory and recipe.generates else None,
            about=self._about(),
        )

    def _generate(self, work: WorkFolder) -> None:
        stage = Generations(work, self._recipe, self._model, self._tokenizer, self._spec)
        bar = self._bars.stage("generating", self._total, done=stage.documents)
        if not stage.finished:
            stage.run(self._ids(stage.documents), bar)
        bar.end()
        self._counts |= {"prompts": stage.documents, "answers": stage.answers}
        self._check_some(stage.answers, "a prompt that the model can answer")

    def _warm_up(self, work: WorkFolder) -> None:
        seconds = self._options.save_seconds
        stage = Warmup(
            work,
            self._recipe,
            self._model,
            self._spec,
            save_seconds=seconds,
            prefix=prefix_of(self._recipe, self._tokenizer),
        )
        vocabulary = tokenizer_info(self._tokenizer).vocab_size
        known = vocabulary if self._recipe.reads_vocabulary else None
        total = self._recipe.warmup_tokens or known
        bar = self._bars.stage("reading", total, done=stage.tokens, tokens=stage.tokens)
        if not stage.finished:
            stage.run(self._ids(stage.documents), bar, self._call_workers)
        bar.end()
        self._counts["tokens_read"] = stage.tokens
        self._check_some(stage.tokens, "a document with text in it")

    def _count(self, work: WorkFolder) -> CorpusTables:
        size = tokenizer_info(self._tokenizer).vocab_size
        memory = self._options.max_memory
        stage = Counting(work, self._recipe, vocab_size=size, max_memory=memory)
        total = self._counts["answers"] if self._recipe.generates else self._total
        bar = self._bars.stage("counting", total, done=stage.documents, tokens=stage.tokens)
        if not stage.finished and self._call_workers is not None:
            documents = read_documents(self._recipe, self._inputs, stage.documents)
            shards = in_parts(documents, _SHARD_DOCUMENTS, _SHARD_CHARACTERS)
            stage.merge((each for _, each in self._call_workers("count", shards)), bar)
        elif not stage.finished:
            stage.run(self._to_count(work, stage.documents), bar)
        bar.end()
        self._check_some(stage.tokens, "a document with text in it")
        bar = self._bars.stage("merging", None)
        tables = stage.tables(bar)
        bar.end()
        self._min_counts = list(tables.min_counts)
        counted = stage.documents - stage.empty
        self._counts |= {"documents": counted, "tokens": stage.tokens, "left_out": stage.empty}
        return tables

    def _to_count(self, work: WorkFolder, skip: int) -> Iterator[Ids | None]:
        if self._recipe.generates:
            return read_answers(work.folder, skip)
        return self._ids(skip)

    def _ids(self, skip: int) -> Iterator[Ids | None]:
        """The token ids of the documents behind the first `skip`."""
        if self._recipe.reads_vocabulary:
            return each_token(self._tokenizer, skip)
        documents = read_documents(self._recipe, self._inputs, skip)
        return encode_all(documents, Encoder.of(self._recipe, self._tokenizer))

    @cached_property
    def _total(self) -> int | None:
        return num_documents(self._recipe, self._inputs)

    def _check_template(self) -> None:
        if self._recipe.uses_template and not self._tokenizer.chat_template:
            raise BuildError(
                "chat_template must be false where the tokenizer has no template; "
                "pass --no-chat-template, or name another --model"
            )

    def _check_data(self) -> None:
        """Reads the first document, so that data of the wrong kind is refused before any work."""
        if self._recipe.reads_vocabulary:
            return
        with closing(read_documents(self._recipe, self._inputs)) as documents:
            self._check_some(sum(1 for _ in islice(documents, 1)), "a document")

    def _check_some(self, number: int, what: str) -> None:
        if not number:
            raise BuildError(f"data must hold {what} (got {self._recipe.data!r})")

    def _identity(self) -> dict[str, Any]:
        """What must not have changed if a build is to go on from an earlier start."""
        asked = {"model": self._model_name or "embedded"} if self._asks_model else {}
        return {
            **self._recipe.as_dict(),
            **asked,
            "tokenizer": tokenizer_info(self._tokenizer).fingerprint,
            "files": self._inputs.fingerprint(),
        }

    @property
    def _asks_model(self) -> bool:
        return self._recipe.wants_lut or self._recipe.generates

    def _about(self) -> dict[str, Any]:
        """What the card says about the origin of a cache, without times, paths or machines."""
        public = _without_folders(self._recipe)
        recipe = public.as_dict()
        about = {key: recipe.pop(key) for key in ("name", "licence")}
        model = tokenizer_info(self._tokenizer).name or self._model_name
        asked = {"model": model} if self._asks_model else {}
        command = command_of(public, model if self._model_name else None)
        counts = {**self._counts, "min_counts": self._min_counts}
        return {**about, **asked, **counts, "recipe": recipe, "command": command}


def _without_folders(recipe: Recipe) -> Recipe:
    """The recipe as a card may show it to everybody: local files without their folders."""
    data = Path(recipe.data).expanduser()
    files = [Path(each).expanduser() for each in recipe.data_files]
    return replace(
        recipe,
        data=data.resolve().name if data.exists() else recipe.data,
        data_files=tuple(file.name if file.is_absolute() else str(file) for file in files),
    )


def command_of(recipe: Recipe, model_name: str | None) -> str:
    """A command that builds the same cache, in a normal form."""
    words = ["selfspec", "cache", "build", "FOLDER"]
    words += ["--model", model_name] if model_name else []
    for key, value in recipe.changed_keys().items():
        option = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, dict):
            words += [word for pair in value.items() for word in (option, "=".join(pair))]
        else:
            values = value if isinstance(value, list) else [value]
            words += [word for each in values for word in (option, str(each))]
    return shlex.join(words)
