"""A chat model of LangChain with a tool: `with_langchain.py URL chat|responses|anthropic|ollama`."""

import sys
from pathlib import Path

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

url, api = sys.argv[1:]
if api == "anthropic":
    model = ChatAnthropic(model="m", base_url=url, api_key="x")
elif api == "ollama":
    model = ChatOllama(model="m", base_url=url, validate_model_on_init=True, num_ctx=4096)
else:
    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="x", use_responses_api=api == "responses")


@tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


able = model.bind_tools([read_file])


def ask(messages, is_stream):
    if not is_stream:
        return able.invoke(messages)
    pieces = list(able.stream(messages))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    return whole


for is_stream in (False, True):
    messages = [HumanMessage("What does proof.txt say?")]
    messages.append(ask(messages, is_stream))
    calls = messages[-1].tool_calls
    messages += [ToolMessage(read_file.invoke(call["args"]), tool_call_id=call["id"]) for call in calls]
    print("streamed" if is_stream else "", ask(messages, is_stream).text)
