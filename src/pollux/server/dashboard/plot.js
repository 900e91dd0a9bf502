/* One chart on a canvas: axes, traces, what the pointer or the keys tell of a moment, and zooming by dragging.

   A chart is {data: [trace], layout: {xaxis, yaxis, yaxis2, hover, ends}}. A trace is made by `line`, `dots` or `bars`
   in charts.js; an axis is described in scales.js. `hover` is "x" (all curves at one place) or "point" (the nearest).
   Colours are names: "@0" is the first of the palette, "@muted" the variable --muted. */

import {announce, h, tip} from "./dom.js";
import {DASH} from "./format.js";
import {Canvas, colourOf, fitted} from "./paint.js";
import {makeScale} from "./scales.js";
import {drawBars, drawTrace} from "./traces.js";

const FONT = "11px system-ui, sans-serif",
  TITLE_FONT = "12px system-ui, sans-serif",
  NEAR = 28, // pixels from a point that the pointer may be away
  LEAST_DRAG = 6;

export class Plot {
  /* `onZoom(window)`: [from, to] or null for all of it. `onPoint(at)`: a place on the x axis, or null. */
  constructor({label, height, onZoom, onPoint}) {
    Object.assign(this, {label, onZoom, onPoint, data: [], layout: {}, hidden: new Set()});
    Object.assign(this, {window: null, cross: null, drag: null, frame: null, cursor: null, bars: []});
    this.canvas = new Canvas(
      {class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": label},
      (...args) => this.draw(...args),
    );
    this.canvas.setHeight(height);
    this.element = this.canvas.element;
    this.element.plot = this; // for tests and debugging
    this.listen(this.element);
  }

  update({data, layout}, label) {
    Object.assign(this, {data, layout});
    this.element.setAttribute("aria-label", `${label}. Left and right tell the values; plus and minus zoom.`);
    this.canvas.ask();
  }

  get shown() {
    return this.data.filter(trace => !this.hidden.has(trace.name));
  }

  zoom(window) {
    this.window = window;
    this.canvas.ask();
  }

  mark(at) {
    if (this.cross === at) return;
    this.cross = at;
    this.canvas.ask();
  }

  /* --- drawing --- */

  draw(context, width, height) {
    if (!this.data.length) return;
    const frame = (this.frame = this.measure(context, width, height)),
      {x, y, y2} = frame,
      traces = this.shown,
      bars = traces.filter(trace => trace.type === "bar");
    this.drawAxes(context, frame, height);
    context.save();
    context.beginPath();
    context.rect(frame.left - 1, 0, frame.right - frame.left + 2, frame.bottom + 1);
    context.clip();
    if (bars.length) this.bars = drawBars(context, bars, x, y, {font: FONT});
    traces.forEach((trace, index) => {
      const scale = trace.yaxis === "y2" ? y2 : y;
      if (trace.type !== "bar") drawTrace(context, trace, x, scale, trace.fill === "tonexty" ? traces[index - 1] : null);
    });
    context.restore();
    this.drawEnds(context, frame);
    this.drawPointed(context, frame);
    this.element.dataset.drawn = "";
  }

  /* Scales, and where the frame is: as much room beside it as the ticks need. */
  measure(context, width, height) {
    const {xaxis = {}, yaxis = {}, yaxis2} = this.layout,
      traces = this.shown,
      of = (name, own) => traces.filter(trace => (trace.yaxis ?? "y") === own).flatMap(trace => trace[name]);
    const top = yaxis.title || yaxis2?.title ? 20 : 9,
      bottom = height - (xaxis.title ? 38 : 21);
    const y = makeScale(yaxis, of("y", "y"), [bottom, top]),
      y2 = yaxis2 ? makeScale(yaxis2, of("y", "y2"), [bottom, top]) : null;
    context.font = FONT;
    const widest = scale => Math.max(0, ...scale.ticks.map(tick => context.measureText(tick.text).width));
    const left = yaxis.isBare ? 12 : Math.min(0.34 * width, Math.max(28, Math.ceil(widest(y)) + 9)),
      right = width - (y2 ? Math.ceil(widest(y2)) + 12 : 12);
    const nticks = xaxis.type === "date" ? Math.max(2, Math.floor((right - left) / 80)) : Math.max(2, Math.floor((right - left) / 60));
    const x = makeScale({nticks, ...xaxis}, [...of("x", "y"), ...of("x", "y2")], [left, right], this.window);
    return {left, right, top, bottom, x, y, y2, width};
  }

  drawAxes(context, {left, right, top, bottom, x, y, y2, width}, height) {
    const {xaxis = {}, yaxis = {}, yaxis2} = this.layout;
    context.font = FONT;
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of yaxis.isBare ? [] : y.ticks) {
      const at = Math.round(y.place(tick.at)) + 0.5;
      rule(context, left, at, right, at, "@grid");
      context.fillStyle = colourOf("@muted");
      context.fillText(fitted(context, tick.text, left - 6), left - 6, at);
    }
    context.textAlign = "left";
    for (const tick of y2?.ticks ?? []) context.fillText(tick.text, right + 6, y2.place(tick.at));
    context.textAlign = "center";
    context.textBaseline = "top";
    let free = -Infinity; // where the next text has room
    for (const tick of x.ticks) {
      const at = Math.round(x.place(tick.at)) + 0.5;
      if (yaxis.type !== "category" || xaxis.type !== "category") rule(context, at, top, at, bottom, "@grid");
      const text = x.names ? fitted(context, tick.text, x.width - 6) : tick.text,
        half = context.measureText(text).width / 2,
        middle = Math.min(Math.max(at, half + 1), width - half - 1);
      if (middle - half < free) continue;
      free = middle + half + 6;
      context.fillStyle = colourOf("@muted");
      context.fillText(text, middle, bottom + 6);
    }
    rule(context, left, bottom + 0.5, right, bottom + 0.5, "@line");
    context.font = TITLE_FONT;
    context.fillStyle = colourOf("@muted");
    if (xaxis.title) context.fillText(xaxis.title, (left + right) / 2, height - 15);
    context.textAlign = "left";
    if (yaxis.title) context.fillText(yaxis.title, 2, 1);
    context.textAlign = "right";
    if (yaxis2?.title) context.fillText(yaxis2.title, width - 2, 1);
  }

  /* Of parallel coordinates: the least and the greatest value of each parameter, at its foot and its top. */
  drawEnds(context, {x, y}) {
    context.font = FONT;
    context.fillStyle = colourOf("@ink");
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const [name, texts] of Object.entries(this.layout.ends ?? {}))
      texts.forEach((text, at) => context.fillText(fitted(context, text, x.width - 4), x.place(name), y.place(at) + (at ? -10 : 10)));
  }

  drawPointed(context, {x, left, right, top, bottom}) {
    const at = this.cross === null ? NaN : x.place(this.cross);
    if (at >= left - 1 && at <= right + 1) {
      context.setLineDash([4, 3]);
      rule(context, Math.round(at) + 0.5, top, Math.round(at) + 0.5, bottom, "@muted");
      context.setLineDash([]);
    }
    if (this.drag) {
      const [from, to] = [this.drag.from, this.drag.to].sort((a, b) => a - b);
      context.save();
      context.globalAlpha = 0.18;
      context.fillStyle = colourOf("@accent");
      context.fillRect(from, top, to - from, bottom - top);
      context.restore();
    }
  }

  /* --- what is pointed at --- */

  /* {at, lines}: the place on the x axis and its words; null: there is nothing. */
  wordsAt(px, py) {
    if (!this.frame) return null;
    if (this.shown.some(trace => trace.type === "bar")) return this.wordsOfBar(px, py);
    return this.layout.hover === "point" ? this.wordsOfPoint(px, py) : this.wordsOf(this.frame.x.value(px));
  }

  wordsOfBar(px, py) {
    const found = this.bars.find(({box: [x, y, wide, tall]}) => px >= x && px <= x + wide && py >= y - 14 && py <= y + tall + 2);
    if (!found) return null;
    const {trace, index} = found,
      [name, value] = trace.orientation === "h" ? [trace.y[index], this.frame.x.text(trace.x[index])] : [trace.x[index], this.frame.y.text(trace.y[index])];
    return {at: null, lines: [String(name), [trace.name, trace.text?.[index] ?? value].filter(Boolean).join(": ")]};
  }

  wordsOfPoint(px, py) {
    const {x, y, y2} = this.frame;
    let best = null,
      least = NEAR ** 2;
    for (const trace of this.shown.filter(one => !one.isQuiet))
      trace.y.forEach((value, index) => {
        const away = (x.place(trace.x[index]) - px) ** 2 + ((trace.yaxis === "y2" ? y2 : y).place(value) - py) ** 2;
        if (value !== null && away < least) [best, least] = [{trace, index}, away];
      });
    if (!best) return null;
    const {trace, index} = best;
    return {at: trace.x[index], lines: [trace.name, trace.tell?.(index) ?? `${x.text(trace.x[index])}: ${y.text(trace.y[index])}`]};
  }

  /* All curves at one place: the nearest point of each, the last one before it where a curve goes in steps. */
  wordsOf(wanted) {
    const {x, y, y2} = this.frame,
      all = this.shown.filter(trace => !trace.isQuiet && trace.x.length);
    const at = nearest(all.map(trace => trace.x[nearestIndex(trace, wanted)]), wanted);
    if (at === null) return null;
    const lines = all.map(trace => {
      const index = nearestIndex(trace, at),
        value = trace.y[index],
        scale = trace.yaxis === "y2" ? y2 : y;
      return `${trace.name}: ${trace.tell?.(index) ?? (value === null || value === undefined ? DASH : scale.text(value))}`;
    });
    return {at, lines: [x.text(at), ...lines]};
  }

  listen(element) {
    const place = event => {
      const box = element.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    element.addEventListener("pointermove", event => {
      const [px, py] = place(event);
      if (this.drag) {
        this.drag.to = Math.min(Math.max(px, this.frame.left), this.frame.right);
        this.canvas.ask();
        return;
      }
      const told = this.frame && px >= this.frame.left - 4 && px <= this.frame.right + 4 ? this.wordsAt(px, py) : null;
      this.point(told, event.clientX, event.clientY);
    });
    element.addEventListener("pointerleave", () => this.point(null));
    element.addEventListener("pointerdown", event => {
      if (event.pointerType !== "mouse" || event.button || !this.canZoom) return; // a finger scrolls the page
      const [px] = place(event);
      this.drag = {from: px, to: px};
      element.setPointerCapture(event.pointerId);
      tip.hide();
    });
    element.addEventListener("pointerup", () => this.drop());
    element.addEventListener("pointercancel", () => {
      this.drag = null;
      this.canvas.ask();
    });
    element.addEventListener("dblclick", () => this.canZoom && this.onZoom(null));
    element.addEventListener("blur", () => this.point(null));
    element.addEventListener("keydown", event => this.press(event));
  }

  get canZoom() {
    return Boolean(this.frame) && !this.frame.x.names && this.layout.xaxis?.type !== "log";
  }

  drop() {
    if (!this.drag) return;
    const {from, to} = this.drag;
    this.drag = null;
    this.canvas.ask();
    if (Math.abs(to - from) >= LEAST_DRAG) this.onZoom([from, to].sort((a, b) => a - b).map(this.frame.x.value));
  }

  point(told, x = 0, y = 0) {
    if (told) tip.show(told.lines, x, y);
    else tip.hide();
    const at = told?.at ?? null;
    if (this.layout.hover !== "point") this.mark(at);
    this.onPoint(at);
  }

  press(event) {
    if (!this.frame) return;
    const at = [...new Set(this.shown.flatMap(trace => (trace.isQuiet ? [] : (trace.orientation === "h" ? trace.y : trace.x))))];
    if (!this.frame.x.names) at.sort((a, b) => a - b);
    if (!at.length) return;
    const before = this.cursor ?? at.length;
    if (event.key === "ArrowLeft") this.cursor = before - 1;
    else if (event.key === "ArrowRight") this.cursor = before + 1;
    else if (event.key === "Home") this.cursor = 0;
    else if (event.key === "End") this.cursor = at.length - 1;
    else if ("+=-".includes(event.key) && this.canZoom) this.zoomBy(event.key === "-" ? 2 : 0.5, at[this.cursor ?? at.length - 1]);
    else if (event.key === "Escape" && this.window) this.onZoom(null);
    else return;
    event.preventDefault();
    this.cursor = Math.min(at.length - 1, Math.max(0, this.cursor ?? at.length - 1));
    this.tell(at[this.cursor]);
  }

  zoomBy(factor, about) {
    const {low, high} = this.frame.x,
      span = (high - low) * factor;
    const own = makeScale(this.layout.xaxis, this.shown.flatMap(trace => trace.x), [0, 1]),
      from = Math.max(own.low, Math.min(about - span / 2, own.high - span));
    this.onZoom(span >= own.high - own.low ? null : [from, from + span]);
  }

  tell(at) {
    const {x} = this.frame,
      bars = this.bars.filter(({trace, index}) => (trace.orientation === "h" ? trace.y : trace.x)[index] === at);
    const lines = this.shown.some(trace => trace.type === "bar")
      ? [String(at), ...bars.map(({trace, index}) => [trace.name, trace.text?.[index] ?? String((trace.orientation === "h" ? trace.x : trace.y)[index])].filter(Boolean).join(": "))]
      : (this.wordsOf(at)?.lines ?? []);
    const box = this.element.getBoundingClientRect(),
      px = bars.length ? bars[0].box[0] : x.place(at);
    announce(lines.join(", "));
    tip.show(lines, box.left + Math.min(Math.max(px, 0), box.width), box.top + this.frame.top);
    if (!bars.length) {
      this.mark(at);
      this.onPoint(at);
    }
  }

  /* --- to take along --- */

  /* The chart with its title and legend, twice as sharp, as a PNG. */
  picture(title) {
    const {clientWidth: width} = this.element,
      {height} = this.canvas,
      head = 46,
      made = h("canvas", {width: 2 * width, height: 2 * (height + head)}),
      context = made.getContext("2d");
    context.scale(2, 2);
    context.fillStyle = colourOf("@card");
    context.fillRect(0, 0, width, height + head);
    context.fillStyle = colourOf("@ink");
    context.textBaseline = "top";
    context.font = "600 14px system-ui, sans-serif";
    context.fillText(title, 8, 6);
    context.font = TITLE_FONT;
    let at = 8;
    for (const trace of this.shown.filter(one => one.name && !one.isQuiet)) {
      context.fillStyle = colourOf(trace.marker?.color ?? trace.line?.color);
      context.fillRect(at, 34, 14, 3);
      context.fillStyle = colourOf("@ink");
      context.fillText(trace.name, at + 18, 28);
      at += context.measureText(trace.name).width + 34;
    }
    context.translate(0, head);
    this.draw(context, width, height);
    return new Promise(done => made.toBlob(done, "image/png"));
  }

  remove() {
    this.canvas.remove();
    if (this.element.matches(":hover, :focus")) tip.hide();
  }
}

function rule(context, x1, y1, x2, y2, colour) {
  context.strokeStyle = colourOf(colour);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

function nearest(values, wanted) {
  let best = null;
  for (const value of values) if (best === null || Math.abs(value - wanted) < Math.abs(best - wanted)) best = value;
  return best;
}

/* Points come in the order of x; not of every curve, so all are looked at. */
function nearestIndex(trace, wanted) {
  const isStep = trace.line?.shape === "hv";
  let best = 0;
  for (let index = 1; index < trace.x.length; index++) {
    const away = trace.x[index] - wanted,
      least = trace.x[best] - wanted;
    if (isStep ? away <= 0 && away >= least : Math.abs(away) < Math.abs(least)) best = index;
  }
  return best;
}
