// Requests to the daemon, by addresses relative to the page, and their failures.

import { t } from "../strings.js";
import { authorization } from "./credentials.js";

// The page is at `…/ui/`, whatever proxy and sub-path is before that.
const ROOT = new URL("../", document.baseURI);

/** A request that failed; `status` 0 is one without an answer. `message` is a sentence for people. */
export class Failure extends Error {
  /** @param {string} message @param {{status?: number, code?: string, retryAfterS?: number}} [about] */
  constructor(message, { status = 0, code = "", retryAfterS = 0 } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }

  /** Whether the same request may succeed later without a change. */
  get isPassing() {
    return this.status === 0 || this.status === 429 || this.status === 502 || this.status === 503 || this.status === 504;
  }
}

/** @param {string} path */
export const address = (path) => new URL(path, ROOT);
/** Address of the API for other programs. */
export const apiAddress = () => new URL("v1", ROOT).href;

/**
 * The answer to a request, which is a 2xx. Raises `Failure`, or the `AbortError` of its signal.
 * @param {string} path below the daemon's root
 * @param {{method?: string, body?: unknown, signal?: AbortSignal, headers?: Record<string, string>, auth?: Record<string, string>}} [options]
 */
export async function request(path, { method, body, signal, headers = {}, auth = authorization() } = {}) {
  /** @type {Record<string, string>} */
  const sent = body === undefined ? {} : { "content-type": "application/json" };
  let response;
  try {
    response = await fetch(address(path), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: { ...sent, ...auth, ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure(t.noAnswer);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/**
 * JSON of an answer. Raises `Failure`.
 * @param {string} path @param {Parameters<typeof request>[1]} [options] @returns {Promise<any>}
 */
export async function json(path, options) {
  const response = await request(path, options);
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch {
    throw new Failure(t.brokenAnswer, { status: response.status });
  }
}

/** @param {Response} response */
async function failure(response) {
  const retryAfterS = Number(response.headers.get("retry-after")) || 0;
  let message = "";
  let code = "";
  try {
    const error = (await response.json()).error;
    message = typeof error === "string" ? error : String(error?.message ?? "");
    code = String(error?.code ?? "");
  } catch {
    // A proxy's page, or nothing: the status has to do.
  }
  return new Failure(message || t.status(response.status), { status: response.status, code, retryAfterS });
}

/** The failure in an event of a stream. @param {any} error */
export const streamFailure = (error) => new Failure(String(error?.message ?? t.brokenAnswer), { status: Number(error?.status) || 500, code: String(error?.code ?? "") });

/** @param {unknown} error */
export const sentence = (error) => (error instanceof Error ? error.message : String(error));

/** A random id of 16 hex digits. `crypto.randomUUID` is missing where the page came by plain HTTP. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
