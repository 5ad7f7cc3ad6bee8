// One chart for each device, on the timeline's span of time.
const MEMORY_HEIGHT = 92;

function stepAt(times, t) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= t) low = middle; else high = middle - 1;
  }
  return low;
}

function memoryTitle(device) {
  const of = device.limit === null ? "no limit" : `${(100 * device.peak / device.limit).toFixed(device.peak < device.limit / 100 ? 2 : 0)}% of ${sizeText(device.limit)}`;
  return `${device.name}: peak ${sizeText(device.peak)}, ${of}`;
}

function drawMemory(canvas, d) {
  const device = data.devices[d], {time, bytes} = data.memory[d];
  const [pen, width] = sized(canvas, MEMORY_HEIGHT);
  const colours = theme();
  // A limit far above what is held would flatten the curve: its share stands in the title.
  const shown = device.limit !== null && device.limit <= 4 * Math.max(device.peak, 1);
  const top = Math.max(device.peak, shown ? device.limit : 0, 1) * 1.08;
  const scale = width / (view.to - view.from);
  const y = (size) => MEMORY_HEIGHT - 2 - size / top * (MEMORY_HEIGHT - 26);
  const first = stepAt(time, view.from), last = stepAt(time, view.to);
  pen.beginPath();
  pen.moveTo(0, y(0));
  pen.lineTo(0, y(bytes[first]));
  for (let k = first + 1; k <= last; k++) {
    const x = (time[k] - view.from) * scale;
    pen.lineTo(x, y(bytes[k - 1]));
    pen.lineTo(x, y(bytes[k]));
  }
  const end = Math.min(width, (span - view.from) * scale);
  pen.lineTo(end, y(bytes[last]));
  pen.lineTo(end, y(0));
  pen.closePath();
  pen.globalAlpha = 0.45;
  pen.fillStyle = colours.devices[d % COLOURS];
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.devices[d % COLOURS];
  pen.lineWidth = 1.2;
  pen.stroke();
  if (shown) {
    pen.setLineDash([6, 4]);
    pen.strokeStyle = device.peak > device.limit ? colours.mark : colours.soft;
    pen.lineWidth = 1.5;
    pen.beginPath(); pen.moveTo(0, y(device.limit)); pen.lineTo(width, y(device.limit)); pen.stroke();
    pen.setLineDash([]);
  }
  pen.fillStyle = colours.ink;
  pen.fillText(fitted(pen, memoryTitle(device), width - 12), 4, 11);
}

data.memory.forEach((curve, d) => {
  const box = document.createElement("div"), canvas = document.createElement("canvas");
  box.className = "chart";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Memory of ${memoryTitle(data.devices[d])}`);
  box.append(canvas);
  $("memory-charts").append(box);
  viewers.push(oncePerFrame(() => drawMemory(canvas, d)));
  canvas.addEventListener("pointermove", (event) => {
    const share = (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth;
    const t = view.from + share * (view.to - view.from);
    showTip(event, `${data.devices[d].name} at ${seconds(t)}\n${sizeText(curve.bytes[stepAt(curve.time, t)])} held`);
  });
  canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
});
