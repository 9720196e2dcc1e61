// Answers that are being written: one object each, which reads the stream, shows it once a frame and saves it once a second.

import { batch, signal } from "../vendor/preact.js";
import { streamCompletion } from "../server/completions.js";
import { authorization } from "../server/credentials.js";
import { Failure, newId, sentence } from "../server/http.js";
import { refreshModels } from "../server/models.js";
import { cancelResponse, forgetResponse, isUnsupported, joinResponse, startResponse, wholeResponse } from "../server/responses.js";
import { dropSession } from "../server/session.js";
import { t } from "../strings.js";
import { completionBody, isResponse, responseBody } from "./body.js";

/**
 * @typedef {import("../history/database.js").Conversation} Conversation
 * @typedef {import("../history/database.js").Message} Message
 * @typedef {import("../server/completions.js").AnswerEvent} AnswerEvent
 * @typedef {"sending" | "reading" | "thinking" | "writing" | "calling" | "joining" | "over"} Phase
 */

const SAVE_MS = 1_000;
const HIDDEN_FRAME_MS = 500;
/** The daemon keeps a response shortly after its last event. */
const FORGET_MS = 2_000;
const JOIN_WAITS_MS = [250, 500, 1_000, 2_000, 4_000];
const JOIN_MS_MAX = 15 * 60_000;

/** Whether the daemon has background responses: until it says otherwise. */
let hasBackground = true;

/** The message that is written, its phase, and the end of it. `save` is called with each state that must not be lost. */
export class Answer {
  /** @param {Message} message @param {(message: Message) => void} save */
  constructor(message, save) {
    this.draft = { ...message, calls: message.calls.map((call) => ({ ...call })) };
    this.message = signal(message);
    /** @type {import("../vendor/preact.js").Signal<Phase>} */
    this.phase = signal("sending");
    this.requestId = `ui-${newId()}`;
    this.startedAt = performance.now();
    this.#save = save;
    /** Index in the calls of the draft, by the stream's. @type {Map<number, number>} */
    this.#calls = new Map();
  }

  #save;
  #calls;
  #stop = new AbortController();
  #isDrawn = true;
  #isLeft = false;
  #savedAt = performance.now();
  #thinkingSince = 0;
  #firstAt = 0;
  #textAt = 0;

  get id() {
    return this.draft.id;
  }

  get isOver() {
    return this.phase.value === "over";
  }

  /** Asks for the answer to a branch, which ends in what is answered or continued. @param {Conversation} conversation @param {Message[]} branch */
  async ask(conversation, branch) {
    await this.#run(async () => {
      const options = { signal: this.#stop.signal, requestId: this.requestId };
      if (hasBackground && isResponse(conversation, branch)) {
        const body = await responseBody(conversation, branch);
        try {
          await startResponse(body, this.#take, options);
          return;
        } catch (error) {
          if (this.draft.response === null && isUnsupported(error)) hasBackground = false;
          else if (this.draft.response === null || !isJoinable(error)) throw error;
          else return this.#join();
        }
      }
      await streamCompletion(await completionBody(conversation, branch), this.#take, options);
    });
  }

  /** Goes on with a background response that was left, by a reload or a lost connection. */
  async rejoin() {
    await this.#run(() => this.#join());
  }

  /** Ends the answer; what is there stays. */
  stop() {
    const response = this.draft.response;
    if (response !== null) cancelResponse(response.id).catch(() => {});
    this.#stop.abort();
  }

  /** @param {() => Promise<unknown>} work */
  async #run(work) {
    try {
      await work();
      this.draft.state = "whole";
    } catch (error) {
      if (this.#stop.signal.aborted) this.draft.state = "stopped";
      else this.#fail(error);
    }
    this.#finish();
  }

  /** @param {unknown} error */
  #fail(error) {
    const isStranger = error instanceof Failure && error.status === 401;
    if (isStranger) refreshModels();
    // The daemon writes it on, for whoever may see it: this page, with a key or a session.
    this.#isLeft = isStranger && this.draft.response !== null;
    this.draft.state = this.#isLeft ? "writing" : "failed";
    this.draft.error = this.#isLeft ? "" : sentence(error);
  }

  #finish() {
    const { draft } = this;
    const response = this.#isLeft ? null : draft.response;
    this.#closeThought();
    if (!this.#isLeft) draft.response = null;
    batch(() => {
      this.phase.value = "over";
      this.message.value = { ...draft };
    });
    this.#save(this.message.value);
    // This browser has it whole: the daemon need not keep it. One that failed may still be wanted from there.
    if (response !== null && draft.state !== "failed") setTimeout(() => forgetResponse(response.id).catch(() => {}), FORGET_MS);
  }

  async #join() {
    const began = performance.now();
    for (let attempt = 0; ; attempt += 1) {
      const at = this.draft.response;
      if (at === null) throw new Failure(t.cutOff);
      this.phase.value = "joining";
      const before = at.sequence;
      const sent = authorization();
      try {
        await joinResponse(at, this.#take, this.#stop.signal);
        return;
      } catch (error) {
        if (this.#stop.signal.aborted) throw error;
        if (error instanceof Failure && error.code === "events_gone") return this.#takeWhole(at.id);
        // The refusal may come after the visitor has logged in or given a key, which only then may join it.
        // An open daemon that was restarted wants no session; else it is joined once there is a new one, or a key.
        const isStranger = error instanceof Failure && error.status === 401;
        if (isStranger && (sent.authorization !== authorization().authorization || dropSession(sent))) continue;
        if (error instanceof Failure && error.status === 404) throw new Failure(t.responseGone, { status: 404 });
        if (!isJoinable(error) || performance.now() - began > JOIN_MS_MAX) throw error;
      }
      // What came in between is a sign that the daemon is back.
      if (this.draft.response !== null && this.draft.response.sequence > before) attempt = -1;
      const wait = JOIN_WAITS_MS[Math.min(Math.max(attempt, 0), JOIN_WAITS_MS.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, wait));
      if (this.#stop.signal.aborted) throw new Failure(t.cutOff);
    }
  }

  /** @param {string} id */
  async #takeWhole(id) {
    for (;;) {
      const { text, reasoning, calls, response } = await wholeResponse(id, this.#stop.signal);
      // A response that failed may hold less than what came here before.
      if (text.length >= this.draft.text.length) Object.assign(this.draft, { text, reasoning, calls });
      this.#draw();
      if (response.status === "failed") throw new Failure(response.error?.message ?? t.cutOff, { status: 500 });
      if (response.status !== "in_progress" && response.status !== "queued") return;
      await new Promise((resolve) => setTimeout(resolve, 1_000));
    }
  }

  /** @param {AnswerEvent} event */
  #take = (event) => {
    const { draft } = this;
    switch (event.type) {
      case "open":
        if (this.phase.value === "sending") this.phase.value = "reading";
        return;
      case "mark":
        draft.response = { id: event.id || (draft.response?.id ?? ""), sequence: event.sequence };
        // An answer that is known to the daemon, and not to this browser, would be lost by a reload.
        if (event.id && event.sequence <= 1) this.#saveNow();
        return;
      case "reasoning":
        this.#began();
        if (!this.#thinkingSince) this.#thinkingSince = performance.now();
        draft.reasoning += event.text;
        this.phase.value = "thinking";
        break;
      case "text":
        this.#began();
        this.#closeThought();
        this.#textAt ||= performance.now();
        draft.text += event.text;
        this.phase.value = "writing";
        break;
      case "call":
        this.#began();
        this.#closeThought();
        this.#calls.set(event.index, draft.calls.push({ id: event.id || newId(), name: event.name, arguments: "" }) - 1);
        this.phase.value = "calling";
        break;
      case "arguments": {
        const call = draft.calls[this.#calls.get(event.index) ?? draft.calls.length - 1];
        if (call) call.arguments += event.text;
        break;
      }
      case "usage":
        this.#count(event);
        break;
      case "finish":
        draft.finish = event.reason;
        break;
    }
    this.#draw();
  };

  #began() {
    if (this.#firstAt) return;
    this.#firstAt = performance.now();
    if (this.draft.timings.ttft_ms === undefined) this.draft.timings = { ...this.draft.timings, ttft_ms: this.#firstAt - this.startedAt };
  }

  #closeThought() {
    if (!this.#thinkingSince) return;
    const before = this.draft.timings.reasoning_ms ?? 0;
    this.draft.timings = { ...this.draft.timings, reasoning_ms: before + performance.now() - this.#thinkingSince };
    this.#thinkingSince = 0;
  }

  /** @param {{prompt: number, cached: number, completion: number, reasoning: number, timing?: Record<string, number>}} usage */
  #count({ prompt, cached, completion, reasoning, timing }) {
    const seconds = (performance.now() - this.#firstAt) / 1000;
    // The first token's time is the prompt's.
    const speed = this.#firstAt && completion > 1 && seconds > 0.001 ? { rate: (completion - 1) / seconds } : {};
    const waits = Object.fromEntries(Object.keys(t.phases).map((name) => [name, timing?.[name] ?? 0]));
    const request = this.requestId;
    this.draft.timings = { ...this.draft.timings, prompt, cached, tokens: completion, reasoning_tokens: reasoning, request, waits, ...speed };
  }

  /** Shows the draft with the next frame, and saves it now and then. */
  #draw() {
    if (!this.#isDrawn) return;
    this.#isDrawn = false;
    const draw = () => {
      this.#isDrawn = true;
      if (this.isOver) return;
      this.message.value = { ...this.draft };
      if (performance.now() - this.#savedAt > SAVE_MS) this.#saveNow();
    };
    // A tab that is not seen has no frames.
    if (document.visibilityState === "visible") requestAnimationFrame(draw);
    else setTimeout(draw, HIDDEN_FRAME_MS);
  }

  #saveNow() {
    this.#savedAt = performance.now();
    this.#save({ ...this.draft, calls: this.draft.calls.map((call) => ({ ...call })) });
  }
}

/** Whether the connection was lost, and not the answer. @param {unknown} error */
const isJoinable = (error) => error instanceof Failure && (error.status === 0 || error.status === 502 || error.status === 503 || error.status === 504);
