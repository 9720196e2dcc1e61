// Feed of the daemon: a snapshot, then what changes once a second, while a page that shows it is looked at.

import { batch, computed, effect, signal } from "../vendor/preact.js";
import { route } from "../route.js";
import { summary } from "../summary.js";
import { t } from "../strings.js";
import { partOf, rate } from "../text/format.js";
import { isAdmin, sessionAuthorization } from "./credentials.js";
import { readEvents } from "./events.js";
import { Failure, request } from "./http.js";
import { models, refreshModels } from "./models.js";
import { sessionJson } from "./session.js";

/**
 * @typedef {{name: string, path: string, aliases: string[], state: string, stage: string, loaded_bytes: number, total_bytes: number,
 *   running: number, waiting: number, slots: number, context: number, weights_bytes: number, footprint_bytes: number, share_bytes: number,
 *   kv_bytes: number, restarts: number, is_pinned: boolean, is_gated: boolean, is_waiting: boolean, last_failure: string,
 *   prompt_tokens: number, prompt_tokens_cached: number, generation_tokens: number, retry_after_s: number, batch_mode_reason: string,
 *   tokens_per_s?: number, prompt_tokens_per_s?: number}} LiveModel
 * @typedef {{budget_bytes: number, granted_bytes: number, footprint_bytes: number, waiting: string[]}} Memory
 * @typedef {{id: string, model: string, key: string | null, path: string, stream: boolean, state: string, age_s: number, sequences: number,
 *   prompt_tokens: number, cached_tokens: number, generated_tokens: number, tokens_per_s: number, ttft_s: number | null, prefilled_tokens?: number, prefill_left_s?: number | null}} LiveRequest
 * @typedef {{id: string, repository: string, state: string, downloaded_bytes: number, total_bytes: number, bytes_per_s: number, left_s: number | null,
 *   message: string, path: string}} Pull
 * @typedef {{time: string, level: string, logger: string, message: string, fields: Record<string, unknown>, exception: string}} LogLine
 * @typedef {{version: string, url: string, uptime_s: number, is_draining: boolean, captures_on: boolean}} About
 */

const WAITS_MS = [250, 1_000, 2_000, 4_000];
const POLL_MS = 15_000;
const LOG_LINES_MAX = 2_000;
/** Feeds of all tabs of this browser: it opens six connections to a daemon, which answers and orders need too. */
const FEEDS_MAX = 2;
/** How often a tab beyond these reads what the feed begins with. */
const LOOK_MS = 2_000;
const LOOK_LINES = 200;

/** @type {import("../vendor/preact.js").Signal<LiveModel[]>} */
export const liveModels = signal([]);
/** @type {import("../vendor/preact.js").Signal<Memory | null>} */
export const memory = signal(null);
/** @type {import("../vendor/preact.js").Signal<LiveRequest[]>} */
export const liveRequests = signal([]);
export const requestsInAll = signal(0);
/** @type {import("../vendor/preact.js").Signal<Pull[]>} */
export const pulls = signal([]);
/** @type {import("../vendor/preact.js").Signal<About | null>} */
export const about = signal(null);
/** @type {import("../vendor/preact.js").Signal<LogLine[]>} */
export const logLines = signal([]);
export const droppedLines = signal(0);
/** Time of the newest tick, in seconds since 1970: charts take it as their newest second. */
export const tickTime = signal(0);
/** Sentence about a feed that is not there. */
export const feedFailure = signal("");
/** Whether the tab is looked at. */
const isVisible = signal(document.visibilityState === "visible");
/** Whether a part of the chat shows downloads. */
export const showsPulls = signal(false);
const wantsFeed = computed(() => isAdmin.value && isVisible.value && (route.value.page !== "chat" || showsPulls.value));
const wantsLogs = computed(() => wantsFeed.value && route.value.page === "logs");

/** @param {any} data */
function takeSnapshot(data) {
  batch(() => {
    const { version, url, uptime_s, is_draining, captures_on } = data;
    about.value = { version, url, uptime_s, is_draining, captures_on };
    liveModels.value = data.models;
    memory.value = data.memory;
    liveRequests.value = data.requests;
    requestsInAll.value = data.requests_in_all;
    pulls.value = data.pulls;
    tickTime.value = data.time;
    feedFailure.value = "";
  });
}

/** @param {any} data */
function takeTick(data) {
  batch(() => {
    if (data.models || data.removed) liveModels.value = merged(data.models ?? [], data.removed ?? []);
    if (data.memory) memory.value = data.memory;
    if (data.requests) liveRequests.value = data.requests;
    if (data.requests_in_all !== undefined && data.requests_in_all !== null) requestsInAll.value = data.requests_in_all;
    if (data.pulls) pulls.value = data.pulls;
    if (typeof data.is_draining === "boolean" && about.value) about.value = { ...about.value, is_draining: data.is_draining };
    tickTime.value = data.time;
  });
}

/** @param {any[]} changed @param {string[]} removed */
function merged(changed, removed) {
  const next = new Map(liveModels.value.map((model) => [model.name, model]));
  for (const model of changed) next.set(model.name, { ...blankModel, ...next.get(model.name), ...model });
  for (const name of removed) next.delete(name);
  return [...next.values()];
}

/** A model that a reload added has had no snapshot. @type {LiveModel} */
const blankModel = {
  name: "", path: "", aliases: [], state: "stopped", stage: "", loaded_bytes: 0, total_bytes: 0, running: 0, waiting: 0, slots: 0, context: 0,
  weights_bytes: 0, footprint_bytes: 0, share_bytes: 0, kv_bytes: 0, restarts: 0, is_pinned: false, is_gated: false, is_waiting: false,
  last_failure: "", prompt_tokens: 0, prompt_tokens_cached: 0, generation_tokens: 0, retry_after_s: 0, batch_mode_reason: "",
};

/** @param {{event?: string, data: string}} event */
function take({ event, data }) {
  const body = data ? JSON.parse(data) : {};
  switch (event) {
    case "snapshot":
      takeSnapshot(body);
      return false;
    case "tick":
      takeTick(body);
      return false;
    case "state":
      liveModels.value = liveModels.value.map((model) => (model.name === body.model ? { ...model, state: body.state } : model));
      refreshModels();
      return false;
    case "log":
      addLines(body.lines, body.dropped ?? 0);
      return false;
    case "end":
      return true;
    default:
      return false;
  }
}

/** @param {LogLine[]} lines @param {number} dropped */
export function addLines(lines, dropped) {
  logLines.value = [...logLines.value, ...lines].slice(-LOG_LINES_MAX);
  droppedLines.value += dropped;
}

/**
 * Does a work that fewer than `FEEDS_MAX` tabs do now. Returns whether it could.
 * Browsers know no locks on pages that came by plain HTTP from another machine: there every tab does it.
 * @param {() => Promise<void>} work
 */
async function withPlace(work) {
  if (navigator.locks === undefined) {
    await work();
    return true;
  }
  for (let at = 0; at < FEEDS_MAX; at += 1) {
    const isDone = await navigator.locks.request(`mlxd.feed.${at}`, { ifAvailable: true }, async (lock) => {
      if (lock !== null) await work();
      return lock !== null;
    });
    if (isDone) return true;
  }
  return false;
}

/** @param {AbortSignal} signal @param {string} query @param {(event: {event?: string, data: string}) => boolean} taken */
async function read(signal, query, taken) {
  await readEvents(await request(`ui/api/feed${query}`, { signal, auth: sessionAuthorization() }), taken, signal);
}

/** The state as it is now, for a tab without a place of its own. @param {AbortSignal} signal @param {boolean} hasLogs */
async function look(signal, hasLogs) {
  await read(signal, "", (event) => {
    take(event);
    return true;
  });
  if (hasLogs) logLines.value = (await sessionJson(`logs?lines=${LOOK_LINES}`, { signal })).lines;
}

/** Reads the feed until it is not wanted any more. @param {AbortSignal} signal @param {boolean} hasLogs */
async function follow(signal, hasLogs) {
  for (let attempt = 0; !signal.aborted; attempt += 1) {
    try {
      const hadPlace = await withPlace(() =>
        read(signal, hasLogs ? "?log=1" : "", (event) => {
          attempt = 0;
          return take(event);
        }),
      );
      if (!hadPlace) {
        await look(signal, hasLogs);
        attempt = -1;
        await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
        continue;
      }
    } catch (error) {
      if (signal.aborted) return;
      feedFailure.value = error instanceof Failure ? error.message : t.noAnswer;
      // The session may have ended: this asks, and drops it.
      if (error instanceof Failure && error.status === 401) await sessionJson("me").catch(() => {});
    }
    await new Promise((resolve) => setTimeout(resolve, WAITS_MS[Math.min(attempt, WAITS_MS.length - 1)]));
  }
}

effect(() => {
  if (!wantsFeed.value) return undefined;
  const abort = new AbortController();
  follow(abort.signal, wantsLogs.value);
  return () => abort.abort();
});

/** Where no feed is wanted, the bar still tells the state of the daemon. */
async function poll() {
  try {
    const status = await sessionJson("status");
    batch(() => {
      liveModels.value = merged(status.models, []);
      memory.value = status.memory;
    });
  } catch {
    // The list of models says that there is no connection.
  }
}

/** States of the models as the list has them: a change is a reason to ask. */
const states = computed(() => models.value.map((model) => model.state).join());

effect(() => {
  if (!isAdmin.value || !isVisible.value || wantsFeed.value) return undefined;
  void states.value;
  poll();
  const timer = setInterval(poll, POLL_MS);
  return () => clearInterval(timer);
});

effect(() => {
  const now = memory.value;
  if (!isAdmin.value || now === null) {
    summary.value = "";
    return;
  }
  const ready = liveModels.value.filter((model) => model.state === "ready").length;
  const perSecond = liveModels.value.reduce((sum, model) => sum + (model.tokens_per_s ?? 0), 0);
  summary.value = t.summary(ready, partOf(now.footprint_bytes, now.budget_bytes), perSecond ? rate(perSecond) : "");
});

document.addEventListener("visibilitychange", () => (isVisible.value = document.visibilityState === "visible"));
