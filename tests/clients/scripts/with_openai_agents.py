"""An agent of openai-agents: `with_openai_agents.py URL chat|responses`."""

import asyncio
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

url, api = sys.argv[1:]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x")
kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel


@function_tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


agent = Agent("reader", instructions="Use the tools.", tools=[read_file], model=kind(model="m", openai_client=client))


async def main() -> None:
    print((await Runner.run(agent, "What does proof.txt say?")).final_output)
    streamed = Runner.run_streamed(agent, "What does proof.txt say?")
    async for _ in streamed.stream_events():
        pass
    print("streamed", streamed.final_output)


asyncio.run(main())
