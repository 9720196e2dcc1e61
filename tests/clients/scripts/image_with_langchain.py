"""A chat model of LangChain that is shown a file: `image_with_langchain.py URL chat|responses|anthropic FILE`."""

import base64
import sys
from pathlib import Path

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

url, api, file = sys.argv[1:]
if api == "anthropic":
    model = ChatAnthropic(model="m", base_url=url, api_key="x")
else:
    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="x", use_responses_api=api == "responses")

data = base64.b64encode(Path(file).read_bytes()).decode()
image = {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": data}
messages = [HumanMessage([{"type": "text", "text": "What is this?"}, image])]
print(model.invoke(messages).text)
print("".join(piece.text for piece in model.stream(messages)))
