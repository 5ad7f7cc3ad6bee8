// The module tree as an icicle: a row for each depth, kernels as leaves, colours by device.
const ROW = 26;
const icicle = {canvas: $("modules-canvas"), root: 0, chosen: 0, measure: "time", boxes: []};

// Nodes: modules first, then one leaf for each kernel; children come after their parents.
const tree = data.modules.name.map((name, i) =>
  ({name, parent: i ? data.modules.parent[i] : -1, op: -1, children: []}));
ops.module.forEach((module, i) => tree.push({name: ops.label[i], parent: module, op: i, children: []}));
tree.forEach((node) => { node.time = node.bytes = node.count = 0; node.share = new Map(); });
for (let i = tree.length - 1; i >= 0; i--) {
  const node = tree[i], op = node.op;
  if (op >= 0) {
    node.time = ops.length[op]; node.bytes = ops.bytes[op]; node.count = ops.count[op];
    // Kernels that take no time still lie somewhere.
    node.share.set(ops.device[op], Math.max(node.time, 1e-3));
  }
  if (node.parent < 0) continue;
  const above = tree[node.parent];
  above.children.push(i);
  for (const key of ["time", "bytes", "count"]) above[key] += node[key];
  node.share.forEach((s, d) => above.share.set(d, (above.share.get(d) || 0) + s));
}
tree.forEach((node) => node.children.reverse());
// Parallel devices make the time of a module longer than it takes; shares are of all work.
const workTotal = Math.max(tree[0].time, 1);

function nodePath(i) {
  if (tree[i].op >= 0 || !i) return tree[i].name;
  const parts = [];
  for (let m = i; m; m = tree[m].parent) parts.unshift(tree[m].name);
  return parts.join(".");
}

function nodeText(i) {
  const node = tree[i];
  const lines = [nodePath(i), `${seconds(node.time)}, ${(100 * node.time / workTotal).toFixed(1)}% of all work`,
    `${sizeText(node.bytes)} of weights, ${node.count} op${node.count === 1 ? "" : "s"}`];
  const all = [...node.share.values()].reduce((a, b) => a + b, 0);
  [...node.share].sort((a, b) => b[1] - a[1]).slice(0, 6).forEach(([d, s]) =>
    lines.push(`${data.devices[d].name}: ${(100 * s / all).toFixed(0)}%`));
  return lines.join("\n");
}

function place(i, x, width, depth, boxes) {
  boxes.push({i, x, width, depth});
  const node = tree[i];
  const whole = node.children.reduce((sum, c) => sum + tree[c][icicle.measure], 0);
  if (!whole) return;
  let at = x;
  for (const c of node.children) {
    const part = width * tree[c][icicle.measure] / whole;
    if (part >= 0.4) place(c, at, part, depth + 1, boxes);
    at += part;
  }
}

function drawModules() {
  const boxes = [];
  place(icicle.root, 0, icicle.canvas.parentElement.clientWidth, 0, boxes);
  icicle.boxes = boxes;
  const rows = 1 + Math.max(...boxes.map((box) => box.depth));
  const [pen] = sized(icicle.canvas, rows * ROW + 2);
  const colours = theme();
  for (const {i, x, width, depth} of boxes) {
    const node = tree[i], y = depth * ROW + 1, gap = width > 3 ? 1 : 0;
    const all = [...node.share.values()].reduce((a, b) => a + b, 0);
    let at = x, most = -1, colour = colours.dim;
    [...node.share].sort((a, b) => a[0] - b[0]).forEach(([d, s]) => {
      pen.fillStyle = colours.devices[d % COLOURS];
      pen.fillRect(at, y, Math.max((width - gap) * s / all, 0.4), ROW - 1);
      if (s > most) { most = s; colour = pen.fillStyle; }
      at += (width - gap) * s / all;
    });
    if (width > 20) {
      const text = fitted(pen, node.name, width - 10);
      // Several colours below: the text gets a ground of its own.
      if (node.share.size > 1 && text) {
        pen.fillStyle = colours.back;
        pen.globalAlpha = 0.8;
        pen.fillRect(x + 2, y + 4, pen.measureText(text).width + 6, ROW - 9);
        pen.globalAlpha = 1;
        pen.fillStyle = colours.ink;
      } else pen.fillStyle = inkOn(colour);
      pen.fillText(text, x + 5, y + ROW / 2);
    }
    if (i === icicle.chosen) {
      pen.strokeStyle = colours.ink; pen.lineWidth = 2.5;
      pen.strokeRect(x + 1, y + 1, Math.max(width - 3, 1), ROW - 3);
    }
  }
}
const redrawModules = oncePerFrame(drawModules);

function openModule(i) {
  while (tree[i].op >= 0) i = tree[i].parent;
  icicle.root = icicle.chosen = i;
  pickModule(i);
}

function pickModule(i) {
  icicle.chosen = i;
  $("where").textContent = nodeText(i).replaceAll("\n", " · ");
  redrawModules();
}

function boxAt(event) {
  const box = icicle.canvas.getBoundingClientRect();
  const [x, depth] = [event.clientX - box.left, Math.floor((event.clientY - box.top) / ROW)];
  return icicle.boxes.find((b) => b.depth === depth && x >= b.x && x < b.x + b.width);
}

icicle.canvas.addEventListener("pointermove", (event) => {
  const hit = boxAt(event);
  showTip(event, hit && nodeText(hit.i));
});
icicle.canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
icicle.canvas.addEventListener("click", (event) => {
  const hit = boxAt(event);
  if (hit) openModule(hit.i === icicle.root ? Math.max(tree[hit.i].parent, 0) : hit.i);
});
icicle.canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = tree[icicle.chosen];
  const row = at.parent >= 0 && icicle.chosen !== icicle.root ? tree[at.parent].children : [icicle.chosen];
  const beside = (step) => row[Math.min(Math.max(row.indexOf(icicle.chosen) + step, 0), row.length - 1)];
  const act = {
    ArrowLeft: () => pickModule(beside(-1)), ArrowRight: () => pickModule(beside(1)),
    ArrowDown: () => at.children.length && pickModule(at.children[0]),
    ArrowUp: () => icicle.chosen !== icicle.root && pickModule(at.parent),
    Enter: () => openModule(icicle.chosen),
    Escape: () => openModule(Math.max(tree[icicle.root].parent, 0)),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});
$("up").addEventListener("click", () => openModule(Math.max(tree[icicle.root].parent, 0)));
$("measure").addEventListener("change", (event) => { icicle.measure = event.target.value; redrawModules(); });
if (data.modules.by_type) $("no-modules").textContent = "The model names no modules; op types stand in for them. ";
