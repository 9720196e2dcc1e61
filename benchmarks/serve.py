"""Load any OpenAI-compatible server with streaming requests and report latency percentiles and tokens per second.

    python -m benchmarks.serve --url http://127.0.0.1:8484 --model demo --concurrency 1,8 --requests 32

Requests are greedy, in a closed loop, with prompts that share no beginning. Prompt lengths are exact when
`--tokenizer` names the model's folder, else about 1.5 tokens are taken for a word (`prompt_tokens` in the JSON is what
the server counted).
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.words import TokenPrompts, load_tokenizer
from gateway.ctl.bench.closed_loop import (
    CHAT,
    COMPLETION,
    BenchConnection,
    BenchLoad,
    BenchRequest,
    Prompts,
    Report,
    Target,
    as_table,
    closed_loop,
    run,
    sweep,
)


def main() -> None:
    args = _arguments()
    exact = TokenPrompts(load_tokenizer(args.tokenizer), args.seed) if args.tokenizer else None
    reports = run(measure(args, exact or Prompts(args.seed)))
    print(as_table(reports))
    for message in dict.fromkeys(message for one in reports for message in one.first_errors):
        print(f"error: {message}", file=sys.stderr)
    if args.json:
        result = {
            "url": args.url,
            "model": args.model,
            "endpoint": args.endpoint,
            "seed": args.seed,
            "reports": reports,
        }
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if any(one.errors for one in reports):
        sys.exit(1)


async def measure(args: argparse.Namespace, prompts: Prompts) -> list[Report]:
    """Warm up, then measure; return one report for each concurrency."""
    target = parse_url(args.url, args.api_key)
    model = args.model or await first_model(target)
    extra = msgspec.json.decode(args.extra.encode(), type=dict[str, Any])
    load = BenchLoad(target, model, args.endpoint, extra, args.timeout)
    source = random.Random(args.seed)
    if args.warmup:
        await closed_loop(load, _jobs(args, prompts, source, args.warmup), max(args.concurrency))
    return await sweep(load, args.concurrency, lambda _: _jobs(args, prompts, source, args.requests))


def parse_url(url: str, api_key: str = "") -> Target:
    """Parse a base URL with or without `/v1`. Raises ValueError."""
    parts = urlsplit(url if "//" in url else "http://" + url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http or https URL: {url}")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, parts.port or (443 if tls else 80), prefix, tls, api_key)


async def first_model(target: Target) -> str:
    """Return the first model that the server lists. Exits with a message if there is none."""
    connection = BenchConnection(target)
    reply = await connection.request("/v1/models", timeout_s=30)
    await connection.close()
    try:
        return msgspec.json.decode(reply.body)["data"][0]["id"]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        sys.exit(f"the server lists no model ({reply.error or f'HTTP {reply.status}'}); name one with --model")


def _jobs(args: argparse.Namespace, prompts: Prompts, source: random.Random, count: int) -> list[BenchRequest]:
    return [
        BenchRequest(prompts.make(source.randint(*args.prompt_tokens)), source.randint(*args.output_tokens))
        for _ in range(count)
    ]


def numbers(text: str) -> list[int]:
    """Parse `1,4,8` as a list of positive numbers."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return values


def bounds(text: str) -> tuple[int, int]:
    """Parse `128` or `64-256` as a range."""
    low, _, high = text.partition("-")
    first, last = int(low), int(high or low)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError("write N or LOW-HIGH, from 1 up")
    return first, last


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8484")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--endpoint", choices=(COMPLETION, CHAT), default=COMPLETION)
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 8, 16], help="such as 1,4,8,16")
    parser.add_argument("--requests", type=int, default=32, help="for each concurrency")
    parser.add_argument("--prompt-tokens", type=bounds, default=(205, 205), help="N or LOW-HIGH")
    parser.add_argument("--output-tokens", type=bounds, default=(128, 128), help="N or LOW-HIGH")
    parser.add_argument("--tokenizer", type=Path, help="the model's folder, for exact prompt lengths")
    parser.add_argument("--warmup", type=int, default=2, help="requests that are not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extra", default="{}", help="JSON added to each body, such as '{\"ignore_eos\": true}'")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
