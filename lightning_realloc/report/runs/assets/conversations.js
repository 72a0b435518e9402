"use strict";
/* Show conversations, folded, as turns with thoughts, calls, answers, seconds and rewards. Texts become text nodes. */

const LONG_MESSAGE = 400; // characters from which an answer is folded

function showConversation(parent, talk, addresses) {
  const element = keyed(parent, `conversation-${talk.id}`, () => make("details", { class: "conversation" }));
  const known = talk.messages.flatMap((message) => message.pictures).filter((name) => name in addresses);
  const content = JSON.stringify([talk, known]);
  if (element.content === content) return element; // stays open, and so do its parts
  element.content = content;
  const facts = talk.facts.map(([name, value]) => ` · ${name.replace("_", " ")} ${value}`).join("");
  const turns = `${talk.turns} ${talk.turns === 1 ? "turn" : "turns"}`;
  const title = `Iteration ${talk.step}: ${turns}, ${short(talk.seconds)} s of its environment${facts}`;
  const failure = talk.failure === null ? null : make("p", { class: "failure" }, `Failed: ${talk.failure}`);
  const rest = talk.num_left_out ? make("p", { class: "quiet" }, `${talk.num_left_out} further messages are left out.`) : null;
  const list = make("ol", {}, ...talk.messages.map((message) => makeMessage(message, addresses)));
  element.replaceChildren(make("summary", {}, talk.failure === null ? title : `${title} · failed`), list, ...[rest, failure].filter(Boolean));
  return element;
}

function short(number) {
  return Number(number.toPrecision(3)); // without an exponent or zeros at the end
}

function makeMessage(message, addresses) {
  const outcome = [];
  if (message.reward !== undefined && message.reward !== null) outcome.push(`reward ${short(message.reward)}`);
  if (message.seconds !== undefined && message.seconds !== null) outcome.push(`${short(message.seconds)} s`);
  const name = message.name === null ? message.role : `${message.role} ${message.name}`;
  const head = make("div", {}, make("strong", {}, name), make("span", { class: "quiet" }, outcome.length ? ` ${outcome.join(", ")}` : ""));
  const thought = message.thought ? make("details", {}, make("summary", {}, "Thoughts"), make("pre", {}, message.thought)) : null;
  const calls = message.calls.map((call) => make("pre", { class: "call" }, call));
  return make("li", { class: message.role }, head, thought, ...makePictures(message.pictures, addresses), makeText(message.text), ...calls);
}

function makeText(text) {
  if (!text) return null;
  if (text.length <= LONG_MESSAGE) return make("pre", {}, text);
  return make("details", {}, make("summary", {}, `${text.slice(0, LONG_CELL)}… (${text.length} characters)`), make("pre", {}, text));
}
