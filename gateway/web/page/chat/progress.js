// Progress of an answer before its first word, in words: loading, waiting for memory, reading, thinking.

import { html, useEffect, useState } from "../vendor/preact.js";
import { isAdmin } from "../server/credentials.js";
import { sessionJson } from "../server/session.js";
import { modelNamed, refreshModels } from "../server/models.js";
import { t } from "../strings.js";
import { count, duration, partOf, percent } from "../text/format.js";

/** @typedef {import("./answer.js").Answer} Answer */

const POLL_MS = 1_000;

/** What the daemon says of a model and of a request: with a session all of it, else the model's state. @param {string} model @param {string} requestId */
async function look(model, requestId) {
  await refreshModels();
  if (!isAdmin.value) return {};
  const [status, live] = await Promise.all([sessionJson("status"), sessionJson(`requests/${encodeURIComponent(requestId)}`).catch(() => null)]);
  const name = modelNamed(model)?.parent ?? modelNamed(model)?.id ?? model;
  return { status: status.models.find((/** @type {any} */ each) => each.name === name), live: live?.live ?? undefined };
}

/** How far a prompt is read, with the time left at its own speed. @param {import("../server/feed.js").LiveRequest} live */
export function readingText({ prefilled_tokens: read = 0, prompt_tokens: prompt, prefill_left_s: left }) {
  const text = t.readingPart(count(read), count(prompt));
  return left ? `${text}, ${t.left(duration(left))}` : text;
}

/** @param {string} model @param {any} status @param {any} live @returns {{text: string, part?: number}} */
function words(model, status, live) {
  const card = modelNamed(model);
  const state = status?.state ?? card?.state ?? "";
  const [loaded, total] = [status?.loaded_bytes ?? card?.load?.loaded_bytes ?? 0, status?.total_bytes ?? card?.load?.total_bytes ?? 0];
  if (status?.is_waiting || status?.is_gated) return { text: t.waitingForMemory };
  if (state === "loading" && total) return { text: t.loadingPart(percent(loaded / total), partOf(loaded, total)), part: loaded / total };
  if (state === "starting" || state === "loading") return { text: t.loading };
  if (state === "backoff") return { text: t.startsAgain };
  if (state === "stopped" || state === "stopping") return { text: t.waitingForModel };
  if (live?.state === "waiting" || live?.state === "queued") return { text: t.waitingForTurn };
  const read = live?.prefilled_tokens ?? 0;
  if (live?.prompt_tokens && read) return { text: readingText(live), part: read / live.prompt_tokens };
  return { text: t.reading };
}

/** @param {{answer: Answer}} props */
export function Progress({ answer }) {
  const [seen, setSeen] = useState(/** @type {{status?: any, live?: any}} */ ({}));
  const phase = answer.phase.value;
  const isWaiting = phase === "sending" || phase === "reading";
  useEffect(() => {
    if (!isWaiting) return undefined;
    let isOver = false;
    let timer = 0;
    const poll = async () => {
      const found = await look(answer.draft.model, answer.requestId).catch(() => ({}));
      if (isOver) return;
      setSeen(found);
      timer = window.setTimeout(poll, POLL_MS);
    };
    timer = window.setTimeout(poll, POLL_MS / 2);
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [isWaiting, answer]);
  if (phase === "over" || phase === "writing") return null;
  const { text, part } = phase === "joining" ? { text: t.joining } : isWaiting ? words(answer.draft.model, seen.status, seen.live) : { text: phase === "thinking" ? t.thinking : t.calling };
  return html`<div class="progress"><span class="pulse" aria-hidden="true"></span><span>${text}</span>
    ${isWaiting ? html`<${Clock} from=${answer.startedAt} />` : null}
    ${part === undefined ? null : html`<progress max="1" value=${part} aria-label=${text}></progress>`}</div>`;
}

/** Seconds since a moment, once they are worth saying. @param {{from: number}} props */
function Clock({ from }) {
  const [now, setNow] = useState(performance.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), 1_000);
    return () => clearInterval(timer);
  }, [from]);
  const seconds = Math.floor((now - from) / 1000);
  return seconds < 3 ? null : html`<span class="faint" aria-hidden="true">${duration(seconds)}</span>`;
}
