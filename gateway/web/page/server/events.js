// Server-sent events over fetch, which can send headers, as EventSource cannot.

import { createParser } from "../vendor/eventsource-parser.js";
import { t } from "../strings.js";
import { Failure } from "./http.js";

/**
 * Reads events until the stream ends or `take` returns true. Raises `Failure` when the connection breaks.
 * @param {Response} response
 * @param {(event: {event?: string, data: string, id?: string}) => boolean | void} take
 * @param {AbortSignal} [signal]
 */
export async function readEvents(response, take, signal) {
  if (response.body === null) throw new Failure(t.brokenAnswer);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let isOver = false;
  const parser = createParser({ onEvent: (event) => void (isOver ||= take(event) === true) });
  try {
    while (!isOver) {
      const { done, value } = await reader.read();
      if (done) return;
      parser.feed(value);
    }
  } catch (error) {
    if (signal?.aborted || error instanceof Failure) throw error;
    throw new Failure(t.cutOff);
  } finally {
    reader.cancel().catch(() => {});
  }
}
