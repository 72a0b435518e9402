"use strict";
/* Draw charts with Plotly, one per frame. A chart that changes is drawn again, and keeps its zoom. */

const PALETTE = {
  light: ["#0072b2", "#c04e00", "#00795a", "#a83a78", "#7a5c00", "#5546b0", "#007a8a", "#8f2d2d", "#4d6b00", "#5f6670"],
  dark: ["#5cb4ee", "#ff9b54", "#35cc9c", "#e996c6", "#e2c136", "#aea4ff", "#5fd4e0", "#ff8f8f", "#b4d455", "#b5bdc7"],
};
/* Places in the palette of known calls and roles, so that a call has one color in every chart and report. */
const PLACES = {
  "actor.generate": 0, "actor.train": 1, "reference.infer": 2, "critic.infer": 3, "critic.train": 4, "reward.infer": 5,
  "actor.infer": 6, "judge": 7, "compare": 8, "estimate_advantages": 9,
  "actor": 0, "critic": 4, "reference": 2, "reward": 5,
};
const KINDS = {
  light: { wait: "#d3dae2", environment: "#e0a8cd", host: "#aab4bf", move: "#4a5866", offload: "#66788a", save: "#66788a", other: "#8795a3" },
  dark: { wait: "#37424e", environment: "#7d3f69", host: "#5c6976", move: "#c3ccd6", offload: "#98a6b4", save: "#98a6b4", other: "#7f8d9b" },
};
const PATTERNS = { move: "/", offload: "\\", save: "x", other: "." };
const FIRST_FREE_PLACE = 8; // that no call of a model has
const FEW_POINTS = 20; // of a line whose points are marked

const places = new Map(Object.entries(PLACES));
const charts = new Map(); // figure -> {chart, plot, ...}
const queue = [];         // charts that wait to be drawn, one per frame, so that the page opens at once
let theme = "light";
let isDrawing = false;

function showChart(grid, chart) {
  const figure = keyed(grid, `chart-${chart.id}`, () => {
    const summary = make("p", { class: "hidden-text" });
    const plot = make("div", { class: "plot" });
    const caption = make("figcaption", {}, make("h3", {}, chart.title), summary);
    const wide = chart.kind === "lanes" || chart.kind === "stack" || chart.wide;
    const made = make("figure", { class: wide ? "wide" : chart.kind }, caption, plot);
    charts.set(made, { plot, summary, chosen: null });
    return made;
  });
  const state = charts.get(figure);
  const content = JSON.stringify(chart);
  if (state.content === content) return figure;
  Object.assign(state, { chart, content });
  state.summary.textContent = chart.summary;
  if (chart.kind === "lanes") showFrameControls(figure, state);
  if (!queue.includes(state)) queue.push(state);
  return figure;
}

function forgetChart(figure) {
  const state = charts.get(figure);
  charts.delete(figure);
  if (queue.includes(state)) queue.splice(queue.indexOf(state), 1);
  Plotly.purge(state.plot);
}

function startDrawing() {
  if (isDrawing) return;
  isDrawing = true;
  document.body.dataset.drawn = "false";
  drawNext();
}

function drawNext() {
  if (drawOne()) {
    requestAnimationFrame(drawNext);
    return;
  }
  isDrawing = false;
  document.body.dataset.drawn = "true";
}

/* Draw the next chart that waits; return false if none does. */
function drawOne() {
  const state = queue.shift();
  if (state === undefined) return false;
  try {
    draw(state);
  } catch (error) {
    state.plot.textContent = `This chart cannot be drawn: ${error.message}`;
  }
  return true;
}

function draw(state) {
  const painters = { lines: paintLines, stack: paintLines, bars: paintBars, lanes: paintLanes };
  const { traces, layout } = painters[state.chart.kind](state.chart, state);
  const touch = matchMedia("(pointer: coarse)").matches; // where a drag scrolls the page
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim();
  const rule = style.getPropertyValue("--rule").trim();
  const axis = { gridcolor: rule, linecolor: rule, zerolinecolor: rule, automargin: true };
  const { xaxis, yaxis, height, ...rest } = layout;
  const legend = legendHeight(traces, state.plot.clientWidth);
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
    margin: { l: 48, r: 12, t: 8, b: 32 }, dragmode: touch ? false : "zoom", hovermode: "closest",
    uirevision: "keep", legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemwidth: 30, traceorder: "normal" },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
  };
  // Plotly gives a legend half of the height at most, and lets it scroll beyond that.
  const whole = Math.max((height ?? 240) + legend, 2 * legend);
  Plotly.react(state.plot, traces, { ...base, ...rest, height: whole }, { responsive: true, displayModeBar: false });
}

/* Pixels of a legend above a chart, whose columns are as wide as its longest name. */
function legendHeight(traces, width) {
  const names = traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name.length);
  const columns = Math.max(1, Math.floor((width - 60) / (45 + 6.2 * Math.max(...names))));
  return 10 + 19 * Math.ceil(names.length / columns);
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

function colorOfPiece(name, kind, colorsOfCalls) {
  return kind === "call" ? colorsOfCalls.get(name) : KINDS[theme][kind] ?? KINDS[theme].other;
}

function axisOf(unit) {
  if (unit === "share") return { tickformat: ".0%", rangemode: "tozero" };
  return { title: { text: plain(unit === "s" ? "seconds" : unit), standoff: 8 } };
}

/* Names of one chart differ in color: of two with the same one, known calls and roles keep it. */
function distinctColors(names) {
  const chosen = new Map();
  for (const name of [...new Set(names)].sort((a, b) => (b in PLACES) - (a in PLACES))) {
    const wished = colorOf(name);
    const used = [...chosen.values()];
    chosen.set(name, used.includes(wished) ? PALETTE[theme].find((color) => !used.includes(color)) ?? wished : wished);
  }
  return chosen;
}

function paintLines(chart) {
  const stacked = chart.kind === "stack";
  const colors = distinctColors(chart.series.map((one) => one.group ?? one.name));
  const traces = [];
  for (const one of chart.series) {
    const place = one.place === undefined ? null : PALETTE[theme][one.place % PALETTE[theme].length]; // of a compared run
    const color = place ?? (one.purpose ? colorOfPiece(one.name, one.purpose, colors) : colors.get(one.group ?? one.name));
    if (one.low) traces.push(...envelope(one, color));
    const trace = {
      type: "scatter", mode: !stacked && one.x.length <= FEW_POINTS ? "lines+markers" : "lines", name: plain(one.name), x: one.x, y: one.y,
      line: { color, width: one.pale ? 1 : 2, dash: one.dash }, opacity: one.pale ? 0.4 : 1, marker: { color, size: 5 },
      showlegend: !(one.pale && one.group),
      hovertemplate: `iteration %{x}: %{y}<extra>${plain(one.name)}</extra>`,
    };
    if (stacked) Object.assign(trace, { stackgroup: "all", fillcolor: color, line: { color, width: 0.5 } });
    traces.push(trace);
  }
  return { traces, layout: { showlegend: true, xaxis: axisOfIterations(chart.series), yaxis: axisOf(chart.unit) } };
}

function axisOfIterations(series) {
  const steps = series.flatMap((one) => [one.x[0], one.x[one.x.length - 1]]);
  const isShort = Math.max(...steps) - Math.min(...steps) < 8;
  return { title: { text: "iteration", standoff: 6 }, ...(isShort ? { tickmode: "linear", tick0: 0, dtick: 1 } : {}) };
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
  const waits = frame.waiting.length > 0;
  const order = ["call", "environment", "move", "offload", "save", "other", "host", "wait"];
  const sorted = [...groups.values()].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
  const calls = [...frame.bars, ...frame.predicted].filter((bar) => bar[2] === "call").map((bar) => bar[1]);
  const colors = distinctColors(calls.sort());
  const traces = sorted.map((group) => barsOf(group.name, group.bars, row, {
    offset: -0.4, width: has ? (waits ? 0.36 : 0.52) : waits ? 0.5 : 0.8,
    marker: { color: colorOfPiece(group.name, group.kind, colors), pattern: { shape: PATTERNS[group.kind] ?? "", size: 5 } },
  }));
  if (waits) traces.push(waitingSamples(frame.waiting, row, has ? [-0.02, 0.18] : [0.12, 0.4]));
  const predicted = new Map();
  for (const bar of frame.predicted) predicted.set(bar[1], [...(predicted.get(bar[1]) ?? []), bar]);
  let isFirst = true;
  for (const [name, bars] of predicted) {
    const line = { color: colorOfPiece(name, bars[0][2], colors), width: 1.5 };
    traces.push({
      ...barsOf("predicted", bars, row, { offset: 0.18, width: 0.2, marker: { color: "rgba(0,0,0,0)", line } }),
      legendgroup: "predicted", showlegend: isFirst,
    });
    isFirst = false;
  }
  const ticks = frame.ranks.map((rank) => `rank ${rank}`);
  const yaxis = { tickvals: frame.ranks.map((_, at) => at), ticktext: ticks, autorange: "reversed", zeroline: false };
  const height = 90 + Math.max(2, frame.ranks.length) * (30 + (has ? 14 : 0) + (waits ? 22 : 0));
  const xaxis = { title: { text: "seconds since the iteration began" }, rangemode: "tozero" };
  return { traces, layout: { barmode: "overlay", height, xaxis, yaxis } };
}

/* Samples that wait for environments, as columns that stand on the lower edge of a part of each rank's lane. */
function waitingSamples(waiting, row, [top, bottom]) {
  const most = Math.max(...waiting.flatMap((one) => one[3]));
  const shown = waiting.flatMap(([rank, begin, seconds, means]) =>
    means.map((mean, at) => ({ rank, begin: begin + at * seconds, seconds, mean })).filter((one) => one.mean > 0));
  const heights = shown.map((one) => ((bottom - top) * one.mean) / most);
  return {
    type: "bar", orientation: "h", name: `samples that wait, up to ${Number(most.toPrecision(3))}`, y: shown.map((one) => row.get(one.rank)),
    base: shown.map((one) => one.begin), x: shown.map((one) => one.seconds), offset: heights.map((height) => bottom - height),
    width: heights, marker: { color: KINDS[theme].environment, line: { width: 0 } }, textposition: "none",
    text: shown.map((one) => `rank ${one.rank}: ${Number(one.mean.toPrecision(3))} samples wait for environments, after ${one.begin.toPrecision(3)} s`),
    hovertemplate: "%{text}<extra></extra>",
  };
}

function barsOf(name, bars, row, options) {
  const label = name === "predicted" ? "predicted " : "";
  return {
    type: "bar", orientation: "h", name: plain(name), y: bars.map((bar) => row.get(bar[0])), base: bars.map((bar) => bar[3]),
    x: bars.map((bar) => bar[4]), text: bars.map((bar) => plain(`rank ${bar[0]}: ${label}${bar[1]}, ${bar[4].toPrecision(3)} s`, 200)),
    textposition: "none", hovertemplate: "%{text}<extra></extra>", ...options,
  };
}
