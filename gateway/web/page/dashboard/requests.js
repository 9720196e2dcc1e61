// Requests: those that run, with cancel, and those that were captured.

import { html, useEffect, useState } from "../vendor/preact.js";
import { readingText } from "../chat/progress.js";
import { confirmed } from "../parts/dialog.js";
import { CopyButton } from "../parts/copy.js";
import { Icon } from "../parts/icons.js";
import { notify } from "../parts/notice.js";
import { about, liveRequests, requestsInAll } from "../server/feed.js";
import { sentence } from "../server/http.js";
import { order, sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { count, duration, moment, rate } from "../text/format.js";

/** @typedef {import("../server/feed.js").LiveRequest} LiveRequest */
/** @typedef {{id: string, at: number, method: string, path: string, model: string, key: string | null, status: number, outcome: string, ms: number}} CapturedLine */

/** @param {string} id */
async function cancel(id) {
  try {
    await order("requests/cancel", { id });
  } catch (error) {
    notify(sentence(error), true);
  }
}

export function Requests() {
  const requests = liveRequests.value;
  const more = requestsInAll.value - requests.length;
  const c = t.column;
  return html`<section aria-labelledby="requests-title"><h2 id="requests-title">${t.running}<span class="faint">${requestsInAll.value}</span></h2>
    ${requests.length
      ? html`<div class="table-scroll" tabindex="0" role="group" aria-labelledby="requests-title"><table><thead><tr><th scope="col">${c.request}</th><th scope="col">${c.model}</th><th scope="col">${c.key}</th><th scope="col">${c.state}</th>
          <th scope="col" class="number">${c.age}</th><th scope="col" class="number">${c.prompt}</th><th scope="col" class="number">${c.tokens}</th><th scope="col" class="number">${c.speed}</th><th><span class="off-screen">${t.cancel}</span></th></tr></thead>
          <tbody>${requests.map((each) => html`<${Row} key=${each.id} request=${each} />`)}</tbody></table></div>`
      : html`<p class="empty">${t.nothingRuns}</p>`}
    ${more > 0 ? html`<p class="faint">${t.moreRequests(more)}</p>` : null}</section>
    <${CapturedRequests} />`;
}

/** @param {{request: LiveRequest}} props */
function Row({ request }) {
  const { prefilled_tokens: read, prompt_tokens: prompt, cached_tokens: cached } = request;
  const isReading = read !== undefined && read > 0 && read < prompt && !request.generated_tokens;
  return html`<tr><th scope="row"><code class="id" title=${request.id}>${request.id}</code><span class="faint block">${request.path}</span></th><td>${request.model}</td><td>${request.key ?? "–"}</td>
    <td>${isReading ? html`<progress max=${prompt} value=${read} aria-label=${t.reading}></progress> ${readingText(request)}` : t.requestState(request.state)}</td><td class="number">${duration(request.age_s)}</td>
    <td class="number">${count(prompt)}${cached ? html`<span class="faint"> (${count(cached)})</span>` : null}</td><td class="number">${count(request.generated_tokens)}</td>
    <td class="number">${request.tokens_per_s ? t.perSecond(rate(request.tokens_per_s)) : "–"}</td>
    <td><button type="button" onClick=${() => cancel(request.id)} aria-label=${t.cancelOf(request.id)}>${t.cancel}</button></td></tr>`;
}

function CapturedRequests() {
  const [lines, setLines] = useState(/** @type {CapturedLine[] | null} */ (null));
  const [shown, setShown] = useState("");
  const isOn = about.value?.captures_on;
  const read = () => sessionJson("requests?captured=1").then((answer) => setLines(answer.captured), (error) => notify(sentence(error), true));
  useEffect(() => {
    if (isOn) read();
  }, [isOn, requestsInAll.value]);
  const clear = async () => {
    if (!(await confirmed({ title: t.clearCaptured, text: t.clearCapturedText, action: t.delete }))) return;
    await order("requests/clear").catch((error) => notify(sentence(error), true));
    await read();
  };
  const c = t.column;
  return html`<section aria-labelledby="captured-title"><h2 id="captured-title">${t.captured}
      ${isOn && lines?.length ? html`<button type="button" onClick=${clear}>${t.clear}</button>` : null}</h2>
    ${isOn === false ? html`<p class="empty">${t.capturesOff} <code>${t.capturesHow}</code></p>` : null}
    ${isOn && lines && !lines.length ? html`<p class="empty">${t.noCaptures}</p>` : null}
    ${lines?.length
      ? html`<div class="table-scroll" tabindex="0" role="group" aria-labelledby="captured-title"><table><thead><tr><th scope="col">${c.time}</th><th scope="col">${c.request}</th><th scope="col">${c.model}</th><th scope="col">${c.key}</th><th scope="col">${c.status}</th><th scope="col" class="number">${c.took}</th></tr></thead>
          <tbody>${[...lines].reverse().map((line) => html`<tr key=${line.id} class=${line.status >= 400 ? "failed" : ""}><td>${moment(line.at)}</td>
            <th scope="row"><button type="button" class="link" aria-expanded=${String(shown === line.id)} onClick=${() => setShown(shown === line.id ? "" : line.id)}>${line.method} ${line.path}</button></th>
            <td>${line.model || "–"}</td><td>${line.key ?? "–"}</td><td>${line.status} ${line.outcome}</td><td class="number">${duration(line.ms / 1000)}</td></tr>`)}</tbody></table></div>`
      : null}
    ${shown ? html`<${Detail} key=${shown} id=${shown} />` : null}</section>`;
}

/** A captured request as it was; its bodies are text, whatever is in them. @param {{id: string}} props */
function Detail({ id }) {
  const [detail, setDetail] = useState(/** @type {any} */ (null));
  useEffect(() => {
    sessionJson(`requests/${encodeURIComponent(id)}`).then((answer) => setDetail(answer.captured), (error) => notify(sentence(error), true));
  }, [id]);
  if (!detail) return null;
  const part = (/** @type {string} */ title, /** @type {[string, string][]} */ headers, /** @type {string} */ body, /** @type {boolean} */ isCut) => html`<div class="capture"><h3>${title}${isCut ? html`<span class="faint"> ${t.isCut}</span>` : null}<${CopyButton} text=${() => body} /></h3>
    <details><summary>${t.headers(headers.length)}</summary><pre tabindex="0">${headers.map(([name, value]) => `${name}: ${value}`).join("\n")}</pre></details><pre tabindex="0" dir="auto">${body}</pre></div>`;
  return html`<div class="captures"><p><${Icon} name="requests" /> <code>${id}</code></p>
    ${part(t.requestBody, detail.request_headers, detail.request_body, detail.is_request_cut)}
    ${part(t.responseBody, detail.response_headers, detail.response_body, detail.is_response_cut)}</div>`;
}
