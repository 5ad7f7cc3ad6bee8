// The controls around the charts: search, colours, themes, tables that sort.
const order = []; // ops that match the search, by start
let matchAt = -1;

function find(text) {
  const wanted = text.trim().toLowerCase();
  order.length = 0;
  matchAt = -1;
  if (wanted) {
    ops.label.forEach((label, i) => {
      if (label.toLowerCase().includes(wanted) || ops.types[ops.type[i]].toLowerCase().includes(wanted)) order.push(i);
    });
    order.sort((a, b) => ops.start[a] - ops.start[b]);
  }
  timeline.matches = wanted ? new Set(order) : null;
  const time = order.reduce((sum, i) => sum + ops.length[i], 0);
  $("found").textContent = wanted ? `${order.length} of ${ops.label.length} kernels, ${seconds(time)}` : "";
  document.querySelectorAll("#ops-table tbody tr").forEach((row) => {
    row.hidden = Boolean(wanted) && !`${row.cells[0].textContent} ${row.cells[1].textContent}`.toLowerCase().includes(wanted);
  });
  redraw();
}

function nextMatch() {
  if (!order.length) return;
  matchAt = (matchAt + 1) % order.length;
  choose(order[matchAt], true);
}

function drawLegend() {
  const legend = $("legend");
  legend.replaceChildren();
  const add = (index, name) => {
    const entry = document.createElement("span"), key = document.createElement("i");
    key.className = `key d${index}`;
    entry.append(key, name);
    legend.append(entry);
  };
  if (timeline.colour === "device") data.devices.slice(0, 32).forEach((device, d) => add(d % COLOURS, device.name));
  else {
    const {of, rank, name} = rankings[timeline.colour];
    rank.forEach((index, value) => add(index, name(value)));
    if (of.some((value) => !rank.has(value))) add(COLOURS - 1, "others");
  }
}

function makeSortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    if (cell.classList.contains("plain")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = cell.textContent;
    cell.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = cell.getAttribute("aria-sort") === "descending";
      const value = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const numbers = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
        return (numbers ? x - y : x.localeCompare(y)) * (up ? 1 : -1);
      });
      [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      body.append(...rows);
    });
  });
}

const choices = data.modules.by_type ? ["type", "device"] : ["module", "type", "device"];
timeline.colour = choices[0];
choices.forEach((name) => $("colour").add(new Option({type: "op type"}[name] || name, name)));
$("colour").addEventListener("change", (event) => { timeline.colour = event.target.value; drawLegend(); redraw(); });
$("find").addEventListener("input", (event) => find(event.target.value));
$("find").addEventListener("keydown", (event) => { if (event.key === "Enter") nextMatch(); });
$("next").addEventListener("click", nextMatch);
document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () =>
  ({in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, span)})[button.dataset.zoom]()));
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  drawAll();
});
if (data.left_out) $("left-out").textContent = ` ${data.left_out} shorter kernels are not drawn.`;
document.querySelectorAll("table.sortable").forEach(makeSortable);

const drawAll = () => { redraw(); redrawModules(); };
addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawLegend();
drawAll();
