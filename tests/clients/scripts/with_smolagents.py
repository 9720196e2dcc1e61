"""An agent of smolagents that calls tools: `with_smolagents.py URL chat`."""

import sys
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

url, _ = sys.argv[1:]


@tool
def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: the file
    """
    return Path(path).read_text()


model = OpenAIServerModel("m", api_base=f"{url}/v1", api_key="x")
for is_stream in (False, True):
    agent = ToolCallingAgent(tools=[read_file], model=model, stream_outputs=is_stream)
    print("streamed" if is_stream else "", agent.run("What does proof.txt say?"))
