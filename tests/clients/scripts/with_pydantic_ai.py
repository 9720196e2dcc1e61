"""An agent of pydantic-ai: `with_pydantic_ai.py URL chat|responses|anthropic`."""

import sys
from collections.abc import AsyncIterable
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, api = sys.argv[1:]
match api:
    case "chat":
        model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
    case "responses":
        model = OpenAIResponsesModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
    case _:
        model = AnthropicModel("m", provider=AnthropicProvider(base_url=url, api_key="x"))
agent = Agent(model, system_prompt="Use the tools.")


@agent.tool_plain
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def listen(_: object, events: AsyncIterable[object]) -> None:
    """Somebody who listens makes it stream."""
    async for _ in events:
        pass


print(agent.run_sync("What does proof.txt say?").output)
print("streamed", agent.run_sync("What does proof.txt say?", event_stream_handler=listen).output)
