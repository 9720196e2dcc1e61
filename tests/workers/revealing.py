"""A scripted worker whose answer is how it was asked: the priority and the cache salt of the request."""

import json
import sys

from scripted import PROMPT_TOKENS, Scripted, main

from protocol.from_worker import Accepted, Delta, Finish, Usage
from protocol.to_worker import Generate


class Revealing(Scripted):
    def generate(self, request: Generate) -> None:
        said = json.dumps({"priority": request.priority, "cache_salt": request.cache_salt})
        usage = Usage(PROMPT_TOKENS, 0, 1)
        self.send(Accepted(request.rid, PROMPT_TOKENS))
        self.send_step([Delta(request.rid, text=said, token_ids=(1,), finish=Finish.STOP, usage=usage)])


if __name__ == "__main__":
    sys.exit(main(Revealing))
