"""litellm with a tool: `with_litellm.py URL openai|anthropic|ollama_chat`."""

import json
import sys
from pathlib import Path

import litellm

url, api = sys.argv[1:]
base = f"{url}/v1" if api == "openai" else url
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def ask(messages, is_stream):
    fields = {"model": f"{api}/m", "api_base": base, "api_key": "x", "messages": messages, "tools": [TOOL]}
    if not is_stream:
        return litellm.completion(**fields)
    return litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)), messages=messages)


for is_stream in (False, True):
    messages = [{"role": "user", "content": "What does proof.txt say?"}]
    answer = ask(messages, is_stream).choices[0].message
    messages.append(answer.model_dump())
    for call in answer.tool_calls:
        found = Path(json.loads(call.function.arguments)["path"]).read_text()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    print("streamed" if is_stream else "", ask(messages, is_stream).choices[0].message.content)
