"""Lists of unequal requests, the loop and the client that serve them, and what is recorded of it."""

import asyncio
import statistics
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from benchmarks import models
from benchmarks.bare import Answer, Order, obey
from benchmarks.traffic import lengths, records
from benchmarks.traffic.drive import Load, Outcome, Run, send
from benchmarks.traffic.lengths import Turn, arrivals, sessions
from benchmarks.traffic.records import Place, Point, Record
from benchmarks.traffic.texts import Conversations, Words
from gateway.ctl.bench.closed_loop import BenchLoad, BenchRequest, Target
from tests.support.scale import patient

ROOM = 1 << 20
TINY = models.Geometry(layers=2, hidden=32, ffn=64, heads=2, kv_heads=1, head_dim=16, vocab=700, tokenizer_vocab=600)
POINT = Point("5m", "float32", "uniform", clients=4, rate=0.0, seed=0, requests=2)
PLACE = Place("Device(cpu, 0); Linux", {"mlx": "1"}, "python -m benchmarks.traffic")


def drawn(name: str, requests: int = 4000, seed: int = 0) -> list[lengths.Session]:
    return sessions(name, seed, requests, 1, 1.0, ROOM)


@pytest.mark.parametrize("name", lengths.LISTS)
def test_a_seed_gives_one_list_and_a_longer_list_begins_with_a_shorter_one(name: str) -> None:
    short, long = drawn(name, 20), drawn(name, 60)

    assert long[: len(short)] == short
    assert drawn(name, 20, seed=1) != short


def test_uniform_lengths_are_within_their_bounds_and_reach_both_ends() -> None:
    turns = [turn for (turn,) in drawn("uniform")]

    assert (min(turn.added for turn in turns), max(turn.added for turn in turns)) == (40, 1200)
    assert (min(turn.max_tokens for turn in turns), max(turn.max_tokens for turn in turns)) == (30, 300)


def test_tailed_lists_have_the_medians_and_means_that_are_stated() -> None:
    chat = [turn for (turn,) in drawn("chat", 20_000)]
    assert statistics.median(turn.added for turn in chat) == pytest.approx(30, rel=0.05)
    assert statistics.median(turn.max_tokens for turn in chat) == pytest.approx(200, rel=0.05)

    for name, mean_in, mean_out in (("conversation", 1155, 211), ("code", 2048, 28)):
        turns = [turn for (turn,) in drawn(name, 20_000)]
        assert statistics.fmean(turn.added for turn in turns) == pytest.approx(mean_in, rel=0.05), name
        assert statistics.fmean(turn.max_tokens for turn in turns) == pytest.approx(mean_out, rel=0.05), name


def test_agents_have_turns_that_add_to_a_long_prefix() -> None:
    for session in drawn("agent", 2000):
        assert 10 <= len(session) <= 40
        assert 2_000 <= session[0].added <= 60_000
        assert all(50 <= turn.added <= 1_000 for turn in session[1:])
        assert all(50 <= turn.max_tokens <= 400 for turn in session)


def test_a_session_ends_before_it_outgrows_the_model() -> None:
    for session in sessions("agent", 0, 500, 1, 1.0, room=8_000):
        held = 0
        for turn in session:
            held += turn.added
            assert held + turn.max_tokens <= 8_000
        assert session


def test_every_client_has_a_session() -> None:
    assert len(sessions("agent", 0, 10, 6, 1.0, ROOM)) >= 6


def test_scaled_lengths_are_the_same_list_made_shorter() -> None:
    whole, tenth = drawn("uniform", 50), sessions("uniform", 0, 50, 1, 0.1, ROOM)

    assert tenth == [(Turn(round(turn.added * 0.1), round(turn.max_tokens * 0.1)),) for (turn,) in whole]


def test_arrivals_begin_at_once_and_have_the_rate() -> None:
    times = arrivals(0, 4000, 2.0)

    assert times[0] == 0.0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(2.0, rel=0.05)
    assert arrivals(0, 10, 2.0) == times[:10]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    models.write(folder, TINY, "float32")
    return folder


def served(folder: Path, order: Order) -> Answer:
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(folder))[:2]
    return obey(model, tokenizer, order)


def test_words_have_the_lengths_drawn_and_turns_begin_with_the_turn_before(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    one, two, three = Words(tokenizer, 0).write((Turn(90, 5), Turn(30, 6), Turn(7, 8)))

    assert [len(tokenizer.encode(request.prompt)) for request in (one, two, three)] == [90, 120, 127]
    assert two.prompt.startswith(one.prompt)
    assert three.prompt.startswith(two.prompt)
    assert [request.max_tokens for request in (one, two, three)] == [5, 6, 8]


def test_conversations_are_about_as_long_as_drawn_and_share_what_came_before() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.DEMO)
    session = (Turn(900, 50), Turn(100, 50), Turn(100, 50))
    prompts = [request.prompt for request in Conversations(tokenizer, 0).write(session)]

    assert [len(tokenizer.encode(prompt)) for prompt in prompts] == pytest.approx([900, 1000, 1100], abs=90)
    assert Conversations(tokenizer, 0).write(session)[2].prompt == prompts[2]
    assert Conversations(tokenizer, 1).write(session)[2].prompt != prompts[2]
    for before, after in pairwise(prompts):
        question = before.rindex("<|im_end|>")
        assert after[:question] == before[:question]


def test_the_bare_loop_gives_each_prompt_its_own_number_of_tokens_and_a_turn_follows_the_one_before(
    folder: Path,
) -> None:
    prompts = ["a b", "a b c", "d e", "f g h", "a c"]
    answer = served(folder, Order(prompts, [5, 6, 30, 4, 3], concurrency=2, turns=[2, 1, 2]))

    assert [len(times) for times in answer.token_s] == [5, 6, 30, 4, 3]
    assert answer.finished == [True] * 5
    assert answer.inserted_s[1] >= answer.token_s[0][-1]
    assert answer.inserted_s[3] >= answer.token_s[1][-1]
    assert answer.inserted_s[4] >= answer.token_s[3][-1]
    assert answer.inserted_s[2] < answer.token_s[0][-1]


def test_the_bare_loop_takes_a_prompt_when_it_is_due_and_stops_at_the_limit(folder: Path) -> None:
    limit_s = patient(1)
    order = Order(["a b", "c d", "e f"], [4] * 3, concurrency=2, due_s=[0.0, 0.3, 1000 * limit_s], limit_s=limit_s)
    answer = served(folder, order)

    assert answer.finished == [True, True, False]
    assert answer.inserted_s[1] == 0.3
    assert answer.token_s[1][0] > 0.3
    assert answer.token_s[2] == []
    assert limit_s <= answer.wall_s < 1000 * limit_s


@pytest.mark.anyio
async def test_clients_send_a_sessions_turns_in_order_and_keep_what_came_before_the_limit() -> None:
    seen: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                prompt = msgspec.json.decode(await reader.readexactly(length))["prompt"]
                seen.append(prompt)
                text = b'data: {"choices":[{"text":"x"}]}\n\n'
                ended = b"" if prompt == "stuck" else b"data: [DONE]\n\n"
                parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (text, ended) if part)
                end = b"" if prompt == "stuck" else b"0\r\n\r\n"
                kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\n" + kind + parts + end)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    target = BenchLoad(Target("127.0.0.1", server.sockets[0].getsockname()[1]), "m")
    requests = [[BenchRequest(prompt, 1) for prompt in session] for session in (["a", "ab"], ["stuck", "after"])]
    async with server:
        replies = await send(target, Load(requests, clients=1, due_s=[], limit_s=patient(1)))

    assert seen == ["a", "ab", "stuck"]
    assert [bool(reply and reply.ok and reply.ended) for reply in replies] == [True, True, False, False]
    assert replies[2] is not None
    assert replies[2].text == "x"
    assert replies[3] is None


def outcome(text: str, **changed: object) -> Outcome:
    own = Outcome(True, 0.1, [0.01, 0.02, 0.03], 4, 10, 0, text)
    return msgspec.structs.replace(own, **changed)


def recorded(engine: str, *outcomes: Outcome | None, wall_s: float = 2.0) -> Record:
    return records.record(engine, POINT, Run(wall_s, 0.5, list(outcomes)), PLACE)


def test_a_record_counts_stopped_requests_tokens_and_leaves_out_failed_ones() -> None:
    stopped = outcome("y", finished=False, tokens=2, ttft_s=None, gaps_s=[])
    failed = outcome("z", finished=False, error="HTTP 500")
    record = recorded("mlxd", outcome("x"), stopped, failed, None)

    assert (record.finished, record.stopped, record.errors) == (1, 2, 1)
    assert (record.tokens, record.tokens_per_s, record.prompt_tokens) == (6, 3.0, 20)
    assert (record.ttft_ms.count, record.ttft_ms.p50) == (1, 100.0)
    assert (record.itl_ms.p50, record.itl_ms.p99) == (20.0, 30.0)
    assert [bool(answer) for answer in record.answers] == [True, False, False, False]
    assert record.first_errors == ["HTTP 500"]


def test_texts_are_compared_where_both_finished() -> None:
    bare = recorded("bare", outcome("one"), outcome("two"), None)

    assert records.same(recorded("mlxd", outcome(" one"), None, outcome("three")), bare) == 1.0
    assert records.same(recorded("mlxd", outcome("one"), outcome("TWO"), None), bare) == 0.5
    assert records.same(recorded("mlxd", None, None, None), bare) is None


def test_another_text_of_mlxd_is_wrong_on_a_cpu_and_no_other_servers_is() -> None:
    bare, other = recorded("bare", outcome("one"), outcome("two")), (outcome("one"), outcome("2"))

    assert records.unequal([bare, recorded("mlxd-off", *other), recorded("mlx_lm", *other)]) == [
        "uniform, 4, mlxd-off: only 50.0% of texts are the bare loop's"
    ]
    on_gpu = [msgspec.structs.replace(one, device="Device(gpu, 0)") for one in (bare, recorded("mlxd", *other))]
    assert records.unequal(on_gpu) == []
    assert records.unequal([bare, recorded("mlxd", outcome("one"), outcome("two"))]) == []


def test_the_newest_record_of_an_engine_and_a_point_counts_and_is_divided_by_the_bare_loops(tmp_path: Path) -> None:
    for one in (
        recorded("mlxd", outcome("x"), wall_s=8.0),
        recorded("bare", outcome("x"), wall_s=2.0),
        recorded("mlxd", outcome("x"), wall_s=4.0),
    ):
        records.append(tmp_path, one)
    measured = records.read(tmp_path / records.FILE)

    assert [row[:5] for row in records.rows(measured)] == [
        ["uniform", "4", "mlxd", "1.0", "0.500"],
        ["uniform", "4", "bare", "2.0", "1.000"],
    ]
    assert [len(row) for row in records.rows(measured)] == [len(records.HEADER)] * 2
