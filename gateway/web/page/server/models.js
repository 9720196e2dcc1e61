// Models that this visitor may use, read from /v1/models now and then.

import { computed, signal } from "../vendor/preact.js";
import { Failure, json, sentence } from "./http.js";

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

/** @param {string} name */
export const takesImages = (name) => modelNamed(name)?.input_modalities?.includes("image") ?? false;

/** Reads the list now, and again soon while a model is on its way. */
export async function refreshModels() {
  clearTimeout(timer);
  if (reading) return;
  reading = true;
  try {
    const answer = await json("v1/models");
    models.value = answer.data;
    modelsFailure.value = "";
    wantsKey.value = false;
  } catch (error) {
    wantsKey.value = error instanceof Failure && error.status === 401;
    modelsFailure.value = sentence(error);
  } finally {
    reading = false;
    isKnown.value = true;
    const isBusy = modelsFailure.value !== "" || models.value.some((model) => BUSY.has(model.state));
    timer = window.setTimeout(tick, isBusy ? SOON_MS * 2 : POLL_MS);
  }
}

function tick() {
  // A tab that is not seen asks for nothing; its return does.
  if (document.visibilityState === "visible") refreshModels();
}

document.addEventListener("visibilitychange", tick);
