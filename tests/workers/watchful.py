"""A scripted worker that plays an agent's model with eyes: it calls a tool that reads a file, and says what it saw.

The path of the file stands in the user's words between `[[` and `]]`, which clients' own instructions may hold too. The
answer names the digest of each image, or repeats the result of a tool that shows none.
"""

import json
import re
import sys
from typing import Any

import msgspec
from scripted import PROMPT_TOKENS, Scripted, main
from talkative import events

from protocol.from_worker import Accepted, Ready
from protocol.to_worker import ChatPrompt, Generate


class Watchful(Scripted):
    def ready(self) -> Ready:
        return msgspec.structs.replace(super().ready(), modalities=("image",))

    def generate(self, request: Generate) -> None:
        assert isinstance(request.prompt, ChatPrompt)
        self.send(Accepted(request.rid, PROMPT_TOKENS))
        tools = 0
        for index, event in enumerate(script(request.prompt)):
            deltas, tools = events(request.rid, event, tools, index)
            for delta in deltas:
                self.send_step([delta])


def script(prompt: ChatPrompt) -> list[Any]:
    """The next turn of the model."""
    if prompt.media:
        seen = " ".join(f"{medium.kind}:{medium.digest.hex()}" for medium in prompt.media)
        return [["text", f"I see {seen}"], ["finish", "stop"]]
    read = next((tool["function"] for tool in prompt.tools if tool["function"]["name"].lower() == "read"), None)
    said = "\n".join(str(message["content"]) for message in prompt.messages if message["role"] == "user")
    path = re.search(r"\[\[(/.+?)\]\]", said)
    result = next((message for message in prompt.messages if message["role"] == "tool"), None)
    if result is not None:
        return [["text", f"I see no picture: {result['content']}"], ["finish", "stop"]]
    if read is None or path is None:
        return [["text", "A picture"], ["finish", "stop"]]
    return [["tool", read["name"], json.dumps({"file_path": path[1]})], ["finish", "tool_calls"]]


if __name__ == "__main__":
    sys.exit(main(Watchful))
