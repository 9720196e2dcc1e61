"""Measures the tokens per second of one stream from a running server.

Usage: `python -m deploy.demo_model.evaluate.speed http://127.0.0.1:8484/v1`.
"""

import argparse
import json
import os
import time
import urllib.request
from typing import Any, Final

REQUEST: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "Count from 1 to 60."}],
    "temperature": 0,
    "max_tokens": 128,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def stream(url: str, model: str) -> float:
    """Return tokens per second: the tokens after the first, divided by the time from the first piece of text to the
    last."""
    body = json.dumps({"model": model, **REQUEST}).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", body, {"Content-Type": "application/json"})
    times: list[float] = []
    tokens = 0
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if any(choice["delta"].get("content") for choice in event["choices"]):
                times.append(time.perf_counter())
    return (tokens - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--name", default="demo", help="the model's name on the server")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    stream(options.url, options.name)  # this request loads the model
    speeds = sorted(stream(options.url, options.name) for _ in range(options.runs))
    print(
        f"one stream, {options.runs} runs: best {speeds[-1]:.0f}, median {speeds[len(speeds) // 2]:.0f} tokens/s"
        f" at a load of {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
