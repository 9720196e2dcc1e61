// Formulas: TeX to MathML elements, by KaTeX, which is loaded with the first formula.

import { Component, h } from "../vendor/preact.js";

/** @typedef {import("../vendor/katex.js").MathTree} MathTree */

// MathML Core without what can hold a link, a script or a style.
const ELEMENTS = new Set([
  "math", "semantics", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot", "mstyle", "mpadded",
  "mphantom", "menclose", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "none",
  "mtable", "mtr", "mtd", "mlabeledtr", "merror", "mglyph",
]);
const ATTRIBUTES = new Set([
  "xmlns", "display", "mathvariant", "stretchy", "fence", "separator", "lspace", "rspace", "minsize", "maxsize", "accent",
  "accentunder", "linethickness", "scriptlevel", "displaystyle", "columnalign", "columnspacing", "rowspacing", "columnlines",
  "rowlines", "width", "height", "depth", "voffset", "notation", "mathcolor", "mathbackground", "movablelimits", "symmetric",
  "largeop", "side", "mathsize", "close", "open",
]);
const SOURCE_CHARS_MAX = 20_000;

/** @type {Promise<typeof import("../vendor/katex.js")> | null} */
let loading = null;
/** @type {typeof import("../vendor/katex.js") | null} */
let katex = null;

/** Loads KaTeX, once. A load that failed is tried again with the next formula. */
function load() {
  loading ??= import("../vendor/katex.js").then(
    (loaded) => (katex = loaded),
    (error) => {
      loading = null;
      throw error;
    },
  );
  return loading;
}

/** @param {MathTree} node @returns {any} */
function element(node) {
  // A span of KaTeX's own around the formula, or a fragment.
  if (node.type === undefined) return node.text === undefined ? (node.children ?? []).map(element) : node.text;
  if (node.type === "annotation" || !ELEMENTS.has(node.type)) return null;
  const attributes = Object.entries(node.attributes ?? {}).filter(([name]) => ATTRIBUTES.has(name));
  return h(node.type, Object.fromEntries(attributes), (node.children ?? []).map(element));
}

/** @param {string} source @param {boolean} isBlock @returns {any} */
function drawn(source, isBlock) {
  if (katex === null || source.length > SOURCE_CHARS_MAX) return null;
  try {
    return element(katex.tree(source, { displayMode: isBlock, output: "mathml", throwOnError: true, trust: false, maxExpand: 200, strict: false }));
  } catch {
    return null;
  }
}

/** @extends {Component<{source: string, raw: string, isBlock: boolean}, {isLoaded: boolean}>} */
export class Formula extends Component {
  #isMounted = true;
  state = { isLoaded: katex !== null };

  componentDidMount() {
    if (katex !== null) return;
    load().then(() => this.#isMounted && this.setState({ isLoaded: true }), () => {});
  }

  componentWillUnmount() {
    this.#isMounted = false;
  }

  render() {
    const { source, raw, isBlock } = this.props;
    const tree = drawn(source, isBlock);
    if (tree === null) return h("code", { class: "formula-source", dir: "ltr" }, raw.trim());
    return h("span", { class: isBlock ? "formula block" : "formula", dir: "ltr" }, tree);
  }
}
