/* Who held how many slots, and when: a row per job, bars as high as their replicas, a thin line while it waited. */

import {announce, h, tip} from "./dom.js";
import {duration, plural, time} from "./format.js";
import {Canvas, colours, fillOf, fitted} from "./paint.js";
import {now} from "./store.js";

const AXIS = 26,
  MOST_HEIGHT = 520, // of the rows that are seen at once; the others are scrolled to
  LEAST_ROW = 15; // in which a name can be read
const STEPS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600,
  2419200, 7257600, 31449600,
];

export class Gantt {
  constructor({openJob}) {
    Object.assign(this, {openJob, data: null, cursor: null, hovered: null, shape: null});
    this.canvas = new Canvas(
      {
        class: "gantt",
        tabindex: "0",
        role: "application",
        "aria-roledescription": "Gantt chart",
        "aria-label": "Allocations over time, a row per job. Up and down move; Enter opens the job.",
      },
      (...args) => this.draw(...args),
    );
    this.times = new Canvas({class: "gantt-axis", "aria-hidden": "true"}, (...args) => this.drawTimes(...args));
    this.times.setHeight(AXIS);
    this.empty = h("p", {class: "empty"}, "No job has been here in this time.");
    this.scroll = h("div", {class: "gantt-rows", style: {"max-height": `${MOST_HEIGHT}px`}}, this.canvas.element);
    this.scroll.addEventListener("scroll", () => this.canvas.ask(), {passive: true});
    this.element = h("div", {}, this.scroll, this.times.element, this.empty);
    this.listen(this.canvas.element);
  }

  /* `spanS`: how far back it goes from now; 0: as far as there is something. */
  update(data, spanS) {
    const under = this.data?.jobs[this.cursor]?.name; // the cursor stays with its job
    this.data = data;
    this.spanS = spanS || Infinity;
    if (under)
      this.cursor = Math.max(
        0,
        data.jobs.findIndex(job => job.name === under),
      );
    const num = data.jobs.length;
    this.scroll.hidden = this.times.element.hidden = !num;
    this.empty.hidden = num > 0;
    const row = Math.max(LEAST_ROW, Math.min(26, Math.floor(MOST_HEIGHT / Math.max(1, num))));
    this.begin = Math.min(...data.jobs.map(job => job.submitted_at)); // no more than there is
    this.most = 1;
    for (const job of data.jobs) for (const span of job.spans) this.most = Math.max(this.most, span.num_replicas);
    this.row = row;
    this.canvas.setHeight(num * row);
    this.refresh();
  }

  refresh() {
    if (!this.data?.jobs.length) return;
    this.canvas.ask();
    this.times.ask();
  }

  /* The rows in sight, and one more on each side. */
  seen() {
    const top = this.scroll.scrollTop,
      last = Math.ceil((top + this.scroll.clientHeight) / this.row);
    return [Math.max(0, Math.floor(top / this.row) - 1), Math.min(this.data.jobs.length, last + 1)];
  }

  /* From when to when, and where a moment is. */
  scale(context, width) {
    const until = now(),
      since = Math.min(Math.max(this.begin, until - this.spanS), until - 1);
    context.font = "12px system-ui, sans-serif";
    const [from, to] = this.seen(),
      widest = Math.max(...this.data.jobs.slice(from, to).map(job => context.measureText(job.name).width));
    const names = Math.min(0.28 * width, 170, Math.ceil((widest + 12) / 20) * 20); // scrolling moves it seldom
    const x = at => names + ((Math.min(Math.max(at, since), until) - since) / (until - since)) * (width - names - 8);
    return {names, since, until, width, x};
  }

  draw(context, width) {
    if (!this.data?.jobs.length) return;
    const {jobs} = this.data,
      paint = colours(),
      row = this.row,
      {x, ...shape} = this.scale(context, width),
      {names, until} = shape,
      [from, to] = this.seen();
    this.shape = shape;
    for (const {place} of this.ticks(x, shape)) {
      context.strokeStyle = paint.line;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(place, from * row);
      context.lineTo(place, to * row);
      context.stroke();
    }
    jobs.slice(from, to).forEach((job, number) => {
      const index = from + number;
      const top = index * row,
        middle = top + row / 2;
      if (this.hovered === index || (this.cursor === index && document.activeElement === this.canvas.element)) {
        context.fillStyle = paint.grid;
        context.fillRect(0, top, width, row);
      }
      context.fillStyle = paint.ink;
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText(fitted(context, job.name, names - 10), 2, middle);
      context.strokeStyle = paint.muted;
      context.lineWidth = 1;
      context.setLineDash([2, 3]);
      context.beginPath();
      context.moveTo(x(job.submitted_at), middle);
      context.lineTo(x(job.finished_at ?? until), middle);
      context.stroke();
      context.setLineDash([]);
      context.fillStyle = fillOf(context, job.name);
      for (const span of job.spans) {
        const tall = Math.max(2, (row - 3) * Math.sqrt(span.num_replicas / this.most));
        const left = x(span.since),
          right = x(span.until ?? until);
        if (right > left || span.until === null)
          context.fillRect(left, middle - tall / 2, Math.max(1, right - left - 1), tall);
      }
      if (row >= 18) this.numbers(context, job, x, middle, until, paint);
    });
  }

  /* How many replicas, where there is room for it. */
  numbers(context, job, x, middle, until, paint) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = "600 11px system-ui, sans-serif";
    for (const span of job.spans) {
      const left = x(span.since),
        right = x(span.until ?? until),
        tall = (this.row - 3) * Math.sqrt(span.num_replicas / this.most);
      if (right - left < 18 || tall < 12) continue;
      context.lineWidth = 3;
      context.strokeStyle = paint.card;
      context.fillStyle = paint.ink;
      context.lineJoin = "round";
      context.strokeText(String(span.num_replicas), (left + right) / 2, middle + 0.5);
      context.fillText(String(span.num_replicas), (left + right) / 2, middle + 0.5);
    }
    context.font = "12px system-ui, sans-serif";
  }

  /* The moments on the axis, as texts. */
  *ticks(x, {since, until, names, width}) {
    const step = STEPS_S.find(one => (until - since) / one <= Math.max(2, (width - names) / 90)) ?? STEPS_S.at(-1);
    const shift = 60 * new Date(1000 * since).getTimezoneOffset(); // ticks at whole hours of the clock on the wall
    const form =
      step >= 86400
        ? {day: "numeric", month: "short"}
        : {hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(step < 60 ? {second: "2-digit"} : {})};
    const shown = new Intl.DateTimeFormat(undefined, form);
    for (let at = Math.ceil((since - shift) / step) * step + shift; at <= until; at += step)
      yield {place: x(at), text: shown.format(new Date(1000 * at))};
  }

  drawTimes(context, width, height) {
    if (!this.data?.jobs.length) return;
    const {x, ...shape} = this.scale(context, this.canvas.element.clientWidth || width);
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    context.fillStyle = colours().muted;
    for (const {place, text} of this.ticks(x, shape)) {
      const half = context.measureText(text).width / 2;
      if (place - half >= 0 && place + half <= x(shape.until) + 8) context.fillText(text, place, height - 6);
    }
  }

  listen(element) {
    const rowAt = event => {
      const index = Math.floor((event.clientY - element.getBoundingClientRect().top) / this.row);
      return this.shape && this.data?.jobs[index] ? index : null;
    };
    element.addEventListener("pointermove", event => {
      const index = rowAt(event);
      if (index !== this.hovered) {
        this.hovered = index;
        this.canvas.ask();
      }
      if (index === null || event.pointerType === "touch") {
        tip.hide();
        return;
      }
      tip.show(this.words(index, event.clientX - element.getBoundingClientRect().left), event.clientX, event.clientY);
    });
    element.addEventListener("pointerleave", () => {
      this.hovered = null;
      tip.hide();
      this.canvas.ask();
    });
    element.addEventListener("click", event => {
      const index = rowAt(event);
      if (index !== null) {
        tip.hide();
        this.openJob(this.data.jobs[index].name);
      }
    });
    element.addEventListener("focus", () => {
      this.cursor ??= 0;
      if (element.matches(":focus-visible")) this.tell();
      this.canvas.ask();
    });
    element.addEventListener("blur", () => {
      tip.hide();
      this.canvas.ask();
    });
    element.addEventListener("keydown", event => {
      const last = (this.data?.jobs.length ?? 0) - 1;
      if (last < 0) return;
      if (event.key === "Enter") {
        this.openJob(this.data.jobs[this.cursor].name);
        return;
      }
      if (event.key === "ArrowDown") this.cursor = Math.min(last, this.cursor + 1);
      else if (event.key === "ArrowUp") this.cursor = Math.max(0, this.cursor - 1);
      else if (event.key === "Home") this.cursor = 0;
      else if (event.key === "End") this.cursor = last;
      else return;
      event.preventDefault();
      this.tell();
      this.canvas.ask();
    });
  }

  tell() {
    if (!this.data?.jobs[this.cursor] || !this.shape) return;
    const top = this.cursor * this.row,
      {scrollTop, clientHeight} = this.scroll;
    if (top < scrollTop) this.scroll.scrollTop = top;
    else if (top + this.row > scrollTop + clientHeight) this.scroll.scrollTop = top + this.row - clientHeight;
    const box = this.canvas.element.getBoundingClientRect(),
      lines = this.words(this.cursor, null);
    announce(lines.join(", "));
    tip.show(lines, box.left + 40, box.top + (this.cursor + 1) * this.row);
  }

  words(index, place) {
    const job = this.data.jobs[index],
      {names, since, until, width} = this.shape;
    const lines = [
      job.name,
      `${job.state}; submitted ${time(job.submitted_at)}${job.finished_at ? `, ended ${time(job.finished_at)}` : ""}`,
    ];
    if (place !== null && place > names) {
      const at = since + ((place - names) / (width - names - 8)) * (until - since);
      const span = job.spans.find(one => one.since <= at && at < (one.until ?? until));
      const where = span?.allocation
        .slice(0, 4)
        .map(([node, num]) => `${num} on ${node}`)
        .join(", ");
      if (span)
        lines.push(
          `${time(at)}: ${plural(span.num_replicas, "replica")} for ${duration((span.until ?? until) - span.since)}`,
          where + (span.allocation.length > 4 ? ", …" : ""),
        );
      else
        lines.push(
          `${time(at)}: ${at < job.submitted_at || at > (job.finished_at ?? Infinity) ? "not here" : "no slots"}`,
        );
    } else lines.push(plural(job.spans.length, "allocation"));
    return lines;
  }

  remove() {
    this.canvas.remove();
    this.times.remove();
  }
}
