// What all charts share: the data, sizes as text, canvases that follow their width, the tooltip.
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 7;
const $ = (id) => document.getElementById(id);

function seconds(ns) {
  const step = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]].find(([size]) => Math.abs(ns) >= size);
  return step ? `${Number((ns / step[0]).toPrecision(4))} ${step[1]}` : `${Math.round(ns)} ns`;
}

function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(bytes) >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit ? bytes.toFixed(2) : Math.round(bytes)} ${units[unit]}`;
}

function flopText(flop) {
  return `${Number((flop / 1e9).toPrecision(4))} GFLOP`;
}

// The theme's colours, read once a drawing.
function theme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    devices: Array.from({length: COLOURS}, (_, i) => get(`d${i}`)),
    back: get("back"), raised: get("raised"), ink: get("ink"), soft: get("soft"), line: get("line"),
    mark: get("mark"), dim: get("dim"),
  };
}

// Black or white, whichever is read better on a colour #rrggbb.
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  return 0.2126 * r ** 2.2 + 0.7152 * g ** 2.2 + 0.0722 * b ** 2.2 > 0.18 ? "#000000" : "#ffffff";
}

// A drawing context of `height` CSS pixels, as wide as the page lets the canvas be.
function sized(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return [pen, width];
}

// Text that ends where its room does.
function fitted(pen, text, room) {
  if (room < 14) return "";
  if (pen.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText("…" + text.slice(text.length - middle)).width <= room) low = middle;
    else high = middle - 1;
  }
  return low ? "…" + text.slice(text.length - low) : "";
}

// Round steps of an axis: about `count` of them over a span.
function axisStep(span, count) {
  const raw = Math.max(span / Math.max(count, 1), 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
}

const tip = $("tip");
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4))}px`;
  const below = event.clientY + 18;
  const above = event.clientY - box.height - 10;
  tip.style.top = `${below + box.height > innerHeight ? Math.max(4, above) : below}px`;
}

// Draws once a frame, however often it is asked for.
function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
}
