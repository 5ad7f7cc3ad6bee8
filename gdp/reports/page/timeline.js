// Devices, then channels, one lane each; the view is the span of time that is shown.
const LANE = 46, BAR = 24, AXIS = 22, NAME = 16;
const ops = data.ops, sent = data.transfers;
const span = Math.max(data.latency, 1);
const view = {from: 0, to: span};
const viewers = []; // what draws the same span of time
const timeline = {canvas: $("timeline-canvas"), chosen: -1, matches: null, colour: "type"};

// Bars of each lane by start: [index, start, end], of ops or of transfers.
const lanes = data.devices.map((device, d) => ({name: device.name, device: d, bars: []}));
ops.device.forEach((d, i) => lanes[d].bars.push([i, ops.start[i], ops.start[i] + ops.length[i]]));
sent.channels.forEach((name) => lanes.push({name, device: -1, bars: []}));
sent.channel.forEach((c, i) =>
  lanes[data.devices.length + c].bars.push([i, sent.start[i], sent.start[i] + sent.length[i]]));
lanes.forEach((lane) => lane.bars.sort((a, b) => a[1] - b[1] || a[2] - b[2]));
// Further members of a group that computes each op together are busy when its first one is.
const follows = (d) => typeof data.devices[d].lead === "number";
data.devices.forEach((device, d) => { if (follows(d)) lanes[d].bars = lanes[device.lead].bars; });

// The commonest values get a colour each, the others share grey.
function ranked(values, weights) {
  const total = new Map();
  values.forEach((v, i) => total.set(v, (total.get(v) || 0) + weights[i]));
  const order = [...total.keys()].sort((a, b) => total.get(b) - total.get(a));
  return new Map(order.slice(0, COLOURS - 1).map((v, i) => [v, i]));
}

const rankings = {
  type: {of: ops.type, rank: ranked(ops.type, ops.length), name: (v) => ops.types[v]},
  module: {of: ops.layer, rank: ranked(ops.layer, ops.length), name: (v) => ops.layers[v]},
};

function colourIndex(i) {
  if (timeline.colour === "device") return ops.device[i] % COLOURS;
  const {of, rank} = rankings[timeline.colour];
  return rank.has(of[i]) ? rank.get(of[i]) : COLOURS - 1;
}

const placeText = (device) => device.together.length ? device.together.join(", ") : device.name;

function opText(i) {
  const lines = [ops.label[i], `${ops.types[ops.type[i]]} on ${placeText(data.devices[ops.device[i]])}`,
    `${seconds(ops.length[i])}, from ${seconds(ops.start[i])}`];
  if (ops.flop[i]) lines.push(flopText(ops.flop[i]));
  if (ops.bytes[i]) lines.push(`${sizeText(ops.bytes[i])} of weights`);
  if (ops.count[i] > 1) lines.push(`${ops.count[i]} ops of the model, fused`);
  return lines.join("\n");
}

function sentText(i) {
  return [`tensor ${sent.label[i]}`,
    `${data.devices[sent.source[i]].name} → ${data.devices[sent.destination[i]].name}, ${sizeText(sent.bytes[i])}`,
    `${seconds(sent.length[i])}, from ${seconds(sent.start[i])}`].join("\n");
}

function drawAxis(pen, width, height) {
  const colours = theme();
  const scale = width / (view.to - view.from);
  const step = axisStep(view.to - view.from, width / 110);
  pen.fillStyle = colours.soft;
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1;
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
    const x = Math.round((t - view.from) * scale) + 0.5;
    pen.beginPath(); pen.moveTo(x, AXIS); pen.lineTo(x, height); pen.stroke();
    pen.fillText(seconds(t), Math.min(x + 3, width - 50), AXIS / 2);
  }
}

// Where the prompt of a request ends and its steps of decoding, drawn as one, begin.
function drawPhases(pen, width, height) {
  if (!data.decode) return;
  const colours = theme(), steps = data.decode.steps;
  const x = (data.decode.from - view.from) * width / (view.to - view.from);
  if (x < 0 || x > width) return;
  pen.strokeStyle = pen.fillStyle = colours.mark;
  pen.lineWidth = 2;
  pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height); pen.stroke();
  const before = "prefill", behind = `decode, ${steps} steps drawn as one`;
  pen.fillText(before, Math.max(x - pen.measureText(before).width - 6, 0), height - 8);
  pen.fillText(fitted(pen, behind, Math.max(width - x - 8, 0)), x + 6, height - 8);
}

function drawTimeline() {
  const height = AXIS + lanes.length * LANE + (data.decode ? 20 : 4);
  const [pen, width] = sized(timeline.canvas, height);
  const colours = theme();
  const scale = width / (view.to - view.from);
  drawAxis(pen, width, height);
  lanes.forEach((lane, row) => {
    const top = AXIS + row * LANE;
    pen.fillStyle = colours.ink;
    pen.fillText(fitted(pen, lane.name, width - 12), 4, top + NAME / 2 + 1);
    let drawnTo = -1; // bars narrower than a pixel that hide behind each other are drawn once
    for (const [i, start, end] of lane.bars) {
      if (end < view.from || start > view.to) continue;
      const x = (start - view.from) * scale;
      const right = (end - view.from) * scale;
      const isOp = lane.device >= 0;
      const hit = !timeline.matches || (isOp && timeline.matches.has(i));
      if (right - x < 0.7 && right <= drawnTo && !(timeline.matches && hit)) continue;
      const colour = isOp ? colours.devices[colourIndex(i)]
        : timeline.colour === "device" ? colours.devices[sent.source[i] % COLOURS] : colours.soft;
      const left = Math.max(x, -2), w = Math.max(Math.min(right, width + 2) - left, 0.7);
      pen.fillStyle = hit ? colour : colours.dim;
      pen.fillRect(left, top + NAME, w > 3 ? w - 0.7 : w, isOp ? BAR : BAR / 2);
      drawnTo = Math.max(drawnTo, right);
      if (w > 26 && isOp) {
        pen.fillStyle = hit ? inkOn(colour) : colours.soft;
        const from = Math.max(left, 0);
        const text = fitted(pen, ops.label[i], Math.min(right, width) - from - 8);
        pen.fillText(text, from + 4, top + NAME + BAR / 2 + 1);
      }
      if (isOp && i === timeline.chosen) {
        pen.strokeStyle = colours.ink; pen.lineWidth = 2.5;
        pen.strokeRect(left, top + NAME - 1, w, BAR + 2);
      }
    }
  });
  drawPhases(pen, width, height);
}
viewers.push(oncePerFrame(drawTimeline));
const redraw = () => viewers.forEach((draw) => draw());

// Shows a span of time, inside the run and no shorter than a nanosecond a pixel.
function show(from, to) {
  const length = Math.min(Math.max(to - from, Math.min(1000, span)), span);
  view.from = Math.min(Math.max(from, 0), span - length);
  view.to = view.from + length;
  redraw();
}

// Zooms by a factor around a share of the width.
function zoom(factor, at = 0.5) {
  const length = (view.to - view.from) * factor;
  const pivot = view.from + at * (view.to - view.from);
  show(pivot - at * length, pivot + (1 - at) * length);
}

function barAt(event) {
  const box = timeline.canvas.getBoundingClientRect();
  const lane = lanes[Math.floor((event.clientY - box.top - AXIS) / LANE)];
  if (!lane) return null;
  const t = view.from + (event.clientX - box.left) / box.width * (view.to - view.from);
  const near = 2 / box.width * (view.to - view.from); // two pixels to either side of thin bars
  let found = null;
  for (const [i, start, end] of lane.bars) {
    if (start - near > t) break;
    if (end + near >= t && (!found || (start <= t && end >= t))) found = [lane, i];
  }
  return found;
}

function choose(i, reveal) {
  timeline.chosen = i;
  $("timeline-said").textContent = i < 0 ? "" : opText(i).replaceAll("\n", " · ");
  if (i >= 0 && reveal) {
    const [start, end] = [ops.start[i], ops.start[i] + ops.length[i]];
    const length = Math.max(view.to - view.from, 1);
    const wanted = Math.min(length, Math.max((end - start) * 40, span / 2000));
    if (start < view.from || end > view.to || (end - start) / length < 0.004) {
      show((start + end - wanted) / 2, (start + end + wanted) / 2);
    }
  }
  redraw();
}

// The op before or after the chosen one on its lane, or the first that is shown.
function neighbour(step) {
  if (timeline.chosen < 0) {
    const lane = lanes.find((l) => l.device >= 0 && l.bars.some((b) => b[2] > view.from && b[1] < view.to));
    return lane ? lane.bars.find((b) => b[2] > view.from)[0] : -1;
  }
  const bars = lanes[ops.device[timeline.chosen]].bars;
  const at = bars.findIndex((b) => b[0] === timeline.chosen) + step;
  return bars[Math.min(Math.max(at, 0), bars.length - 1)][0];
}

// The op of another device that runs at the time of the chosen one.
function across(step) {
  if (timeline.chosen < 0) return neighbour(0);
  const t = ops.start[timeline.chosen];
  for (let d = ops.device[timeline.chosen] + step; d >= 0 && d < data.devices.length; d += step) {
    const bars = lanes[d].bars;
    if (bars.length && !follows(d)) return (bars.find((b) => b[2] >= t) || bars[bars.length - 1])[0];
  }
  return timeline.chosen;
}

function onTimelineKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const length = view.to - view.from;
  const act = {
    ArrowLeft: () => show(view.from - length / 5, view.to - length / 5),
    ArrowRight: () => show(view.from + length / 5, view.to + length / 5),
    ArrowUp: () => choose(across(-1), true), ArrowDown: () => choose(across(1), true),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => show(0, span),
    n: () => choose(neighbour(1), true), p: () => choose(neighbour(-1), true),
    Escape: () => choose(-1, false),
  }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act) { event.preventDefault(); act(); }
}

// Dragging with one pointer moves, with two it zooms.
function followPointers(canvas) {
  const down = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, event.clientX);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!down.has(event.pointerId)) {
      const hit = barAt(event);
      showTip(event, hit && (hit[0].device >= 0 ? opText(hit[1]) : sentText(hit[1])));
      return;
    }
    const before = down.get(event.pointerId);
    down.set(event.pointerId, event.clientX);
    const perPixel = (view.to - view.from) / canvas.clientWidth;
    moved += Math.abs(event.clientX - before);
    if (down.size === 1) show(view.from - (event.clientX - before) * perPixel, view.to - (event.clientX - before) * perPixel);
    if (down.size === 2) {
      const [other] = [...down].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      const factor = Math.abs(before - other) / Math.max(Math.abs(event.clientX - other), 1);
      const at = ((event.clientX + other) / 2 - canvas.getBoundingClientRect().left) / canvas.clientWidth;
      zoom(factor, at);
    }
    showTip(event, "");
  });
  const up = (event) => {
    if (down.delete(event.pointerId) && moved < 4 && event.type === "pointerup") {
      const hit = barAt(event);
      choose(hit && hit[0].device >= 0 ? hit[1] : -1, false);
    }
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
  canvas.addEventListener("dblclick", (event) =>
    zoom(0.4, (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth));
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) {
      zoom(Math.exp(event.deltaY / 250), (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth);
    } else if (sideways) {
      const by = sideways / canvas.clientWidth * (view.to - view.from);
      show(view.from + by, view.to + by);
    } else return;
    event.preventDefault();
  }, {passive: false});
}

timeline.canvas.addEventListener("keydown", onTimelineKey);
followPointers(timeline.canvas);
