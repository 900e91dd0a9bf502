/* A job's output as it comes. Whatever it prints, the page stays small: so many lines, and none longer than this. */

import {ApiError, api, download, stream} from "./api.js";
import {fill, h, set, setText, toast, whileSeen} from "./dom.js";
import {FINAL, byName, count, plural, time} from "./format.js";
import {save} from "./save.js";
import {now} from "./store.js";

const MOST_LINES = 5000,
  MOST_LETTERS = 4000,
  TAIL = 500,
  FRESH_MS = 10000;
// Colours, cursor movements and titles of terminals.
const ESCAPES = /\u001b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[@-Z\\-_])/g;

/* Lines out of pieces of text. Of a line that is too long only the beginning is ever kept. */
class LineCutter {
  constructor(take) {
    this.take = take;
    this.open = "";
    this.dropped = 0;
  }

  add(piece) {
    let from = 0;
    for (let end = piece.indexOf("\n"); end >= 0; end = piece.indexOf("\n", from)) {
      this.keep(piece.slice(from, end));
      this.end();
      from = end + 1;
    }
    if (from < piece.length) this.keep(piece.slice(from));
  }

  keep(part) {
    const room = MOST_LETTERS - this.open.length;
    this.open += part.slice(0, Math.max(0, room));
    this.dropped += Math.max(0, part.length - room);
  }

  end() {
    const text = this.open.replace(/\r+$/, "");
    this.take(text.slice(text.lastIndexOf("\r") + 1).replace(ESCAPES, ""), this.dropped);
    this.open = "";
    this.dropped = 0;
  }

  /* What has no end yet, when nothing more comes. */
  finish() {
    if (this.open || this.dropped) this.end();
  }
}

export class LogView {
  /* Asks for nothing before `start()`. */
  constructor(name) {
    this.name = name;
    const select = (label, options) =>
      h(
        "select",
        {"aria-label": label, onchange: () => this.restart()},
        options.map(([value, text]) => h("option", {value}, text)),
      );
    this.which = select("Which output", [
      ["both", "stdout and stderr"],
      ["out", "stdout"],
      ["err", "stderr"],
    ]);
    this.replica = select("Which replica", [["", "All replicas"]]);
    this.find = h("input", {
      type: "search",
      placeholder: "Find in the output …",
      "aria-label": "Find in the output",
      oninput: () => this.search(),
    });
    this.times = h("input", {
      type: "checkbox",
      onchange: event => set(this.box, {"data-times": event.target.checked}),
    });
    this.found = h("span", {class: "muted", role: "status"});
    this.state = h("span", {class: "muted", role: "status"});
    this.toEnd = h(
      "button",
      {
        type: "button",
        class: "ghost",
        hidden: true,
        onclick: () => {
          this.isFollowing = true;
          this.scroll();
        },
      },
      "Jump to the end",
    );
    this.box = h("div", {
      class: "logs",
      tabindex: "0",
      role: "region",
      "aria-label": "Output",
      onscroll: () => {
        this.isFollowing = this.box.scrollTop + this.box.clientHeight > this.box.scrollHeight - 30;
        this.toEnd.hidden = this.isFollowing;
      },
    });
    const times = "When this page received the line; lines from before it was opened have no time.";
    this.element = h(
      "div",
      {},
      h(
        "div",
        {class: "tools"},
        this.find,
        this.which,
        this.replica,
        h("label", {class: "check", title: times}, this.times, "Times"),
        h("button", {type: "button", class: "ghost", onclick: () => this.download()}, "Download"),
        this.toEnd,
        this.found,
        this.state,
      ),
      this.box,
    );
    Object.assign(this, {isFollowing: true, isOpen: false, isStarted: false, openedAt: 0, pending: []});
    this.unwatch = whileSeen(
      () => this.ending?.abort(),
      () => this.isStarted && this.start(),
    );
  }

  /* When the output is looked at for the first time. */
  open() {
    if (this.isStarted) return;
    this.start();
    this.listReplicas();
  }

  restart() {
    this.pending = [];
    fill(this.box);
    this.start();
  }

  async listReplicas() {
    try {
      const {files} = await api(`/jobs/${encodeURIComponent(this.name)}/log-files`, {signal: this.ending?.signal});
      const names = [...new Set(files.map(file => file.replica))].sort(byName);
      this.replica.append(...names.map(value => h("option", {value}, value)));
    } catch {
      /* all of them, then */
    }
  }

  /* Which part of the output, as the server wants to be asked. */
  part() {
    const replica = this.replica.value ? `&replica=${encodeURIComponent(this.replica.value)}` : "";
    return `/jobs/${encodeURIComponent(this.name)}/logs?stream=${this.which.value}${replica}`;
  }

  async download() {
    try {
      save(`${this.name}.log`, await download(this.part(), {signal: this.ending?.signal}));
    } catch (error) {
      if (error.name !== "AbortError") toast(`The output: ${error.message}`);
    }
  }

  search() {
    const words = this.find.value.toLowerCase();
    let found = 0;
    for (const line of this.box.children) {
      line.hidden = Boolean(words) && !line.textContent.toLowerCase().includes(words);
      found += line.hidden ? 0 : 1;
    }
    setText(this.found, words ? plural(found, "line") : "");
  }

  async start() {
    this.ending?.abort();
    this.isOpen = false;
    this.isStarted = true;
    const mine = (this.ending = new AbortController());
    let waitMs = 500;
    while (!mine.signal.aborted) {
      let isRefused = false,
        isWhole = false,
        isFirst = true; // what is there stays until there is something new to show
      try {
        const cutter = new LineCutter((text, dropped) => this.add(text, dropped));
        await stream(
          `${this.part()}&follow=true&tail=${TAIL}`,
          piece => {
            this.isTail = isFirst; // which was written before, at some time
            if (isFirst) {
              this.pending = [];
              fill(this.box);
            }
            isFirst = false;
            cutter.add(piece);
          },
          {
            signal: mine.signal,
            onOpen: () => {
              waitMs = 500;
              this.isOpen = true;
              this.openedAt = performance.now();
              setText(this.state, "live");
              if (!this.box.childElementCount) fill(this.box, h("p", {class: "empty"}, "It has written nothing yet."));
            },
          },
        );
        cutter.finish();
        isWhole = true;
      } catch (error) {
        if (mine.signal.aborted) return;
        isRefused = error instanceof ApiError && error.status >= 400 && error.status < 500;
        setText(this.state, isRefused ? error.message : "connection lost, trying again");
      }
      if (mine.signal.aborted) return;
      this.isOpen = false;
      if (isRefused) return;
      // Its end is told by the stream's end; but that may have been the server's, and then there is more to come.
      if (isWhole && (await this.isOver(mine.signal))) {
        setText(this.state, "the job has ended");
        if (isFirst) fill(this.box, h("p", {class: "empty"}, "It has written nothing."));
        return;
      }
      await new Promise(resolve => setTimeout(resolve, waitMs));
      waitMs = Math.min(10000, 1.7 * waitMs);
    }
  }

  /* Asked, as the events may tell it later than the output does. */
  async isOver(signal) {
    try {
      return FINAL.has((await api(`/jobs/${encodeURIComponent(this.name)}`, {signal})).state);
    } catch {
      return false;
    }
  }

  /* The server was away: a stream of before may be dead without having said so, as nothing is heard of a quiet job. */
  renew() {
    if (this.isOpen && performance.now() - this.openedAt > FRESH_MS) this.start();
  }

  add(text, dropped) {
    if (!this.pending.length) requestAnimationFrame(() => this.flush());
    this.pending.push([text, dropped, this.isTail ? "" : time(now())]);
    if (this.pending.length > 2 * MOST_LINES) this.pending.splice(0, this.pending.length - MOST_LINES);
  }

  flush() {
    const lines = this.pending.slice(-MOST_LINES);
    this.pending = [];
    this.box.append(
      ...lines.map(([text, dropped, at]) =>
        h(
          "div",
          {class: "log-line", "data-at": at},
          text || "\u200b",
          dropped > 0 && h("em", {class: "cut"}, ` … ${count(dropped)} more characters`),
        ),
      ),
    );
    while (this.box.childElementCount > MOST_LINES) this.box.firstElementChild.remove();
    if (this.find.value) this.search();
    if (this.isFollowing) this.scroll();
  }

  scroll() {
    this.box.scrollTop = this.box.scrollHeight;
  }

  remove() {
    this.unwatch();
    this.ending?.abort();
  }
}
