"""A tiny tokenizer and model, documents to read, and a build that can be stopped anywhere."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from selfspec.building.build_worker import BuildWorker
from selfspec.building.builder import Builder, BuildOptions
from selfspec.building.progress import Bar, Bars
from selfspec.building.recipe import Recipe
from tests.conftest import TEMPLATE
from tests.tiny import LINES, make_model, make_tokenizer


class StoppingBars(Bars):
    """Raises `error` when the bars have moved so many times."""

    def __init__(self, moves: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        super().__init__(Console(quiet=True))
        self.moves = moves
        self.error = error

    def stage(self, *args: Any, **more: Any) -> Bar:
        bar = super().stage(*args, **more)
        advance = bar.advance

        def counted(amount: int, tokens: int = 0) -> None:
            advance(amount, tokens)
            if self.moves is not None:
                self.moves -= 1
                if self.moves == 0:
                    raise self.error

        bar.advance = counted  # type: ignore[method-assign]
        return bar


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The readers of `datasets` leave files to the garbage collector."""
    for item in items:
        if "loads_datasets" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"))


@pytest.fixture
def loads_datasets() -> Iterator[None]:
    """For a test that reads through `datasets`: what that leaves open ends with the test."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level, with a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def model(tokenizer) -> Any:
    return make_model(len(tokenizer)).eval()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Short documents that share n-grams."""
    return [f"{LINES[i % 3]}{LINES[(i + 1) % 3]}number {i}\n" for i in range(9)]


@pytest.fixture
def lines(tmp_path, texts) -> Path:
    """A paragraph a document; read with form="paragraph"."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(texts))
    return path


@pytest.fixture
def dialogue(tmp_path, loads_datasets) -> Path:
    """Conversations as ShareGPT has them."""
    path = tmp_path / "dialogue.jsonl"
    rows = [
        [{"from": "human", "value": f"say {i}"}, {"from": "gpt", "value": f"{i}, the quick fox"}]
        for i in range(6)
    ]
    path.write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def build(tokenizer, model) -> Callable[..., dict[str, bytes]]:
    """Builds a cache and returns its bytes."""

    def run(
        output: Path,
        bars: Bars | None = None,
        options: BuildOptions | None = None,
        *,
        by_workers: bool = False,
        **keys: Any,
    ) -> bytes:
        recipe = Recipe.of(**{"name": "tiny", "window": 16, "batch": 2, **keys})
        bars = bars or Bars(Console(quiet=True))
        options = options or BuildOptions(max_memory=10_000, save_seconds=0)
        worker = BuildWorker(recipe, tokenizer, lambda: model, max_memory=3_000)

        def call_workers(task: str, jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
            for job in jobs:
                yield job, getattr(worker, task)(job)

        builder = Builder(
            recipe,
            tokenizer,
            lambda: model,
            bars,
            options,
            model_name="tiny",
            call_workers=call_workers if by_workers else None,
        )
        with bars:
            builder.run(output)
        return output.with_name(f"{output.name}.safetensors").read_bytes()

    return run
