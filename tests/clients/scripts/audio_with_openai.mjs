// OpenAI's package for JavaScript: speech, and transcripts of it: `audio_with_openai.mjs FOLDER-OF-THE-PACKAGE URL`.
import { createReadStream, readFileSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { join } from 'node:path'

const [folder, url] = process.argv.slice(2)
const { OpenAI, toFile } = createRequire(join(folder, 'x.js'))('openai')
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'x', maxRetries: 0 })
const open = () => createReadStream('clip.wav')

const spoken = {}
for (const kind of ['wav', 'mp3', 'opus', 'flac', 'aac', 'pcm']) {
  const input = 'Good morning to you. And a good day.'
  const reply = await client.audio.speech.create({ model: 'speaker', voice: 'ryan', input, response_format: kind, seed: 1 })
  const parts = []
  for await (const part of reply.body) parts.push(Buffer.from(part))
  writeFileSync(`javascript.${kind}`, Buffer.concat(parts))
  spoken[kind] = Buffer.concat(parts).length
}

const fields = { model: 'whisper', language: 'en', seed: 1 }
const whole = await client.audio.transcriptions.create({ ...fields, file: open() })
const verbose = await client.audio.transcriptions.create({
  ...fields, file: open(), response_format: 'verbose_json', timestamp_granularities: ['word', 'segment'],
})
const events = []
for await (const event of await client.audio.transcriptions.create({ ...fields, file: open(), stream: true })) events.push(event)
const bytes = await toFile(readFileSync('clip.wav'), 'a.wav')
const translated = await client.audio.translations.create({ model: 'whisper', file: bytes, seed: 1 })
const mp3 = createReadStream('javascript.mp3')
const again = await client.audio.transcriptions.create({ model: 'whisper', file: mp3, response_format: 'srt' })
const deltas = events.filter((event) => event.type === 'transcript.text.delta').map((event) => event.delta)
console.log(JSON.stringify({
  spoken,
  whole: whole.text,
  tokens: whole.usage.total_tokens,
  streamed: deltas.join('').trim(),
  done: events.filter((event) => event.type === 'transcript.text.done').map((event) => event.text),
  seconds: Number(verbose.duration),
  segments: verbose.segments.length,
  words: verbose.words.length,
  translated: translated.text,
  again,
}))
