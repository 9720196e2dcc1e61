// Code blocks: highlighted once they are whole, with a button that copies their text.

import { Component, h, html } from "../vendor/preact.js";
import { CopyButton } from "../parts/copy.js";

const HIGHLIGHT_CHARS_MAX = 60_000;

/** @type {Promise<unknown> | null} */
let loading = null;
/** @type {typeof import("../vendor/lowlight.js").lowlight | null} */
let lowlight = null;

function load() {
  loading ??= import("../vendor/lowlight.js").then(
    (loaded) => (lowlight = loaded.lowlight),
    () => (loading = null),
  );
  return loading;
}

/** @param {any} node @returns {any} */
function element(node) {
  if (node.type === "text") return node.value;
  const names = (node.properties?.className ?? []).filter((/** @type {string} */ name) => /^hljs-[\w-]+$|^[\w]+_$/.test(name));
  return h("span", { class: names.join(" ") }, node.children.map(element));
}

/** @param {string} text @param {string} language */
function highlighted(text, language) {
  if (lowlight === null || !language || text.length > HIGHLIGHT_CHARS_MAX || !lowlight.registered(language)) return text;
  return lowlight.highlight(language, text).children.map(element);
}

/** `isOpen` while it is still written. @extends {Component<{text: string, language: string, isOpen?: boolean}>} */
export class Code extends Component {
  #isMounted = true;

  componentDidMount() {
    if (lowlight === null && this.props.language) load().then(() => this.#isMounted && this.setState({}));
  }

  componentWillUnmount() {
    this.#isMounted = false;
  }

  render() {
    const { text, language, isOpen = false } = this.props;
    return html`<div class="code-block">
      <div class="code-bar"><span class="code-language">${language}</span><${CopyButton} text=${() => text} /></div>
      <pre dir="ltr" tabindex="0"><code>${isOpen ? text : highlighted(text, language.toLowerCase())}</code></pre>
    </div>`;
  }
}
