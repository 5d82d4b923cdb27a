// Shows the answer that this file holds.
import { PlainAnswer } from "./answer.js";
import { element } from "./dom.js";
import { rebuilt, View } from "./view.js";

const { question, server, answer, plain, date } = JSON.parse(document.getElementById("data").textContent);

const options = [
  server.model,
  question.chat ? "chat" : "plain prompt",
  `at most ${question.max_new_tokens} tokens`,
  question.temperature ? `temperature ${question.temperature}, seed ${question.seed}` : "greedy",
  question.completions ? `${question.completions} completions` : null,
  date,
];
const view = new View(rebuilt(answer), plain && rebuilt(plain, new PlainAnswer()));
document.body.append(
  element("main", {},
    element("header", {}, element("h1", {}, "qspec show"), element("p", { class: "about" }, options.filter(Boolean).join(" · "))),
    element("div", { class: "asked" }, element("h2", {}, "Prompt"), element("div", { class: "asked-text" }, question.prompt)),
    view.root),
);
view.draw();
