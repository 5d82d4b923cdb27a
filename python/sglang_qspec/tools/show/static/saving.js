// Saves an answer as one HTML file, which opens without a network.

const template = fetch("saved.html").then((response) => (response.ok ? response.text() : null), () => null);

/** The text of the file for `data`; null if the template could not be loaded. */
export async function savedPage(data) {
  const text = await template;
  // An escaped "<" cannot end the script element that holds the data.
  const json = JSON.stringify(data).replaceAll("<", "\\u003c");
  return text && text.replace('"HERE"', () => json);
}

/** Let the browser download the file. */
export function download(text, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
