"""A scripted worker that says what it is told: a last message that is a JSON list of events is generated as such.

`[["text", "Hi"], ["reasoning", "hm"], ["tool", "f", "{}"], ["logprobs", "Hi"], ["finish", "stop"]]`, one step each;
A third word of `finish` is the stop string that was found. `["wait"]` pauses, `["hold", PATH]` waits for a file,
`["progress"]` only tells that the prompt is being processed, `["deadline"]` says what is left in ms.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from scripted import PROMPT_TOKENS, Scripted, main

from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Delta, DeltaKind, Finish, Progress, TokenLogprob, ToolCallDelta, Usage
from protocol.to_worker import ChatPrompt, Generate, TextPrompt

# A reader on a busy machine has what came before the pause by then.
WAIT_S = 0.1


class Talkative(Scripted):
    def generate(self, request: Generate) -> None:
        match request.prompt:
            case ChatPrompt(messages=messages):
                said = str(messages[-1]["content"])
            case TextPrompt(text=text):
                said = text
            case _:
                said = ""
        if not said.startswith("[["):
            super().generate(request)
            return
        self.send(Accepted(request.rid, PROMPT_TOKENS))
        tools = 0
        for index, event in enumerate(json.loads(said)):
            if event == ["wait"]:
                time.sleep(WAIT_S)
                continue
            if event[0] == "hold":
                while not Path(event[1]).exists():
                    time.sleep(0.005)
                continue
            if event == ["deadline"]:
                event = ["text", str(request.deadline_ms)]
            if event == ["progress"]:
                self.send(Progress(request.rid, index, 100))
                continue
            if event[0] == "progress":
                self.send(Progress(request.rid, *map(int, event[1:])))
                continue
            deltas, tools = events(request.rid, event, tools, index)
            for delta in deltas:
                self.send_step([delta])


def events(rid: int, event: list[Any], tools: int, index: int) -> tuple[list[Delta], int]:
    match event:
        case ["text", text]:
            return [Delta(rid, text=text, token_ids=(index,))], tools
        case ["reasoning", text]:
            return [Delta(rid, DeltaKind.REASONING, text, (index,))], tools
        case ["tool", name, arguments]:
            half = len(arguments) // 2
            return [
                Delta(rid, DeltaKind.TOOL_BEGIN, "", (index,), ToolCallDelta(tools, f"call_{tools}", name)),
                Delta(rid, DeltaKind.TOOL_ARGS, arguments[:half], (index,), ToolCallDelta(tools)),
                Delta(rid, DeltaKind.TOOL_ARGS, arguments[half:], (index,), ToolCallDelta(tools)),
                Delta(rid, DeltaKind.TOOL_END, "", (), ToolCallDelta(tools)),
            ], tools + 1
        case ["logprobs", text]:
            logprob = TokenLogprob(text.encode(), -0.5, ((text.encode(), -0.5), (b"other", -1.5)))
            return [Delta(rid, text=text, token_ids=(index,), logprobs=(logprob,))], tools
        case ["finish", name, *stop]:
            usage = Usage(PROMPT_TOKENS, 1, index, reasoning=1, queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0)
            failure = Failure(Code.ROW_FAILED, "it failed") if name == "error" else None
            finish = Finish[name.upper()]
            return [Delta(rid, finish=finish, usage=usage, failure=failure, stop="".join(stop))], tools
        case _:
            raise ValueError(f"unknown event {event}")


if __name__ == "__main__":
    sys.exit(main(Talkative))
