// Stylesheets that are loaded when they are first needed.

/** Adds a stylesheet once, and waits until it is there. @param {string} href below the page @returns {Promise<unknown>} */
export function addStyle(href) {
  if (document.querySelector(`link[href="${href}"]`)) return Promise.resolve();
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = href;
  document.head.append(link);
  return new Promise((resolve) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", resolve);
  });
}
