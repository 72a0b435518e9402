"use strict";
/* Draw a report from its data. `show(data)` draws; called again with newer data, it keeps zoom, filters, sorting and
   the place on the page. Texts of the run become text nodes; in charts, `plain` escapes them. */

/* ---- elements */

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function keyed(parent, id, build) {
  let element = document.getElementById(id);
  if (element === null) {
    element = build();
    element.id = id;
    parent.append(element);
  }
  return element;
}

/* Show items in their order, each in the element that `showOne` returns; other elements leave the page. */
function showEach(parent, items, showOne, forget) {
  const shown = items.map((item) => showOne(parent, item));
  for (const element of [...parent.children]) {
    if (shown.includes(element)) continue;
    forget(element);
    element.remove();
  }
  shown.forEach((element, at) => {
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at]); // keeps focus in the others
  });
}

/* ---- the page */

function show(data) {
  document.title = data.title;
  document.getElementById("title").textContent = data.title;
  const facts = data.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  document.getElementById("facts").replaceChildren(...facts);
  showProblems(data.problems);
  showContents(data.sections);
  for (const section of data.sections) showSection(section);
  startDrawing();
}

function showProblems(problems) {
  const box = document.getElementById("problems");
  box.hidden = problems.length === 0;
  const list = make("ul", {}, ...problems.map((problem) => make("li", {}, problem)));
  box.replaceChildren(make("h2", {}, "Problems"), list);
}

function showContents(sections) {
  const items = sections.map((section) => {
    const warnings = section.findings.filter((one) => one.level === "warning").length;
    const count = warnings ? make("span", { class: "count" }, ` (${warnings} ${warnings === 1 ? "warning" : "warnings"})`) : null;
    return make("li", {}, make("a", { href: `#section-${section.id}` }, section.title), count);
  });
  const list = keyed(document.getElementById("contents"), "contents-list", () => make("ul"));
  if (list.textContent !== items.map((item) => item.textContent).join("")) list.replaceChildren(...items);
}

function showSection(section) {
  const main = document.getElementById("content");
  const id = `section-${section.id}`;
  const element = keyed(main, id, () => {
    const heading = make("h2", { id: `${id}-title` }, section.title);
    return make("section", { "aria-labelledby": `${id}-title` }, heading);
  });
  const words = keyed(element, `${id}-words`, () => make("div"));
  const lines = section.sentences.map((sentence) => make("p", {}, sentence));
  if (section.missing) lines.push(make("p", { class: "missing" }, section.missing));
  words.replaceChildren(...lines, ...section.findings.map(makeFinding));
  const grid = keyed(element, `${id}-charts`, () => make("div", { class: "charts" }));
  showEach(grid, section.charts, showChart, forgetChart);
  showEach(keyed(element, `${id}-tables`, () => make("div")), section.tables, showTable, forgetTable);
  const talks = keyed(element, `${id}-conversations`, () => make("div"));
  const pictures = Object.assign({}, ...section.tables.map((table) => table.pictures));
  showEach(talks, section.conversations, (parent, talk) => showConversation(parent, talk, pictures), () => {});
}

function makeFinding(finding) {
  const level = make("span", { class: "level" }, finding.level === "warning" ? "Warning: " : "Note: ");
  return make("div", { class: `finding ${finding.level}` }, make("p", {}, level, finding.text), make("p", {}, finding.advice));
}

/* ---- colors */

function setTheme(name) {
  theme = name;
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(name === "dark"));
  for (const state of charts.values()) if (!queue.includes(state)) queue.push(state);
}

function rememberedTheme() {
  try {
    return localStorage.getItem("realloc-theme");
  } catch {
    return null; // a file's storage may be closed
  }
}

/* Paper has no next frame, another width, and a light background. */
function drawForPaper() {
  const before = theme;
  document.body.classList.add("paper");
  setTheme("light");
  while (drawOne());
  addEventListener("afterprint", () => {
    document.body.classList.remove("paper");
    setTheme(before);
    startDrawing();
  }, { once: true });
}

function start() {
  addEventListener("beforeprint", drawForPaper);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(rememberedTheme() ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => {
    if (rememberedTheme() === null) {
      setTheme(dark.matches ? "dark" : "light");
      startDrawing();
    }
  });
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(theme === "dark" ? "light" : "dark");
    try {
      localStorage.setItem("realloc-theme", theme);
    } catch {
      // the choice holds until the page is closed
    }
    startDrawing();
  });
  globalThis.show = show;
  show(JSON.parse(document.getElementById("data").textContent));
}

start();
