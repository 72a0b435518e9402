"use strict";
/* Show tables that can be searched and sorted, some rows at once. Texts of the run become text nodes. */

const ROWS_AT_ONCE = 25;
const SHORT_CELL = 40; // characters that stay in one line
const LONG_CELL = 160; // characters from which a cell is folded

const tables = new Map(); // element -> {table, filter, sorted, descending, limit, ...}

function showTable(parent, table) {
  const element = keyed(parent, `table-${table.id}`, () => {
    const state = { filter: "", sorted: null, descending: true, limit: ROWS_AT_ONCE };
    const made = makeTable(table, state);
    tables.set(made, state);
    return made;
  });
  const state = tables.get(element);
  const content = JSON.stringify(table);
  if (state.content === content) return element; // open cells stay open
  Object.assign(state, { table, content });
  state.note.textContent = table.note;
  fillTable(state);
  return element;
}

function forgetTable(element) {
  tables.delete(element);
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
  state.body.replaceChildren(...shown.map((row) => make("tr", {}, ...row.map((cell, at) => makeCell(cell, table, at)))));
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

function makeCell(cell, table, at) {
  const column = table.columns[at];
  const text = textOf(cell);
  if (cell?.pictures) return make("td", { class: column.kind }, ...makePictures(cell.pictures, table.pictures));
  const kind = text.length > SHORT_CELL ? `${column.kind} long` : column.kind;
  if (text.length <= LONG_CELL) return make("td", { class: kind }, text);
  const summary = make("summary", {}, `${text.slice(0, LONG_CELL)}…`);
  return make("td", { class: kind }, make("details", {}, summary, text.slice(LONG_CELL)));
}

/* Addresses hold the pictures themselves; one that the report left out is its name. */
function makePictures(names, addresses) {
  return names.map((name, at) => {
    if (addresses[name] === undefined) return make("span", { class: "quiet" }, name);
    return make("img", { src: addresses[name], alt: `image ${at + 1} of ${names.length}`, title: name });
  });
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
