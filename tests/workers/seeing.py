"""A scripted worker that takes media, and answers with the prompt, the media and the options that it was given."""

import json
import sys
from typing import Any

import msgspec
from scripted import Scripted, main

from protocol.from_worker import Accepted, Delta, Finish, Ready, Tokenized, Usage
from protocol.to_worker import ChatPrompt, Down, Generate, Tokenize

TOKENS_OF_ONE = 16


class Seeing(Scripted):
    def ready(self) -> Ready:
        return msgspec.structs.replace(super().ready(), modalities=("image", "video", "audio"))

    def handle(self, message: Down) -> None:
        if isinstance(message, Tokenize):
            self.send(Tokenized(message.rid, 3 + self.media_tokens(message.prompt)))
        else:
            super().handle(message)

    def generate(self, request: Generate) -> None:
        prompt = request.prompt
        chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt([])
        media: list[dict[str, Any]] = [
            {"kind": m.kind, "digest": m.digest.hex(), "data": m.data.hex(), "options": m.options, "param": m.param}
            for m in chat.media
        ]
        options = {name: getattr(request, name) for name in ("max_tokens", "stop", "thinking_budget")}
        options |= msgspec.structs.asdict(request.sampling)
        options |= {name: getattr(chat, name) for name in ("must_call", "callable_tools", "thinking")}
        said = json.dumps({"messages": chat.messages, "media": media, "tools": chat.tools, "options": options})
        tokens = self.media_tokens(prompt)
        images, audio = (sum(TOKENS_OF_ONE for each in chat.media if each.kind == kind) for kind in ("image", "audio"))
        usage = Usage(3 + tokens, 0, 1, image_tokens=images, audio_tokens=audio)
        self.send(Accepted(request.rid, 3 + tokens))
        self.send_step([Delta(request.rid, text=said, token_ids=(1,), finish=Finish.STOP, usage=usage)])

    @staticmethod
    def media_tokens(prompt: object) -> int:
        return TOKENS_OF_ONE * len(prompt.media) if isinstance(prompt, ChatPrompt) else 0


if __name__ == "__main__":
    sys.exit(main(Seeing))
