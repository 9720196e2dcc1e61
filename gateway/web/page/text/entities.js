// Character references in markdown: names and numbers to characters, without an HTML parser.

/** @type {Record<string, string>} */
const NAMES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…",
  mdash: "—", ndash: "–", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", laquo: "«", raquo: "»", bull: "•",
  middot: "·", times: "×", divide: "÷", plusmn: "±", deg: "°", micro: "µ", para: "¶", sect: "§", euro: "€", pound: "£",
  yen: "¥", cent: "¢", larr: "←", rarr: "→", uarr: "↑", darr: "↓", harr: "↔", infin: "∞", ne: "≠", le: "≤", ge: "≥",
  asymp: "≈", sum: "∑", prod: "∏", radic: "√", int: "∫", part: "∂", nabla: "∇", isin: "∈", forall: "∀", exist: "∃",
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ε", lambda: "λ", mu: "μ", pi: "π", sigma: "σ", omega: "ω",
  frac12: "½", frac14: "¼", frac34: "¾", zwj: "\u200d", zwnj: "\u200c", ensp: "\u2002", emsp: "\u2003", thinsp: "\u2009",
};
const REFERENCE = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z][a-zA-Z0-9]{1,12}));/g;

/** @param {number} code */
const character = (code) => (code === 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? "\ufffd" : String.fromCodePoint(code));

/** Text with its references replaced; a name that is not known stays as it is. @param {string} text */
export function decodeEntities(text) {
  if (!text.includes("&")) return text;
  return text.replace(REFERENCE, (whole, decimal, hex, name) => {
    if (decimal) return character(Number.parseInt(decimal, 10));
    if (hex) return character(Number.parseInt(hex, 16));
    return Object.hasOwn(NAMES, name) ? /** @type {string} */ (NAMES[name]) : whole;
  });
}
