// Ollama's own package for JavaScript with a tool: `with_ollama.mjs FOLDER-OF-THE-PACKAGE URL`.
import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { join } from 'node:path'

const [folder, host] = process.argv.slice(2)
const { Ollama } = createRequire(join(folder, 'x.js'))('ollama')
const ollama = new Ollama({ host })
if (!(await ollama.list()).models.some((model) => model.name === 'm')) throw new Error('m is not listed')

const parameters = { type: 'object', required: ['path'], properties: { path: { type: 'string' } } }
const tools = [{ type: 'function', function: { name: 'read_file', description: 'Read a file.', parameters } }]

async function ask(messages, stream) {
  const answer = await ollama.chat({ model: 'm', messages, tools, stream })
  if (!stream) return answer.message
  const whole = { role: 'assistant', content: '', tool_calls: [] }
  for await (const piece of answer) {
    whole.content += piece.message.content
    whole.tool_calls.push(...(piece.message.tool_calls ?? []))
  }
  return whole
}

for (const stream of [false, true]) {
  const messages = [{ role: 'user', content: 'What does proof.txt say?' }]
  messages.push(await ask(messages, stream))
  for (const call of messages[1].tool_calls ?? []) {
    const content = readFileSync(call.function.arguments.path, 'utf8')
    messages.push({ role: 'tool', tool_name: call.function.name, content })
  }
  console.log(stream ? 'streamed' : '', (await ask(messages, stream)).content)
}
