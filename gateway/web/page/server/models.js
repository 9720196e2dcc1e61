// Models that this visitor may use, read from /v1/models now and then.

import { computed, signal } from "../vendor/preact.js";
import { authorization } from "./credentials.js";
import { Failure, json, sentence } from "./http.js";
import { dropSession } from "./session.js";

/**
 * @typedef {{
 *   id: string, display_name: string, aliases: string[], state: string, parent?: string, root?: string,
 *   default_sampling?: Record<string, number>, context_length?: number, input_modalities?: string[], load?: {stage: string, loaded_bytes: number, total_bytes: number},
 * }} Model
 */

const POLL_MS = 15_000;
const SOON_MS = 1_000;
const BUSY = new Set(["starting", "loading", "draining", "stopping", "backoff"]);

/** @type {import("../vendor/preact.js").Signal<Model[]>} */
export const models = signal([]);
/** Sentence that says why there is no list; empty when there is one. */
export const modelsFailure = signal("");
/** Whether the daemon wants a key from this visitor. */
export const wantsKey = signal(false);
export const isKnown = signal(false);
export const ready = computed(() => models.value.filter((model) => model.state === "ready").length);

let timer = 0;
let reading = false;

/** @param {string} name @returns {Model | undefined} */
export const modelNamed = (name) => models.value.find((model) => model.id === name || model.aliases.includes(name));

/** The models that come with mlxd, by what they are made from. */
const DEMOS = new Set(["demo", "demo-vision"]);

/** @param {string} name */
export const isDemo = (name) => {
  const model = modelNamed(name);
  return model !== undefined && DEMOS.has(model.root ?? "");
};
/** Whether there is nothing but what comes with mlxd. */
export const hasOnlyDemos = computed(() => models.value.length > 0 && models.value.every((model) => DEMOS.has(model.root ?? "")));

/** @param {string} name */
export const takesImages = (name) => modelNamed(name)?.input_modalities?.includes("image") ?? false;

/** Reads the list now, and again soon while a model is on its way. */
export async function refreshModels() {
  clearTimeout(timer);
  if (reading) return;
  reading = true;
  const sent = authorization();
  let isAgain = false;
  try {
    const answer = await json("v1/models", { auth: sent });
    models.value = answer.data;
    modelsFailure.value = "";
    wantsKey.value = false;
  } catch (error) {
    const isStranger = error instanceof Failure && error.status === 401;
    // A session that has ended is refused also where no key is needed.
    isAgain = isStranger && dropSession(sent);
    if (!isAgain) {
      wantsKey.value = isStranger;
      modelsFailure.value = sentence(error);
    }
  } finally {
    reading = false;
    isKnown.value ||= !isAgain;
    const isBusy = modelsFailure.value !== "" || models.value.some((model) => BUSY.has(model.state));
    timer = window.setTimeout(tick, isBusy ? SOON_MS * 2 : POLL_MS);
  }
  if (isAgain) await refreshModels();
}

function tick() {
  // A tab that is not seen asks for nothing; its return does.
  if (document.visibilityState === "visible") refreshModels();
}

document.addEventListener("visibilitychange", tick);
