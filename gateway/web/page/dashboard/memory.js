// Memory of all models as one bar.

import { html } from "../vendor/preact.js";
import { liveModels, memory } from "../server/feed.js";
import { t } from "../strings.js";
import { bytes, partOf } from "../text/format.js";
import { hue } from "./hues.js";

export function MemoryBar() {
  const now = memory.value;
  if (now === null) return null;
  const loaded = liveModels.value.filter((model) => model.footprint_bytes > 0);
  const used = loaded.reduce((sum, model) => sum + model.footprint_bytes, 0);
  const whole = Math.max(now.budget_bytes, used, 1);
  const free = Math.max(0, now.budget_bytes - used);
  const told = loaded.map((model) => `${model.name} ${bytes(model.footprint_bytes)}`).concat(t.free(bytes(free))).join(", ");
  return html`<section class="memory" aria-labelledby="memory-title">
    <h2 id="memory-title">${t.memory}<span class="faint">${partOf(used, now.budget_bytes)}</span></h2>
    <div class="memory-bar" role="img" aria-label=${told}>${loaded.map(
      (model) => html`<span key=${model.name} class=${`part hue-${hue(model.name)}`} style=${{ width: `${(100 * model.footprint_bytes) / whole}%` }} title=${`${model.name}: ${bytes(model.footprint_bytes)}`}></span>`,
    )}</div>
    <div class="legend">${loaded.map((model) => html`<span key=${model.name}><i class=${`hue-${hue(model.name)}`}></i>${model.name} <b>${bytes(model.footprint_bytes)}</b></span>`)}
      <span><i></i>${t.free(bytes(free))}</span>
      ${now.waiting.length ? html`<span class="warn">${t.waitFor(now.waiting.join(", "))}</span>` : null}</div>
  </section>`;
}
