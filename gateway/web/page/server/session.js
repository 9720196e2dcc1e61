// Session of the administrator: log in by a one-time code, requests to /ui/api, and who the visitor is.

import { effect, signal } from "../vendor/preact.js";
import { t } from "../strings.js";
import { authorization, keepSession, session, sessionAuthorization } from "./credentials.js";
import { Failure, json, sentence } from "./http.js";

/** @type {import("../vendor/preact.js").Signal<{visitor: string, may_administer: boolean, admin: string, version: string, key?: string | null, usage?: any} | null>} */
export const me = signal(null);
/** Sentence that says why a code did not open a session. */
export const logInFailure = signal("");

/** JSON of a route below /ui/api. A session that has ended is dropped. @param {string} path @param {{method?: string, body?: unknown, signal?: AbortSignal}} [options] @returns {Promise<any>} */
export async function sessionJson(path, options = {}) {
  const auth = sessionAuthorization();
  try {
    return await json(`ui/api/${path}`, { ...options, auth });
  } catch (error) {
    if (error instanceof Failure && error.status === 401) dropSession(auth);
    throw error;
  }
}

/** Orders something of the daemon. @param {string} path @param {unknown} [body] */
export const order = (path, body = {}) => sessionJson(path, { body });

/** Exchanges the code in the address, if there is one, and takes it out of there. */
export async function logIn() {
  const code = /^#code=([\w-]+)$/.exec(location.hash)?.[1];
  if (code === undefined) return;
  history.replaceState(null, "", "#/models");
  window.dispatchEvent(new HashChangeEvent("hashchange"));
  try {
    const answer = await json("ui/api/session", { body: { code }, auth: {} });
    keepSession(answer.token);
    logInFailure.value = "";
  } catch (error) {
    logInFailure.value = error instanceof Failure && error.code === "bad_code" ? t.codeRefused : sentence(error);
  }
}

export async function logOut() {
  const auth = sessionAuthorization();
  // First here, so that nothing is asked with a session that has ended.
  endSession();
  await json("ui/api/session", { method: "DELETE", auth }).catch(() => {});
}

/**
 * Drops the session that a request was refused with: one that began since then stays.
 * Returns whether it was dropped. @param {Record<string, string>} sent
 */
export function dropSession(sent) {
  const isIts = session.value !== "" && sent.authorization === sessionAuthorization().authorization;
  if (isIts) endSession();
  return isIts;
}

function endSession() {
  keepSession("");
}

export async function refreshMe() {
  const asked = session.value;
  /** @type {typeof me.value} */
  let answer = null;
  try {
    answer = asked ? await sessionJson("me") : await json("ui/api/me", { auth: authorization() });
  } catch {
    // Nothing is known of the visitor.
  }
  if (asked === session.value) me.value = answer;
}

/** Asks who the visitor is, now and after each log-in and log-out, which may be in another tab. */
export const followVisitor = () =>
  effect(() => {
    if (!session.value) me.value = null;
    queueMicrotask(refreshMe);
  });
