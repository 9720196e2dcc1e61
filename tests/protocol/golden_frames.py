"""The frames of one protocol number, as bytes: `python -m tests.protocol.golden_frames` writes today's.

The file is written again when fields or messages were appended. A raised number has a new file, and no other stays.
"""

from pathlib import Path

import msgspec

from protocol import PROTOCOL, codec
from protocol.failures import Code, Failure
from protocol.from_worker import (
    Accepted,
    AdapterInfo,
    AdaptersSet,
    AudioInfo,
    Delta,
    DeltaKind,
    Drained,
    EmbeddingInfo,
    Explained,
    Finish,
    Goodbye,
    GroupInfo,
    Hello,
    Loading,
    MediaInfo,
    MissCause,
    Pong,
    Progress,
    PromptLogprob,
    PromptPart,
    RankInfo,
    Ready,
    Rejected,
    Step,
    Tokenized,
    TokenLogprob,
    ToolCallDelta,
    Up,
    Usage,
)
from protocol.stats import DraftStats, RankStats, Stats
from protocol.to_worker import (
    Abort,
    ChatPrompt,
    Detokenize,
    Down,
    Drain,
    Dump,
    EmbedPrompt,
    Explain,
    Generate,
    Infill,
    LabelledQuestion,
    Media,
    NextTurnPrompt,
    Ping,
    Sampling,
    ScorePrompt,
    SetAdapters,
    SetLogLevel,
    SetMemory,
    SetPace,
    Shutdown,
    SpeechPrompt,
    TextPrompt,
    Tokenize,
    TokensPrompt,
    TranscribePrompt,
    Welcome,
)

FOLDER = Path(__file__).parent / "golden"
_FAILURE = Failure(Code.ROW_FAILED, "failed", "détail", "top_k")
_USAGE = Usage(12, 4, 7, 3, 1.5, 2.25, 3.125, 6, 5, 4, 9, 8, 11, 2, 30, 20, 1, 2, 4.5, 5.5)
_MEDIA = (
    Media("image", b"\x00\xff" * 16, b"\x89PNG", {"max_pixels": 262_144}, "messages[0].content[1]"),
    Media("video", bytes(32), b"\x00\x00\x00\x01\xff", {"frames": 1, "fps": 2.5}),
    Media("audio", bytes(32), b"RIFF"),
)
_ADAPTERS = (
    AdapterInfo("sql", "/adapters/sql", 16, True, 2**20, "0f", "Qwen/Qwen3-8B"),
    AdapterInfo("né", "/adapters/né", failure=_FAILURE),
)
_STATS = Stats(
    *(1, 2, 3, 4, 5, 6, 7, 2**40, 9, 10, 11),
    drafted=(DraftStats("lookup", 4, 9, 7, (4, 3)),),
    draft_width=4,
    draft_gain=1.5,
    ranks=(RankStats(2**33, 12), RankStats(7)),
    kv_bits=8,
    sparse_prompts=2,
    sparse_prompt_tokens=9000,
    sparse_kept_tokens=2300,
    sparse_read_s=0.5,
    expert_cache_bytes=2**33,
    expert_hits=9,
    expert_misses=5,
    expert_evictions=3,
    expert_read_bytes=2**32,
    kv_blocks=512,
)


def down() -> list[Down]:
    """One of each message to a worker, every field set. New ones come last: older files end before them."""
    chat = ChatPrompt(
        [{"role": "user", "content": [{"type": "text", "text": "né 🙂"}]}],
        [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        {"enable_thinking": False},
        True,
        media=_MEDIA,
    )
    sampling = Sampling(
        *(0.5, 0.25, 40, 0.125, 1.5, 0.5, -0.5, {7: -100.0, 0: 2.5}, 2**63, True),
        *(64, 0.5, 1.5, 0.25, 0.125, 0.75, 1.5, 3, 512, ("\n",), 2, (9,), (1, 2), ("né",), (("né", -2.5),)),
    )
    return [
        Welcome(2, 2**62, 1.0),
        Generate(1 << 62, chat, sampling, 100, ("a", "\n"), 5, True, -3, 1500, True, "00-trace"),
        Generate(
            2,
            TextPrompt("né 🙂", Infill("b", "c", (("a.py", "d"),)), False),
            Sampling(),
            most_drafted=3,
            prediction="né",
            includes_stop=True,
            shows_special=True,
            adapter="sql",
            sparse_keep=0.25,
            truncate=-1,
            cuts_tokens=True,
            prompt_ids=True,
            prompt_logprobs=3,
            prompt_scored=128,
            truncated=(2, 900),
            questions=(LabelledQuestion("é?", ("Yes", "No")),),
        ),
        Generate(3, TokensPrompt((0, 1, 151_935)), Sampling(), 0, top_logprobs=0),
        Abort((1, 1 << 62), "client"),
        Tokenize(4, TextPrompt("né"), True, True),
        Detokenize(5, (1, 2)),
        Ping(7, 123_456_789_012),
        Drain(2.5),
        Shutdown("asked"),
        Dump(9),
        SetMemory(2**40, 0.5, 0.25),
        SetLogLevel("debug"),
        Generate(6, EmbedPrompt(("né", (1, 2)), "query", True, False, 256, -1), Sampling()),
        SetAdapters(8, (("sql", "/adapters/sql"),)),
        Generate(8, TranscribePrompt(b"RIFF", "en", "né", True, True, 7200.0), Sampling()),
        Generate(9, SpeechPrompt("né", "alba", 1.5, "mp3", "gently", 900.0), Sampling()),
        Generate(7, ScorePrompt(("né",), ("a", "b"), "judge", 512, 64, ("text_1", "text_2")), Sampling()),
        SetPace(0.75, 60, 256, False),
        Generate(11, NextTurnPrompt(10, 1 << 62), Sampling(), max_tokens=0),
        Explain(10, 1 << 62, 7, True, True),
    ]


def up() -> list[Up]:
    """One of each message from a worker, every field set."""
    logprob = TokenLogprob(b"\xf0\x9f", -0.5, ((b"\xf0\x9f", -0.5), (b"a", -1.0)))
    deltas = [
        Delta(1, text="né 🙂", token_ids=(5, 6), logprobs=(logprob,)),
        Delta(1, DeltaKind.REASONING, "hm"),
        Delta(1, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "call_1", "f")),
        Delta(1, DeltaKind.TOOL_ARGS, "{}", tool=ToolCallDelta(0)),
        Delta(1, DeltaKind.TOOL_END, tool=ToolCallDelta(0)),
        Delta(1, finish=Finish.TOOL_CALLS, usage=_USAGE),
        Delta(2, finish=Finish.ERROR, usage=_USAGE, failure=_FAILURE),
        *(Delta(3, finish=finish) for finish in (Finish.STOP, Finish.LENGTH, Finish.ABORT)),
        Delta(4, finish=Finish.STOP, usage=_USAGE, data=b"\x00\x00\x80\x3f"),
        Delta(5, prompt=PromptPart((5, 6), (PromptLogprob(5, b"n", -0.5, 2, ((6, b"\xff", -0.25),)),))),
        Delta(5, finish=Finish.STOP, usage=_USAGE, ending_ids=(7, 151_645)),
    ]
    return [
        Hello("qwen", 3, 4242, 2, 0, "0.1.0", "0.32.4", "loading"),
        Loading(3, "weights", 10, 2**40),
        Ready(
            *(3, "/models/qwen", 32768, 16, 151_936, 2**33, 1.25, "qwen3", True),
            modalities=("image", "video"),
            media=MediaInfo(2**20, 1024, 2**24, "no tower for audio"),
            speculation="auto",
            kind="embed",
            embedding=EmbeddingInfo(768, True, ("query", "document")),
            adapters=_ADAPTERS,
            group=GroupInfo("pipeline", "ring", (RankInfo(0, "local"), RankInfo(1, "né", "h", 7, "gpu", 9))),
            kv_bits=8,
            audio=AudioInfo(True, True, True, True, 16000, ("alba",), ("en",), ("wav",), "none", True),
        ),
        Accepted(1, 12, truncated=(2, 900)),
        Tokenized(4, 2, (1, 2), "né"),
        Rejected(2, _FAILURE),
        Step(3, 99, deltas, _STATS),
        Step(3, 100, []),
        Progress(1, 512, 1024, elapsed_ms=1500),
        Pong(7, 123_456_789_012, _STATS),
        Drained(3, 2),
        Goodbye(3, "load failed", _FAILURE),
        AdaptersSet(3, 8, _ADAPTERS, 2**33),
        Explained(
            *(5, 900, 400, 100, 800, 7, 12.5),
            causes=(MissCause("evicted", 400, 400, 2, "user", "né", "nö", 8, 3.25),),
        ),
    ]


class Golden(msgspec.Struct, frozen=True):
    """A golden file: frames in both directions."""

    down: list[bytes]
    up: list[bytes]


def path() -> Path:
    return FOLDER / f"v{PROTOCOL}.json"


def read(file: Path) -> Golden:
    return msgspec.json.decode(file.read_bytes(), type=Golden)


def write() -> Path:
    frames = Golden([codec.encode(message) for message in down()], [codec.encode(message) for message in up()])
    file = path()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(frames), indent=1) + b"\n")
    return file


if __name__ == "__main__":
    print(write())
