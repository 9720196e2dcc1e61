"""`mlxctl bench`: measures latency and throughput of a model through the running daemon."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.command_failed import CommandFailed
from gateway.control_types import DaemonStatus
from gateway.ctl import client
from gateway.ctl.offline import Model
from gateway.ctl.tables import Json, print_json
from gateway.model_files.metadata import kind_of_files
from protocol.checkpoint import EMBED, RERANK

if TYPE_CHECKING:
    from gateway.ctl.bench.closed_loop import BenchLoad, Report

# Each client sends this many requests in a round.
REQUESTS: Final = 3
# The first request may have to load the model.
LOAD_TIMEOUT_S: Final = 3600.0
# Approximate tokens of a text that no embedding model cuts.
UNCUT_TOKENS: Final = 32


def bench(
    model: Model,
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent requests, measured in turn.")] = "1,4,8",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Approximate tokens of each prompt.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each request.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each client.")] = REQUESTS,
    json: Json = False,
) -> None:
    """Load a model with streams and show how long they wait for the first and the next tokens, and tokens per second.

    Of a model of embeddings it is texts a second; its tokens are those of the texts.
    It uses the running daemon as it is, over its own socket: no key is needed, and what others do meanwhile counts.

    Example: mlxctl bench demo --concurrency 1,4
    """
    rounds = _numbers(concurrency)
    reports = measure(model, rounds, prompt_tokens, tokens, requests)
    if json:
        print_json({"model": model, "prompt_tokens": prompt_tokens, "tokens": tokens, "reports": reports})
    else:
        from gateway.ctl.bench.closed_loop import as_table

        typer.echo(as_table(reports))
    for message in dict.fromkeys(message for one in reports for message in one.first_errors):
        typer.echo(f"mlxctl: {message}", err=True)
    if any(one.errors for one in reports):
        raise typer.Exit(1)


def measure(model: str, rounds: list[int], prompt_tokens: int, tokens: int, requests: int) -> "list[Report]":
    """Run the benchmark once for each number of clients in `rounds` and return the reports. Raises `CommandFailed`."""
    from gateway.ctl.bench.closed_loop import CHAT, EMBEDDING, BenchLoad, BenchRequest, Prompts, Target, run, sweep

    kind = _kind(client.status(), model)
    if kind == RERANK:
        raise CommandFailed(f"{model} scores pairs of texts: bench measures models of text and of embeddings")
    target = Target("mlxd", 80, socket=str(client.admin_socket()))
    # Texts beyond the longest input of an embedding model are cut to it.
    endpoint, extra = (EMBEDDING, {"truncate_prompt_tokens": -1}) if kind == EMBED else (CHAT, {"ignore_eos": True})
    sample = min(prompt_tokens, UNCUT_TOKENS) if kind == EMBED else prompt_tokens
    load = BenchLoad(target, model, endpoint, extra, LOAD_TIMEOUT_S)

    async def measured() -> "list[Report]":
        prompts = Prompts(seed=0, tokens_per_word=await _tokens_per_word(load, sample))
        return await sweep(
            load,
            rounds,
            lambda clients: [BenchRequest(prompts.make(prompt_tokens), tokens) for _ in range(clients * requests)],
        )

    return run(measured())


def _kind(status: DaemonStatus, name: str) -> str:
    """Return a model's kind, as its worker reports it or as its files show; empty for an unknown name."""
    base = name.partition(":")[0]
    for model in status.models:
        if {name, base} & {model.name, *model.aliases}:
            return model.kind or kind_of_files(model.path)
    return ""


async def _tokens_per_word(load: "BenchLoad", tokens: int) -> float:
    """Send a first request to measure the tokens per word. It also warms the model up. Raises `CommandFailed`."""
    from gateway.ctl.bench.closed_loop import BenchRequest, Prompts, closed_loop, report

    # The seed differs from that of the rounds, so that none of their prompts is cached.
    prompt = Prompts(seed=1).make(tokens)
    _, [reply] = await closed_loop(load, [BenchRequest(prompt, 2)], 1)
    if not reply.ok:
        raise CommandFailed("; ".join(report(1, 1.0, [reply]).first_errors))
    return max(reply.prompt_tokens, 1) / len(prompt.split())


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter("write numbers from 1 up, such as 1,4,8", param_hint="--concurrency")
    return numbers
