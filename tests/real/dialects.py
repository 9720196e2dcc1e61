"""One question in four dialects: its body, the text of a whole answer and that of a stream."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.real.serving import Served

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where a dialect is asked, how limits and stop strings are called there, and where the text is."""

    path: str
    body: Callable[[str, int, Json], Json]
    text: Callable[[Json], str]
    delta: Callable[[Json], str]

    def ask(self, served: Served, model: str, prompt: str, tokens: int = 48, **sampling: Any) -> Json:
        body = {"model": model, "stream": False} | self.body(prompt, tokens, {"temperature": 0, **sampling})
        return served.post(self.path, body)

    def whole(self, served: Served, model: str, prompt: str, tokens: int = 48, **sampling: Any) -> str:
        return self.text(self.ask(served, model, prompt, tokens, **sampling))

    def deltas(self, served: Served, model: str, prompt: str, tokens: int = 48, **sampling: Any) -> Iterator[str]:
        """The texts of a stream's events, as they come."""
        body = {"model": model, "stream": True} | self.body(prompt, tokens, {"temperature": 0, **sampling})
        with served.client.stream("POST", self.path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                data = line.removeprefix("data: ")
                if data.startswith("{"):
                    yield self.delta(json.loads(data))

    def streamed(self, served: Served, model: str, prompt: str, tokens: int = 48, **sampling: Any) -> str:
        return "".join(self.deltas(served, model, prompt, tokens, **sampling))


def _messages(prompt: str) -> list[Json]:
    return [{"role": "user", "content": prompt}]


def _anthropic(prompt: str, tokens: int, sampling: Json) -> Json:
    if "stop" in sampling:
        sampling = sampling | {"stop_sequences": sampling["stop"]}
        del sampling["stop"]
    return {"messages": _messages(prompt), "max_tokens": tokens, **sampling}


def _ollama(prompt: str, tokens: int, sampling: Json) -> Json:
    return {"messages": _messages(prompt), "options": {"num_predict": tokens, **sampling}}


def _chat_delta(event: Json) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _anthropic_delta(event: Json) -> str:
    return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""


def _responses_text(answer: Json) -> str:
    messages = [item for item in answer["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


CHAT: Final = Dialect(
    "/v1/chat/completions",
    lambda prompt, tokens, sampling: {"messages": _messages(prompt), "max_tokens": tokens, **sampling},
    lambda answer: answer["choices"][0]["message"]["content"],
    _chat_delta,
)
ANTHROPIC: Final = Dialect(
    "/v1/messages", _anthropic, lambda answer: "".join(part["text"] for part in answer["content"]), _anthropic_delta
)
RESPONSES: Final = Dialect(
    "/v1/responses",
    lambda prompt, tokens, sampling: {"input": prompt, "max_output_tokens": tokens, **sampling},
    _responses_text,
    lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
)
OLLAMA: Final = Dialect(
    "/api/chat",
    _ollama,
    lambda answer: answer["message"]["content"],
    lambda event: event["message"]["content"],
)
DIALECTS: Final = {"chat": CHAT, "anthropic": ANTHROPIC, "responses": RESPONSES, "ollama": OLLAMA}
