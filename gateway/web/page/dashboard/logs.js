// Log of the daemon: by level, model and text, followed while it is looked at.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { notify } from "../parts/notice.js";
import { addLines, droppedLines, liveModels, logLines } from "../server/feed.js";
import { sentence } from "../server/http.js";
import { sessionJson } from "../server/session.js";
import { t } from "../strings.js";

/** @typedef {import("../server/feed.js").LogLine} LogLine */

const LINES = 500;
const LEVELS = ["debug", "info", "warning", "error"];

/** @param {LogLine} line @param {{level: string, model: string, text: string}} filter */
function passes(line, { level, model, text }) {
  if (LEVELS.indexOf(line.level) < LEVELS.indexOf(level)) return false;
  if (model && line.fields.model !== model) return false;
  return !text || `${line.message} ${line.logger} ${JSON.stringify(line.fields)}`.toLowerCase().includes(text.toLowerCase());
}

export function Logs() {
  const [filter, setFilter] = useState({ level: "info", model: "", text: "" });
  const [isFollowing, setFollowing] = useState(true);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    logLines.value = [];
    droppedLines.value = 0;
    sessionJson(`logs?lines=${LINES}`).then(({ lines }) => addLines(lines, 0), (error) => notify(sentence(error), true));
  }, []);
  const lines = logLines.value.filter((line) => passes(line, filter));
  useLayoutEffect(() => {
    if (isFollowing && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines.length, isFollowing, logLines.value]);
  const set = (/** @type {string} */ name) => (/** @type {any} */ event) => setFilter({ ...filter, [name]: event.target.value });
  return html`<section class="logs" aria-labelledby="logs-title"><h2 id="logs-title" class="off-screen">${t.pages.logs}</h2>
    <div class="filters" role="search">
      <label>${t.level}<select onChange=${set("level")}>${LEVELS.map((level) => html`<option value=${level} selected=${level === filter.level}>${t.logLevel(level)}</option>`)}</select></label>
      <label>${t.column.model}<select onChange=${set("model")}><option value="">${t.allModels}</option>${liveModels.value.map(({ name }) => html`<option value=${name}>${name}</option>`)}</select></label>
      <label class="grow">${t.filterText}<input type="search" value=${filter.text} onInput=${set("text")} /></label>
      <label class="check"><input type="checkbox" checked=${isFollowing} onChange=${(/** @type {any} */ event) => setFollowing(event.target.checked)} />${t.follow}</label>
    </div>
    ${droppedLines.value ? html`<p class="faint">${t.droppedLines(droppedLines.value)}</p>` : null}
    <div class="log" ref=${box} tabindex="0" role="log" aria-live="off" aria-label=${t.pages.logs}>${lines.map((line, at) => html`<${Line} key=${`${line.time} ${at}`} line=${line} />`)}
      ${lines.length ? null : html`<p class="faint">${t.noLines}</p>`}</div></section>`;
}

/** @param {{line: LogLine}} props */
function Line({ line }) {
  const fields = Object.entries(line.fields).map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
  return html`<div class=${`line ${line.level}`}><time>${line.time.slice(11, 23)}</time> <b>${t.logLevel(line.level)}</b> <span>${line.message}</span>
    ${fields.length ? html` <span class="faint">${fields.join("  ")}</span>` : null}${line.exception ? html`<pre>${line.exception}</pre>` : null}</div>`;
}
