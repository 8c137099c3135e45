"""Clients of OpenAI's protocol take their own first steps with the server, without a network.

A test is skipped where its client isn't installed: `pip install openai-agents langchain-openai
'pydantic-ai-slim[openai]'`. The model is a random one, so that its words mean nothing.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("llguidance", reason="needs the extra: pip install '.[grammar]'")

from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.serving.conftest import NAME
from tests.serving.test_listening import Address, listening

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

QUESTION = "What is the weather in Paris?"
LENGTH = 200
ENDS = {"logit_bias": {"1": 100}}  # The end of a text, wherever a grammar allows it.


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    is_sunny: bool


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Clients leave sockets, whose warnings belong to the test."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def address(chat_folder: str) -> Iterator[Address]:
    with listening(chat_folder, max_positions=4096) as address:
        yield address


@pytest.fixture
def where(address: Address) -> dict[str, Any]:
    return {"base_url": f"http://127.0.0.1:{address.port}/v1", "api_key": "none"}


def test_agents_with_a_tool(where: dict[str, Any]) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    cities = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Says how the weather is."""
        cities.append(city)
        return "sunny"

    async def run(streams: bool) -> Any:
        model = agents.OpenAIResponsesModel(model=NAME, openai_client=AsyncOpenAI(**where))
        choice = agents.ModelSettings(tool_choice="required", max_tokens=LENGTH, extra_body=ENDS)
        agent = agents.Agent(
            name="fox",
            instructions="Be brief.",
            model=model,
            tools=[weather],
            model_settings=choice,
        )
        if not streams:
            return await agents.Runner.run(agent, QUESTION, max_turns=4)
        streamed = agents.Runner.run_streamed(agent, QUESTION, max_turns=4)
        async for _event in streamed.stream_events():
            pass
        return streamed

    for streams in (False, True):
        result = asyncio.run(run(streams))
        assert isinstance(result.final_output, str)
    assert cities


def test_langchain_by_responses(where: dict[str, Any]) -> None:
    openai = pytest.importorskip("langchain_openai")
    asked = {**where, "model": NAME, "use_responses_api": True, "temperature": 0}
    model = openai.ChatOpenAI(**asked, max_tokens=LENGTH)
    whole = model.invoke([("system", "Be brief."), ("user", QUESTION)])
    streamed = list(model.stream([("system", "Be brief."), ("user", QUESTION)]))
    assert whole.text == "".join(each.text for each in streamed)
    assert whole.usage_metadata["input_tokens"] > 0
    tool = {"name": "weather", "description": "Says it.", "parameters": Weather.model_json_schema()}
    (call,) = (
        model.bind_tools(
            [{"type": "function", "function": tool}],
            tool_choice="weather",
            parallel_tool_calls=False,
        )
        .invoke(QUESTION)
        .tool_calls
    )
    assert call["name"] == "weather"
    assert {*call["args"]} == {"city", "is_sunny"}
    assert isinstance(model.with_structured_output(Weather).invoke(QUESTION), Weather)


def test_pydantic_ai_by_responses(where: dict[str, Any]) -> None:
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel(NAME, provider=OpenAIProvider(**where))
    agent = ai.Agent(model, instructions="Be brief.", model_settings={"max_tokens": LENGTH})
    assert isinstance(agent.run_sync(QUESTION).output, str)
    typed = ai.Agent(model, output_type=Weather, model_settings={"temperature": 0})
    assert isinstance(typed.run_sync(QUESTION).output, Weather)

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as result:
            return str(await result.get_output())

    assert asyncio.run(streamed())
