// Configuration, read-only: shown, checked and reloaded, with what a reload changes; and the settings of clients.

import { html, useEffect, useState } from "../vendor/preact.js";
import { confirmed } from "../parts/dialog.js";
import { notify } from "../parts/notice.js";
import { about } from "../server/feed.js";
import { sentence } from "../server/http.js";
import { refreshModels } from "../server/models.js";
import { order, sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { duration } from "../text/format.js";
import { Code } from "../text/code.js";
import { Connect } from "./connect.js";

/** @typedef {{added: string[], removed: string[], restarted: string[], changed: string[], needs_restart: string[]}} Changes */

export function Settings() {
  const [config, setConfig] = useState(/** @type {{file: string, toml: string} | null} */ (null));
  const [checked, setChecked] = useState(/** @type {{ok: boolean, error: string, line: number | null, changes: Changes | null, diff: string} | null} */ (null));
  const [isBusy, setBusy] = useState(false);
  const read = () => sessionJson("config").then(setConfig, (error) => notify(sentence(error), true));
  useEffect(() => void read(), []);
  const during = async (/** @type {() => Promise<unknown>} */ work) => {
    setBusy(true);
    try {
      await work();
    } catch (error) {
      notify(sentence(error), true);
    } finally {
      setBusy(false);
    }
  };
  const check = () => during(async () => setChecked(await order("config/check")));
  const reload = () =>
    during(async () => {
      const restarted = checked?.changes?.restarted ?? [];
      if (restarted.length && !(await confirmed({ title: t.reload, text: t.reloadText(restarted.join(", ")), action: t.reload }))) return;
      const { done, diff } = await order("config/reload");
      setChecked({ ok: true, error: "", line: null, changes: done, diff });
      notify(t.reloaded);
      refreshModels();
      await read();
    });
  const now = about.value;
  return html`
    ${now ? html`<section><h2>mlxd ${now.version}</h2><dl class="facts wide-facts"><div><dt>${t.upFor}</dt><dd>${duration(now.uptime_s)}</dd></div><div><dt>${t.address}</dt><dd>${now.url}</dd></div></dl></section>` : null}
    <section aria-labelledby="config-title"><h2 id="config-title">${t.configuration}<span class="actions"><button type="button" disabled=${isBusy} onClick=${check}>${t.check}</button>
      <button type="button" disabled=${isBusy || checked?.ok === false} onClick=${reload}>${t.reload}</button></span></h2>
      ${config ? html`<p class="faint"><code>${config.file}</code></p>` : null}
      <div aria-live="polite">${checked ? html`<${Checked} checked=${checked} />` : null}</div>
      ${config ? html`<details><summary>${t.inForce}</summary><${Code} text=${config.toml} language="toml" /></details>` : null}</section>
    <${Connect} />`;
}

/** @param {{checked: {ok: boolean, error: string, line: number | null, changes: Changes | null, diff: string}}} props */
function Checked({ checked }) {
  if (!checked.ok) return html`<p class="failure">${checked.line === null ? "" : t.line(checked.line)}${checked.error}</p>`;
  const changes = /** @type {[string, string[]][]} */ (Object.entries(checked.changes ?? {})).filter(([, names]) => names.length);
  if (!changes.length && !checked.diff) return html`<p class="good">${t.noChanges}</p>`;
  return html`<dl class="changes">${changes.map(([kind, names]) => html`<div key=${kind}><dt>${t.changeKind(kind)}</dt><dd>${names.join(", ")}</dd></div>`)}</dl>
    ${checked.diff ? html`<${Code} text=${checked.diff} language="diff" />` : null}`;
}
