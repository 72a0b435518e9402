"use strict";
/* Draw a report from its data. `show(data)` draws; called again with newer data, it keeps zoom, filters, sorting and
   the place on the page. Texts of the run become text nodes; in charts, `plain` escapes them. */

const PALETTE = {
  light: ["#0072b2", "#c04e00", "#00795a", "#a83a78", "#7a5c00", "#5546b0", "#007a8a", "#8f2d2d", "#4d6b00", "#5f6670"],
  dark: ["#5cb4ee", "#ff9b54", "#35cc9c", "#e996c6", "#e2c136", "#aea4ff", "#5fd4e0", "#ff8f8f", "#b4d455", "#b5bdc7"],
};
/* Places in the palette of known calls and roles, so that a call has one color in every chart and report. */
const PLACES = {
  "actor.generate": 0, "actor.train": 1, "reference.infer": 2, "critic.infer": 3, "critic.train": 4, "reward.infer": 5,
  "actor.infer": 6, "judge": 7, "actor": 0, "critic": 4, "reference": 2, "reward": 5,
};
const KINDS = {
  light: { wait: "#d3dae2", host: "#aab4bf", move: "#4a5866", offload: "#66788a", save: "#66788a", other: "#8795a3" },
  dark: { wait: "#37424e", host: "#5c6976", move: "#c3ccd6", offload: "#98a6b4", save: "#98a6b4", other: "#7f8d9b" },
};
const PATTERNS = { move: "/", offload: "\\", save: "x", other: "." };
const FIRST_FREE_PLACE = 8; // that no known call or role has
const ROWS_AT_ONCE = 25;
const LONG_CELL = 160;

const places = new Map(Object.entries(PLACES));
const charts = new Map(); // id -> {chart, plot, ...}
const tables = new Map(); // id -> {table, filter, sorted, descending, limit, ...}
const queue = [];         // charts that wait to be drawn, one per frame, so that the page opens at once
let theme = "light";
let isDrawing = false;

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
  for (const chart of section.charts) showChart(grid, chart);
  for (const table of section.tables) showTable(element, table);
}

function makeFinding(finding) {
  const level = make("span", { class: "level" }, finding.level === "warning" ? "Warning: " : "Note: ");
  return make("div", { class: `finding ${finding.level}` }, make("p", {}, level, finding.text), make("p", {}, finding.advice));
}

/* ---- charts */

function showChart(grid, chart) {
  const figure = keyed(grid, `chart-${chart.id}`, () => {
    const summary = make("p", { class: "hidden-text" });
    const plot = make("div", { class: "plot" });
    const caption = make("figcaption", {}, make("h3", {}, chart.title), summary);
    charts.set(chart.id, { plot, summary, chosen: null });
    const wide = chart.kind === "lanes" || chart.kind === "stack" || chart.wide;
    return make("figure", wide ? { class: "wide" } : {}, caption, plot);
  });
  const state = charts.get(chart.id);
  const content = JSON.stringify(chart);
  if (state.content === content) return;
  Object.assign(state, { chart, content });
  state.summary.textContent = chart.summary;
  if (chart.kind === "lanes") showFrameControls(figure, state);
  if (!queue.includes(state)) queue.push(state);
}

function startDrawing() {
  if (isDrawing) return;
  isDrawing = true;
  document.body.dataset.drawn = "false";
  drawNext();
}

function drawNext() {
  const state = queue.shift();
  if (state === undefined) {
    isDrawing = false;
    document.body.dataset.drawn = "true";
    return;
  }
  try {
    draw(state);
  } catch (error) {
    state.plot.textContent = `This chart cannot be drawn: ${error.message}`;
  }
  requestAnimationFrame(drawNext);
}

function draw(state) {
  const painters = { lines: paintLines, stack: paintLines, bars: paintBars, lanes: paintLanes };
  const { traces, layout } = painters[state.chart.kind](state.chart, state);
  const touch = matchMedia("(pointer: coarse)").matches; // where a drag scrolls the page
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim();
  const rule = style.getPropertyValue("--rule").trim();
  const axis = { gridcolor: rule, linecolor: rule, zerolinecolor: rule, automargin: true };
  const { xaxis, yaxis, ...rest } = layout;
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
    margin: { l: 48, r: 12, t: 8, b: 32 }, height: 270, dragmode: touch ? false : "zoom", hovermode: "closest",
    uirevision: "keep", legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemwidth: 30, traceorder: "normal" },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
  };
  Plotly.react(state.plot, traces, { ...base, ...rest }, { responsive: true, displayModeBar: false });
}

/* Plotly reads some HTML and templates in names and texts. */
function plain(text, limit = 60) {
  const short = text.length > limit ? `${text.slice(0, limit - 1)}…` : text;
  return short.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "% {");
}

function colorOf(name) {
  const role = name.split("/")[0];
  const known = places.has(name) ? name : places.has(role) && name.includes("/") ? role : name;
  if (!places.has(known)) places.set(known, FIRST_FREE_PLACE + places.size - Object.keys(PLACES).length);
  return PALETTE[theme][places.get(known) % PALETTE[theme].length];
}

function colorOfPiece(name, kind) {
  return kind === "call" ? colorOf(name) : KINDS[theme][kind] ?? KINDS[theme].other;
}

function axisOf(unit) {
  if (unit === "share") return { tickformat: ".0%", rangemode: "tozero" };
  return { title: { text: plain(unit === "s" ? "seconds" : unit) } };
}

/* Lines of one chart differ in color: of two with the same one, the second gets a free one. */
function distinctColors(names) {
  const chosen = new Map();
  for (const name of names) {
    const wished = colorOf(name);
    const used = [...chosen.values()];
    chosen.set(name, used.includes(wished) ? PALETTE[theme].find((color) => !used.includes(color)) ?? wished : wished);
  }
  return chosen;
}

function paintLines(chart) {
  const stacked = chart.kind === "stack";
  const colors = distinctColors([...new Set(chart.series.map((one) => one.group ?? one.name))]);
  const traces = [];
  for (const one of chart.series) {
    const place = one.place === undefined ? null : PALETTE[theme][one.place % PALETTE[theme].length]; // of a compared run
    const color = place ?? (one.purpose ? colorOfPiece(one.name, one.purpose) : colors.get(one.group ?? one.name));
    if (one.low) traces.push(...envelope(one, color));
    const trace = {
      type: "scatter", mode: one.x.length === 1 ? "markers" : "lines", name: plain(one.name), x: one.x, y: one.y,
      line: { color, width: one.pale ? 1 : 2, dash: one.dash }, opacity: one.pale ? 0.4 : 1, marker: { color },
      showlegend: !(one.pale && one.group),
      hovertemplate: `iteration %{x}: %{y}<extra>${plain(one.name)}</extra>`,
    };
    if (stacked) Object.assign(trace, { stackgroup: "all", fillcolor: color, line: { color, width: 0.5 } });
    traces.push(trace);
  }
  return { traces, layout: { showlegend: true, yaxis: axisOf(chart.unit) } };
}

function envelope(one, color) {
  const edge = { type: "scatter", mode: "lines", x: one.x, line: { width: 0 }, showlegend: false, hoverinfo: "skip" };
  const fillcolor = `${color}33`;
  return [{ ...edge, y: one.low }, { ...edge, y: one.high, fill: "tonexty", fillcolor }];
}

function paintBars(chart) {
  const categories = chart.categories.map((name) => plain(name));
  const colors = distinctColors(chart.series.map((one) => one.group ?? one.name));
  const traces = chart.series.map((one) => {
    const color = colors.get(one.group ?? one.name);
    const marker = one.outlined
      ? { color: "rgba(0,0,0,0)", line: { color, width: 1.5 } }
      : { color, line: { color, width: 1 } };
    return {
      type: "bar", name: plain(one.name), x: categories, y: one.y, marker,
      hovertemplate: `%{x}: %{y}<extra>${plain(one.name)}</extra>`,
    };
  });
  for (const limit of chart.limits ?? []) {
    traces.push({
      type: "scatter", mode: "lines", name: plain(limit.name), x: categories, y: categories.map(() => limit.value),
      line: { color: KINDS[theme].move, dash: "dash", width: 2 },
    });
  }
  return { traces, layout: { barmode: "group", xaxis: { type: "category" }, yaxis: axisOf(chart.unit) } };
}

/* ---- lanes of one iteration */

function frameOf(state) {
  const frames = state.chart.frames;
  return frames.find((one) => one.step === state.chosen) ?? frames[frames.length - 1];
}

function showFrameControls(figure, state) {
  const frames = state.chart.frames;
  if (!state.slider) {
    state.slider = make("input", { type: "range", min: 0, step: 1, id: "lanes-slider" });
    state.output = make("output", { for: "lanes-slider" });
    state.slider.addEventListener("input", () => {
      const at = Number(state.slider.value);
      const chosen = state.chart.frames[at];
      state.chosen = at === state.chart.frames.length - 1 ? null : chosen.step; // the last one follows new data
      describeFrame(state);
      draw(state);
    });
    const controls = make("div", { class: "controls" }, make("label", { for: "lanes-slider" }, "Iteration"), state.slider, state.output);
    figure.insertBefore(controls, state.plot);
  }
  state.slider.max = frames.length - 1;
  state.slider.value = frames.indexOf(frameOf(state));
  describeFrame(state);
}

function describeFrame(state) {
  const frame = frameOf(state);
  const source = frame.predicted_from ? `; outlined below each rank: predicted from ${frame.predicted_from}` : "";
  state.output.textContent = `${frame.step}, ${frame.seconds.toPrecision(3)} s${source}`;
  state.slider.setAttribute("aria-valuetext", `iteration ${frame.step}`);
}

function paintLanes(chart, state) {
  const frame = frameOf(state);
  const groups = new Map();
  for (const bar of frame.bars) {
    const name = bar[2] === "wait" ? "waiting" : bar[1];
    const key = `${bar[2]} ${name}`;
    if (!groups.has(key)) groups.set(key, { name, kind: bar[2], bars: [] });
    groups.get(key).bars.push(bar);
  }
  const row = new Map(frame.ranks.map((rank, at) => [rank, at]));
  const has = frame.predicted.length > 0;
  const order = ["call", "move", "offload", "save", "other", "host", "wait"];
  const sorted = [...groups.values()].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
  const traces = sorted.map((group) => barsOf(group.name, group.bars, row, {
    offset: -0.4, width: has ? 0.52 : 0.8,
    marker: { color: colorOfPiece(group.name, group.kind), pattern: { shape: PATTERNS[group.kind] ?? "", size: 5 } },
  }));
  const predicted = new Map();
  for (const bar of frame.predicted) predicted.set(bar[1], [...(predicted.get(bar[1]) ?? []), bar]);
  let isFirst = true;
  for (const [name, bars] of predicted) {
    const line = { color: colorOfPiece(name, bars[0][2]), width: 1.5 };
    traces.push({
      ...barsOf("predicted", bars, row, { offset: 0.18, width: 0.2, marker: { color: "rgba(0,0,0,0)", line } }),
      legendgroup: "predicted", showlegend: isFirst,
    });
    isFirst = false;
  }
  const ticks = frame.ranks.map((rank) => `rank ${rank}`);
  const yaxis = { tickvals: frame.ranks.map((_, at) => at), ticktext: ticks, autorange: "reversed", zeroline: false };
  const height = 130 + Math.max(2, frame.ranks.length) * (has ? 44 : 30);
  const xaxis = { title: { text: "seconds since the iteration began" }, rangemode: "tozero" };
  return { traces, layout: { barmode: "overlay", height, xaxis, yaxis } };
}

function barsOf(name, bars, row, options) {
  const label = name === "predicted" ? "predicted " : "";
  return {
    type: "bar", orientation: "h", name: plain(name), y: bars.map((bar) => row.get(bar[0])), base: bars.map((bar) => bar[3]),
    x: bars.map((bar) => bar[4]), text: bars.map((bar) => plain(`rank ${bar[0]}: ${label}${bar[1]}, ${bar[4].toPrecision(3)} s`, 200)),
    textposition: "none", hovertemplate: "%{text}<extra></extra>", ...options,
  };
}

/* ---- tables */

function showTable(parent, table) {
  const id = `table-${table.id}`;
  keyed(parent, id, () => {
    const state = { filter: "", sorted: null, descending: true, limit: ROWS_AT_ONCE };
    tables.set(table.id, state);
    return makeTable(table, state);
  });
  const state = tables.get(table.id);
  const content = JSON.stringify(table);
  if (state.content === content) return; // open cells stay open
  Object.assign(state, { table, content });
  state.note.textContent = table.note;
  fillTable(state);
}

function makeTable(table, state) {
  const head = make("div", { class: "head" }, make("h3", {}, table.title));
  if (table.searchable) {
    const search = make("input", { type: "search", "aria-label": `Search in ${table.title}`, placeholder: "Search" });
    search.addEventListener("input", () => {
      Object.assign(state, { filter: search.value.toLowerCase(), limit: ROWS_AT_ONCE });
      fillTable(state);
    });
    head.append(search);
  }
  state.count = make("span", { class: "quiet", role: "status" });
  head.append(state.count);
  state.header = make("tr");
  state.body = make("tbody");
  state.more = make("button", { type: "button" }, "Show more rows");
  state.more.addEventListener("click", () => {
    state.limit += ROWS_AT_ONCE;
    fillTable(state);
  });
  state.note = make("p", { class: "quiet" });
  const caption = make("caption", { class: "hidden-text" }, table.title);
  const content = make("table", {}, caption, make("thead", {}, state.header), state.body);
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": table.title }, content);
  return make("div", { class: "table" }, head, scroll, state.more, state.note);
}

function fillTable(state) {
  const { table } = state;
  const matching = table.rows.filter((row) => !state.filter || row.some((cell) => textOf(cell).toLowerCase().includes(state.filter)));
  if (state.sorted !== null) {
    const sign = state.descending ? -1 : 1;
    matching.sort((a, b) => sign * compare(valueOf(a[state.sorted]), valueOf(b[state.sorted])));
  }
  const focused = [...state.header.children].findIndex((cell) => cell.contains(document.activeElement));
  state.header.replaceChildren(...table.columns.map((column, at) => makeHeader(state, column, at)));
  if (focused >= 0) state.header.children[focused]?.querySelector("button").focus();
  const shown = matching.slice(0, state.limit);
  state.body.replaceChildren(...shown.map((row) => make("tr", {}, ...row.map((cell, at) => makeCell(cell, table.columns[at])))));
  state.more.hidden = shown.length === matching.length;
  const isPart = shown.length < table.rows.length;
  state.count.textContent = isPart || table.searchable ? `${shown.length} of ${table.rows.length} rows` : "";
}

function makeHeader(state, column, at) {
  const button = make("button", { type: "button" }, column.name);
  button.addEventListener("click", () => {
    state.descending = state.sorted === at ? !state.descending : column.kind === "number";
    state.sorted = at;
    fillTable(state);
  });
  const order = state.sorted === at ? (state.descending ? "descending" : "ascending") : "none";
  return make("th", { scope: "col", class: column.kind, "aria-sort": order }, button);
}

function makeCell(cell, column) {
  const text = textOf(cell);
  if (text.length <= LONG_CELL) return make("td", { class: column.kind }, text);
  const summary = make("summary", {}, `${text.slice(0, LONG_CELL)}…`);
  return make("td", { class: column.kind }, make("details", {}, summary, text.slice(LONG_CELL)));
}

function textOf(cell) {
  if (cell === null || cell === undefined) return "–";
  return typeof cell === "object" ? cell.text : String(cell);
}

function valueOf(cell) {
  if (cell === null || cell === undefined) return null;
  if (typeof cell === "object") return cell.value;
  const number = Number(cell);
  return cell !== "" && Number.isFinite(number) ? number : cell;
}

/* Order numbers before texts, and nothing before both. */
function compare(a, b) {
  const rank = (value) => (value === null ? 0 : typeof value === "number" ? 1 : 2);
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  return typeof a === "string" ? a.localeCompare(b) : a - b;
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

function start() {
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
