// Hues of models: each keeps its own in the bar and in the charts, in the order in which they were first seen.

const HUES = 8;
/** @type {Map<string, number>} */
const known = new Map();

/** @param {string} name */
export function hue(name) {
  const seen = known.get(name);
  if (seen !== undefined) return seen;
  const next = known.size % HUES;
  known.set(name, next);
  return next;
}

/** The colour of a hue as the theme has it now. @param {number} hue */
export function colour(hue) {
  const probe = document.createElement("i");
  probe.className = `hue-${hue}`;
  document.body.append(probe);
  const found = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return found;
}
