// Models: memory of all, charts, each model with what it does, files on disk, and new ones.

import { html, useState } from "../vendor/preact.js";
import { confirmed } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";
import { notify } from "../parts/notice.js";
import { liveModels } from "../server/feed.js";
import { sentence } from "../server/http.js";
import { order } from "../server/session.js";
import { t } from "../strings.js";
import { bytes, count, partOf, percent, rate } from "../text/format.js";
import { Charts } from "./charts.js";
import { Files } from "./files.js";
import { Finder } from "./finder.js";
import { MemoryBar } from "./memory.js";
import { Pulls } from "./pulls.js";

/** @typedef {import("../server/feed.js").LiveModel} LiveModel */

export function Models() {
  const models = liveModels.value;
  return html`<${MemoryBar} /><${Charts} />
    <section aria-labelledby="models-title"><h2 id="models-title">${t.pages.models}</h2>
      <div class="cards">${models.map((model) => html`<${Card} key=${model.name} model=${model} />`)}</div>
      ${models.length ? null : html`<p class="faint">${t.noModels}</p>`}</section>
    <${Pulls} /><${Finder} /><${Files} />`;
}

/** @param {string} verb @param {string} model */
async function command(verb, model) {
  try {
    await order(`models/${verb}`, { model });
  } catch (error) {
    notify(sentence(error), true);
  }
}

/** @param {string} verb @param {LiveModel} model */
async function interrupting(verb, model) {
  const { name, running } = model;
  if (running && !(await confirmed({ title: t.interrupt(verb, name), text: t.interruptText(running), action: t.order(verb) }))) return;
  await command(verb, name);
}

/** @param {{model: LiveModel}} props */
function Card({ model }) {
  const [isTold, setTold] = useState(false);
  const { name, state } = model;
  const isLoaded = ["ready", "draining"].includes(state);
  const isComing = ["starting", "loading", "backoff"].includes(state);
  const hasFailed = model.last_failure !== "" && state !== "ready";
  return html`<article class="card" aria-label=${name}>
    <header><span class=${`dot ${state}`} aria-hidden="true"></span><h3>${name}</h3><span class="faint">${model.is_waiting || model.is_gated ? t.waitingForMemory : t.state(state)}</span>
      ${model.is_pinned ? html`<span class="chip small"><${Icon} name="pin" />${t.pinned}</span>` : null}</header>
    ${isComing && !model.is_waiting ? html`<${Loading} model=${model} />` : null}
    ${isLoaded ? html`<${Facts} model=${model} />` : null}
    <footer>
      ${isLoaded || isComing
        ? html`<button type="button" onClick=${() => interrupting("unload", model)}>${t.order("unload")}</button>
            <button type="button" onClick=${() => interrupting("restart", model)}>${t.order("restart")}</button>`
        : html`<button type="button" class="primary" onClick=${() => command("load", name)}>${t.order("load")}</button>`}
      <button type="button" onClick=${() => command(model.is_pinned ? "unpin" : "pin", name)}>${t.order(model.is_pinned ? "unpin" : "pin")}</button>
      ${model.last_failure ? html`<button type="button" class=${hasFailed ? "quiet bad" : "quiet"} aria-expanded=${String(isTold)} onClick=${() => setTold(!isTold)}>
        <${Icon} name="warning" />${t.lastFailure}</button>` : null}
    </footer>
    ${(isTold || hasFailed) && model.last_failure ? html`<p class="failure">${model.last_failure}</p>` : null}
    ${model.batch_mode_reason ? html`<p class="faint note">${model.batch_mode_reason}</p>` : null}
  </article>`;
}

/** @param {{model: LiveModel}} props */
function Loading({ model }) {
  const { loaded_bytes: loaded, total_bytes: total, state } = model;
  if (!total) return html`<p class="faint">${state === "backoff" ? t.startsAgain : t.loading}</p>`;
  return html`<p class="loading"><progress max="1" value=${loaded / total} aria-label=${t.loading}></progress><span>${percent(loaded / total)}</span>
    <span class="faint">${partOf(loaded, total)}</span></p>`;
}

/** @param {{model: LiveModel}} props */
function Facts({ model }) {
  const cached = model.prompt_tokens ? percent(model.prompt_tokens_cached / model.prompt_tokens) : "–";
  const facts = [
    [t.fact.memory, model.share_bytes ? partOf(model.footprint_bytes, model.share_bytes) : bytes(model.footprint_bytes)],
    [t.fact.kv, bytes(model.kv_bytes)],
    [t.fact.running, `${model.running} / ${model.slots}${model.waiting ? ` + ${model.waiting}` : ""}`],
    [t.fact.speed, t.perSecond(rate(model.tokens_per_s ?? 0))],
    [t.fact.cached, cached],
    [t.fact.context, model.context ? count(model.context) : "–"],
    ...(model.restarts ? [[t.fact.restarts, String(model.restarts)]] : []),
  ];
  return html`<dl class="facts">${facts.map(([label, value]) => html`<div key=${label} title=${label === t.fact.memory ? t.memoryTitle : undefined}><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>`;
}
