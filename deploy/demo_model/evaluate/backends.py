"""Backends that answer during a measurement of the demo model: mlx-lm, transformers, or a running server."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.demo_model.corpus.samples import Sample
from deploy.demo_model.train.tokenizer import Renderer

LIMIT: Final = 400
_CALL: Final = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(slots=True)
class Reply:
    """Model's reply: answer text, reasoning, tool calls, and whether the model ended the reply."""

    text: str
    thought: str | None
    calls: list[dict[str, Any]]
    stopped: bool


Answer = Callable[[list[Sample]], list[Reply]]


def parse(raw: str, *, stopped: bool) -> Reply:
    """Split a model's raw text into a reply. Malformed markup stays in the reply's text, which then counts as wrong."""
    thought = None
    if raw.startswith("<think>\n") and "</think>" in raw:
        inner, raw = raw.removeprefix("<think>\n").split("</think>", 1)
        thought, raw = inner.strip(), raw.removeprefix("\n\n")
    calls: list[dict[str, Any]] = []
    for found in _CALL.findall(raw):
        try:
            calls.append(json.loads(found))
        except ValueError:
            return Reply(raw, thought, [], stopped)
    return Reply(_CALL.sub("", raw).strip("\n"), thought, calls, stopped)


def mlx(folder: Path) -> Answer:
    """Return a backend that runs mlx-lm in the worker's CPU precision, one sample at a time: batches gain nothing on a
    CPU."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm import load, stream_generate

    model, wrapped = load(str(folder))[:2]
    model.update(tree_map(lambda w: w.astype(mx.float32), model.parameters()))
    renderer = Renderer()

    def one(sample: Sample) -> Reply:
        prompt = wrapped.encode(renderer.prompt(sample), add_special_tokens=False)
        parts = list(stream_generate(model, wrapped, prompt, max_tokens=LIMIT))
        return parse("".join(part.text for part in parts), stopped=parts[-1].finish_reason == "stop")

    return lambda samples: [one(sample) for sample in samples]


def torch_batches(folder: Path, size: int = 500) -> Answer:
    """Return a backend that runs transformers on batches of `size` samples, on a GPU if there is one."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    bpe = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end, pad = bpe.token_to_id("<|im_end|>"), bpe.token_to_id("<|endoftext|>")
    renderer = Renderer()

    def answer(samples: list[Sample]) -> list[Reply]:
        prompts = [e.ids for e in bpe.encode_batch([renderer.prompt(sample) for sample in samples])]
        replies: dict[int, Reply] = {}
        order = sorted(range(len(samples)), key=lambda i: len(prompts[i]))
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            width = max(len(prompts[i]) for i in chosen)
            ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in chosen]).to(device)
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen]).to(device)
            with torch.no_grad():
                out = model.generate(
                    ids, attention_mask=mask, max_new_tokens=LIMIT, do_sample=False, eos_token_id=end, pad_token_id=pad
                )
            for i, row in zip(chosen, out[:, width:].tolist(), strict=True):
                stopped = end in row
                replies[i] = parse(
                    bpe.decode(row[: row.index(end)] if stopped else row, skip_special_tokens=False), stopped=stopped
                )
        return [replies[i] for i in range(len(samples))]

    return answer


def openai(url: str, model: str, key: str = "", concurrency: int = 8) -> Answer:
    """Return a backend that sends requests to a running server over HTTP, at most `concurrency` at a time."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def one(sample: Sample) -> Reply:
        body = json.dumps(_chat(sample, model)).encode()
        request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return _reply(json.load(response)["choices"][0])
        except urllib.error.HTTPError as error:
            raise SystemExit(f"the server says {error.code}: {error.read().decode(errors='replace')}") from None

    def answer(samples: list[Sample]) -> list[Reply]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, samples))

    return answer


def _chat(sample: Sample, model: str) -> dict[str, Any]:
    """Return the sample as the body of a client's request."""
    messages = json.loads(json.dumps(sample.messages[:-1]))
    for message in messages:
        for index, call in enumerate(message.get("tool_calls") or ()):
            call.setdefault("id", f"call_{index}")
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": LIMIT}
    if sample.tools:
        body["tools"] = sample.tools
    if sample.thinking:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body


def _reply(choice: dict[str, Any]) -> Reply:
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"name": each["name"], "arguments": _arguments(each["arguments"])} for each in functions]
    return Reply(
        (message.get("content") or "").strip("\n"),
        message.get("reasoning_content") or message.get("reasoning"),
        calls,
        choice["finish_reason"] in ("stop", "tool_calls"),
    )


def _arguments(text: str) -> Any:
    """Decode the arguments of a call. Text that is not JSON is returned unchanged, and counts as wrong."""
    try:
        return json.loads(text)
    except ValueError:
        return text
