// Links in text that a model wrote: addresses that may be followed, and those that stay text.

const SAFE = new Set(["http:", "https:", "mailto:"]);

/** The address as a link may carry it, or null. @param {string} address */
export function safeAddress(address) {
  let url;
  try {
    // Without a base: an address of this page would be one of the daemon's own.
    url = new URL(address);
  } catch {
    return null;
  }
  return SAFE.has(url.protocol) ? url.href : null;
}
