/* Draws the curves, points and bars of a chart on a canvas, between scales that are known. */

import {colourOf, tileOf} from "./paint.js";

const DASHES = {solid: [], dash: [7, 4], dot: [2, 3], dashdot: [7, 3, 2, 3], longdash: [12, 4]};
const CORNERS = {square: [4, 45], diamond: [4, 0], "triangle-up": [3, 0], pentagon: [5, 0], star: [10, 0]};
const BAND_ALPHA = 0.22;
const isThere = value => value !== null && value !== undefined && Number.isFinite(value);

/* The points of a trace in pixels; null where one is missing. */
function pointsOf(trace, x, y) {
  return trace.y.map((value, index) => {
    const at = x.place(trace.x[index]),
      height = isThere(value) ? y.place(value) : NaN;
    return Number.isFinite(at) && Number.isFinite(height) ? [at, height] : null;
  });
}

/* Runs without a gap; with `connectgaps` gaps do not count. */
function runsOf(points, connectgaps) {
  if (connectgaps) return [points.filter(Boolean)];
  const runs = [[]];
  for (const point of points)
    if (point) runs.at(-1).push(point);
    else if (runs.at(-1).length) runs.push([]);
  return runs;
}

/* The corners of a run: a curve in steps keeps its value until the next point. */
const cornersOf = (run, shape) =>
  shape === "hv" ? run.flatMap(([at, height], index) => (index ? [[at, run[index - 1][1]], [at, height]] : [[at, height]])) : run;

function trail(context, corners) {
  corners.forEach(([at, height], index) => (index ? context.lineTo(at, height) : context.moveTo(at, height)));
}

/* `before` is the trace that an area reaches to, if it is not the axis. */
export function drawTrace(context, trace, x, y, before) {
  const points = pointsOf(trace, x, y),
    {width = 2, dash = "solid", shape = "linear", color = trace.marker.color} = trace.line ?? {},
    colour = colourOf(color);
  if (trace.mode.includes("lines")) {
    const runs = runsOf(points, trace.connectgaps).map(run => cornersOf(run, shape));
    if (trace.fill) fillArea(context, trace, runs, before, {x, y, colour});
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.setLineDash(DASHES[dash] ?? []);
    for (const run of width ? runs : []) {
      context.beginPath();
      if (run.length === 1) context.arc(...run[0], 1.5 + width / 2, 0, 7); // one alone has no line
      else trail(context, run);
      if (run.length === 1) context.fill();
      else context.stroke();
    }
    context.setLineDash([]);
  }
  if (trace.mode.includes("markers"))
    points.forEach((point, index) => {
      if (!point) return;
      const {size = 6, symbol = "circle", color: own} = trace.marker;
      drawSymbol(context, symbol, point, Array.isArray(size) ? size[index] : size, colourOf(own));
    });
}

function fillArea(context, trace, runs, before, {x, y, colour}) {
  context.save();
  context.globalAlpha = BAND_ALPHA;
  context.fillStyle = colour;
  const below = before ? runsOf(pointsOf(before, x, y), before.connectgaps) : [];
  runs.forEach((run, index) => {
    if (!run.length) return;
    context.beginPath();
    trail(context, run);
    if (before) for (const point of [...(below[index] ?? [])].reverse()) context.lineTo(...point);
    else {
      const foot = y.place(Math.max(0, y.low));
      context.lineTo(run.at(-1)[0], foot);
      context.lineTo(run[0][0], foot);
    }
    context.closePath();
    context.fill();
  });
  context.restore();
}

function drawSymbol(context, symbol, [at, height], size, colour) {
  const radius = size / 2;
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = 2;
  context.beginPath();
  if (symbol === "x" || symbol === "cross") {
    const [wide, tall] = symbol === "x" ? [radius, radius] : [0, radius];
    context.moveTo(at - wide, height - tall);
    context.lineTo(at + wide, height + tall);
    context.moveTo(at + (symbol === "x" ? wide : radius), height - (symbol === "x" ? tall : 0));
    context.lineTo(at - (symbol === "x" ? wide : radius), height + (symbol === "x" ? tall : 0));
    context.stroke();
    return;
  }
  const [corners, turned] = CORNERS[symbol] ?? [];
  if (!corners) context.arc(at, height, radius, 0, 7);
  for (let corner = 0; corner < (corners ?? 0); corner++) {
    const angle = ((360 * corner) / corners + turned - 90) * (Math.PI / 180),
      length = symbol === "star" && corner % 2 ? 0.45 * radius : radius;
    context.lineTo(at + 1.2 * length * Math.cos(angle), height + 1.2 * length * Math.sin(angle));
  }
  context.closePath();
  context.fill();
  context.strokeStyle = colourOf("@card");
  context.lineWidth = 1;
  context.stroke();
}

/* Bars of several traces side by side, upright or lying. Returns where each one is: [{trace, index, box}]. */
export function drawBars(context, traces, x, y, {font}) {
  const places = [];
  traces.forEach((trace, number) => {
    const isLying = trace.orientation === "h",
      [names, lengths, along, across] = isLying ? [trace.y, trace.x, y, x] : [trace.x, trace.y, x, y];
    const room = Math.min(0.72 * along.width, 90 * traces.length),
      thick = room / traces.length;
    context.fillStyle = tileOf(context, colourOf(trace.marker.color), trace.marker.pattern ?? "solid");
    lengths.forEach((length, index) => {
      if (!isThere(length)) return;
      const side = along.place(names[index]) - room / 2 + number * thick + 1,
        foot = across.place(0),
        end = across.place(length);
      const box = isLying
        ? [Math.min(foot, end), side, Math.abs(end - foot), thick - 2]
        : [side, Math.min(foot, end), thick - 2, Math.abs(end - foot)];
      context.fillRect(...box);
      places.push({trace, index, box});
    });
  });
  context.font = font;
  context.fillStyle = colourOf("@ink");
  context.textAlign = "center";
  context.textBaseline = "bottom";
  for (const {trace, index, box} of places) {
    const text = trace.text?.[index];
    if (text && context.measureText(text).width <= box[2] + 12) context.fillText(text, box[0] + box[2] / 2, box[1] - 3);
  }
  return places;
}
