"""OpenAI's package for Python: speech, and transcripts of it: `audio_with_openai.py URL`. Prints what it has seen."""

import json
import sys
from pathlib import Path

import openai

[url] = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
clip = Path("clip.wav")
seed = {"seed": 1}

spoken = {}
for kind in ("wav", "mp3", "opus", "flac", "aac", "pcm"):
    file = Path(f"python.{kind}")
    with client.audio.speech.with_streaming_response.create(
        model="speaker",
        voice="ryan",
        input="Good morning to you. And a good day.",
        response_format=kind,
        extra_body=seed,
    ) as response:
        response.stream_to_file(file)
    spoken[kind] = file.stat().st_size

whole = client.audio.transcriptions.create(model="whisper", file=clip, language="en", extra_body=seed)
verbose = client.audio.transcriptions.create(
    model="whisper",
    file=clip,
    language="en",
    response_format="verbose_json",
    timestamp_granularities=["word", "segment"],
    extra_body=seed,
)
with clip.open("rb") as opened:
    stream = client.audio.transcriptions.create(
        model="whisper", file=opened, language="en", stream=True, extra_body=seed
    )
    events = list(stream)
translated = client.audio.translations.create(model="whisper", file=("a.wav", clip.read_bytes()), extra_body=seed)
again = client.audio.transcriptions.create(model="whisper", file=Path("python.mp3"), response_format="srt")
print(
    json.dumps(
        {
            "spoken": spoken,
            "whole": whole.text,
            "tokens": whole.usage.total_tokens,
            "streamed": "".join(event.delta for event in events if event.type == "transcript.text.delta").strip(),
            "done": [event.text for event in events if event.type == "transcript.text.done"],
            "seconds": float(verbose.duration),
            "segments": len(verbose.segments),
            "words": len(verbose.words),
            "translated": translated.text,
            "again": again,
        }
    )
)
