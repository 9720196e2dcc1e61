// Files to and from the user's disk.

/** Saves a text as a file. @param {string} name @param {string} text @param {string} [type] */
export function saveAs(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Files that the user chooses; none where the choice is cancelled. @param {{accept: string, isMany?: boolean}} options @returns {Promise<File[]>} */
export function chooseFiles({ accept, isMany = false }) {
  return new Promise((resolve) => {
    const input = document.createElement("input");
    input.type = "file";
    input.accept = accept;
    input.multiple = isMany;
    input.addEventListener("change", () => resolve([...(input.files ?? [])]));
    input.addEventListener("cancel", () => resolve([]));
    input.click();
  });
}
