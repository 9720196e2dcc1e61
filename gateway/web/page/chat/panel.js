// Panel of a conversation's settings: system prompt, thinking, sampling, tools. Empty fields are the server's.

import { html, useState } from "../vendor/preact.js";
import { Icon } from "../parts/icons.js";
import { modelNamed } from "../server/models.js";
import { t } from "../strings.js";
import { change } from "./conversations.js";

/** @typedef {import("../history/database.js").Conversation} Conversation */

const NUMBERS = /** @type {const} */ ([
  ["temperature", 0, 2, 0.05], ["top_p", 0, 1, 0.01], ["top_k", 0, 1000, 1], ["min_p", 0, 1, 0.01], ["repetition_penalty", 0, 2, 0.01],
  ["presence_penalty", -2, 2, 0.1], ["frequency_penalty", -2, 2, 0.1], ["max_tokens", 1, 1_000_000, 1], ["seed", 0, 2_147_483_647, 1],
]);
const EFFORTS = /** @type {const} */ (["", "off", "low", "medium", "high"]);

/** @param {Conversation} conversation */
export function changedSettings({ system, sampling, thinking, tools }) {
  return [system.trim(), thinking, tools.trim()].filter(Boolean).length + Object.keys(sampling).length;
}

/** @param {{conversation: Conversation, onClose: () => void}} props */
export function Panel({ conversation, onClose }) {
  const { sampling, system, thinking, tools } = conversation;
  const [toolsError, setToolsError] = useState("");
  /** @param {string} name @param {any} value */
  const set = (name, value) => {
    const next = /** @type {Record<string, any>} */ ({ ...sampling });
    if (value === undefined) delete next[name];
    else next[name] = value;
    change({ sampling: next });
  };
  const onNumber = (/** @type {string} */ name) => (/** @type {any} */ event) => {
    const { value, validity } = event.target;
    if (value === "") set(name, undefined);
    else if (validity.valid) set(name, Number(value));
  };
  const onStop = (/** @type {any} */ event) => {
    const lines = event.target.value.split("\n").filter(Boolean);
    set("stop", lines.length ? lines : undefined);
  };
  const onTools = (/** @type {any} */ event) => {
    const text = event.target.value;
    setToolsError(text.trim() && !isToolList(text) ? t.badTools : "");
    if (!text.trim() || isToolList(text)) change({ tools: text });
  };
  return html`<aside class="panel" aria-label=${t.settingsOfChat}>
    <header><h2>${t.settingsOfChat}</h2><button type="button" class="quiet" aria-label=${t.close} onClick=${onClose}><${Icon} name="cross" /></button></header>
    <label>${t.system}<textarea rows="5" dir="auto" value=${system} placeholder=${t.systemPlaceholder} onInput=${(/** @type {any} */ event) => change({ system: event.target.value })}></textarea></label>
    <label>${t.thinkingLabel}<select value=${thinking} onChange=${(/** @type {any} */ event) => change({ thinking: event.target.value })}>
      ${EFFORTS.map((effort) => html`<option value=${effort} selected=${effort === thinking}>${t.effort(effort)}</option>`)}</select></label>
    <fieldset><legend>${t.sampling}</legend><p class="faint">${t.samplingNote}</p>
      <div class="fields">${NUMBERS.map(([name, min, max, step]) => html`<label key=${name}>${t.samplingName(name)}<input type="number" inputmode="decimal" name=${name}
        min=${min} max=${max} step=${step} placeholder=${placeholder(name, conversation.model)} value=${sampling[name] ?? ""} onInput=${onNumber(name)} /></label>`)}</div>
      <label>${t.stopStrings}<textarea rows="2" placeholder=${t.stopPlaceholder} onInput=${onStop}>${(sampling.stop ?? []).join("\n")}</textarea></label>
      <button type="button" onClick=${() => change({ sampling: {} })} disabled=${!Object.keys(sampling).length}>${t.resetSampling}</button>
    </fieldset>
    <details><summary>${t.tools}</summary><p class="faint">${t.toolsNote}</p>
      <label>${t.toolsLabel}<textarea class="code" rows="8" spellcheck=${false} onInput=${onTools} aria-invalid=${toolsError ? "true" : undefined}>${tools}</textarea></label>
      ${toolsError ? html`<p class="bad" role="alert">${toolsError}</p>` : null}</details>
  </aside>`;
}

/** The server's value of a field, where the list of models tells it. @param {string} name @param {string} model */
function placeholder(name, model) {
  const value = modelNamed(model)?.default_sampling?.[name];
  return value === undefined ? t.servers(name) : t.serversValue(value);
}

/** Whether a text is a list of functions as chat completions take them. @param {string} text */
function isToolList(text) {
  try {
    const tools = JSON.parse(text);
    return Array.isArray(tools) && tools.every((tool) => tool?.type === "function" && typeof tool.function?.name === "string");
  } catch {
    return false;
  }
}
