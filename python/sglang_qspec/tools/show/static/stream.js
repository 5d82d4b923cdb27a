// Reads the events of an answer, one line of JSON each.

/** Ask, and yield each event. Throws an Error with a message for the user, or AbortError after a stop. */
export async function* ask(question, signal) {
  let response;
  try {
    response = await fetch("ask", { method: "POST", body: JSON.stringify(question), headers: { "Content-Type": "application/json" }, signal });
  } catch (error) {
    throw reworded(error, "the command qspec show does not answer; it may have ended");
  }
  if (!response.ok) throw new Error(`qspec show refused the question (HTTP ${response.status}): ${await response.text()}`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let ended = false;
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      throw reworded(error, "the command qspec show broke off the answer");
    }
    if (piece.done) break;
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      ended = Boolean(event.end || event.error);
      yield event;
    }
  }
  if (!ended) throw new Error("the command qspec show broke off the answer; it may have ended");
}

function reworded(error, message) {
  return error.name === "AbortError" ? error : new Error(message);
}
