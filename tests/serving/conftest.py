"""A tiny model behind the application, and clients of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("fastapi", reason="needs the extra: pip install '.[serve]'")

from openai import OpenAI
from starlette.testclient import TestClient

from selfspec import SelfSpec
from selfspec.batch.prompt_maker import PromptMaker
from selfspec.cli.batch_file import results
from selfspec.cli.prompt_files import read_line
from selfspec.serving.app import application
from selfspec.serving.images import ImageReader
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.translator import PromptTranslator
from selfspec.session import Session
from tests.processors import seeing_pair
from tests.sessions import alone

NAME = "tiny"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


class Served:
    """A model that answers, and a client."""

    def __init__(
        self, folder: str, *, max_positions: int | None = 512, gate: Any = None, **options: Any
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.spec, self.spec_of_files = (SelfSpec(max_nodes=6, budget="fixed") for _ in range(2))
        options = {"max_rows": 3, "max_memory": 1 << 24, **options}
        self.thread = ModelThread(self.model, self.tokenizer, self.spec, **options)
        vocab_size = self.model.config.vocab_size
        self.translator = PromptTranslator(self.tokenizer, vocab_size, max_positions)
        self.app = application(self.thread, name=NAME, translator=self.translator, **(gate or {}))
        self.client = TestClient(self.app, base_url="http://localhost")
        self.add_extra(self.thread.maker)

    def extra(self, prompt: Any) -> dict[str, Any]:
        """Further arguments of `generate()`."""
        return {}

    def add_extra(self, maker: PromptMaker) -> None:
        """Lets each prompt have further arguments."""
        prepared = maker.prompt

        def extended(
            index: int, inputs: Any, seed: Any, arguments: dict[str, Any], *others: Any
        ) -> Any:
            return prepared(index, inputs, seed, {**arguments, **self.extra(inputs)}, *others)

        maker.prompt = extended  # type: ignore[method-assign]

    def in_file(self, body: dict[str, Any]) -> Any:
        """The answer that a batch file has for a body."""
        session = Session(self.spec_of_files.runner(self.model), self.spec_of_files)
        maker = PromptMaker(self.model, self.tokenizer, self.spec_of_files)
        self.add_extra(maker)
        lines = [read_line(1, json.dumps({"body": body}).encode())]
        (result,) = results(lines, session, maker, self.translator, model_name=NAME, seed=0)
        return json.loads(result.text)["response"]["body"]

    def choices_in_file(self, body: dict[str, Any]) -> Any:
        return self.in_file(body)["choices"]

    def post(self, path: str, body: Any) -> Any:
        """The response. Bytes are sent as they are, and halves of characters are escaped."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.client.post(path, content=data)

    def ask(self, path: str, **body: Any) -> Any:
        """The answer's JSON; the request must succeed."""
        response = self.post(path, {"model": NAME, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def text_alone(self, ids: list[int], seed: int = 0, **options: Any) -> str:
        """What stock's own call writes."""
        return self.tokenizer.decode(
            alone(self.model, ids, seed, **options), skip_special_tokens=True
        )


@contextmanager
def seeing_client(
    pair: tuple[Any, Any], translator_type: type[PromptTranslator] = PromptTranslator
) -> Iterator[Any]:
    """A client of a model that sees, with its thread."""
    model, processor = pair
    spec = SelfSpec(max_nodes=6, budget="fixed")
    thread = ModelThread(model, processor.tokenizer, spec, max_rows=4, max_memory=1 << 24)
    thread.start()
    vocab_size = model.config.text_config.vocab_size
    translator = translator_type(
        processor.tokenizer, vocab_size, 512, images=ImageReader(processor)
    )
    with TestClient(
        application(thread, name=NAME, translator=translator), "http://localhost"
    ) as made:
        made.thread = thread
        yield made


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model that sees, and its processor."""
    return seeing_pair()


@pytest.fixture(scope="module")
def served(chat_folder: str) -> Iterator[Served]:
    served = Served(chat_folder)
    served.thread.start()
    with served.client:
        yield served


@pytest.fixture
def client(served: Served) -> OpenAI:
    """OpenAI's own, of that server."""
    return OpenAI(base_url="http://localhost/v1", api_key="none", http_client=served.client)
