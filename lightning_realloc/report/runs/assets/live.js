"use strict";

// In a dashboard, the page's body names the address of its data. They are asked for again and again, with the tag of
// those that are shown; `show` of page.js draws newer ones, and keeps zoom, filters and place.

const LEAST_WAIT_MS = 1000;
const WAITS_PER_ANSWER = 4; // of a server that needs long: the page asks it for a fifth of the time at most

async function ask(address, tag) {
  const answer = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
  if (answer.status === 304) {
    return null;
  }
  if (!answer.ok) {
    throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  }
  return { tag: answer.headers.get("ETag"), data: await answer.json() };
}

async function followRun(address) {
  const state = document.createElement("p");
  state.id = "live";
  state.setAttribute("role", "status");
  document.querySelector("header").append(state);
  let tag = null;
  for (;;) {
    const begin = performance.now();
    try {
      const newer = await ask(address, tag);
      if (newer !== null) {
        tag = newer.tag;
        globalThis.show(newer.data);
      }
      setState(state, "Following the run");
    } catch (error) {
      setState(state, `No newer data: ${error.message}. The page asks again.`);
    }
    const wait = Math.max(LEAST_WAIT_MS, WAITS_PER_ANSWER * (performance.now() - begin));
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function setState(element, text) {
  if (element.textContent !== text) {
    element.textContent = text; // only changes are announced
  }
}

if (document.body.dataset.follow) {
  followRun(document.body.dataset.follow);
}
