/* A job's output as it comes. Whatever it prints, the page stays small: so many lines, and none longer than this. */

import {ApiError, api, stream} from "./api.js";
import {fill, h, setText, whileSeen} from "./dom.js";
import {FINAL, count} from "./format.js";

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
  constructor(name) {
    this.name = name;
    this.which = h(
      "select",
      {
        "aria-label": "Which output",
        onchange: () => {
          this.pending = [];
          fill(this.box);
          this.start();
        },
      },
      [
        ["both", "stdout and stderr"],
        ["out", "stdout"],
        ["err", "stderr"],
      ].map(([value, text]) => h("option", {value}, text)),
    );
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
    this.element = h("div", {}, h("div", {class: "tools"}, this.which, this.toEnd, this.state), this.box);
    this.isFollowing = true;
    this.isOpen = false;
    this.openedAt = 0;
    this.pending = [];
    this.unwatch = whileSeen(
      () => this.ending?.abort(),
      () => this.start(),
    );
    this.start();
  }

  async start() {
    this.ending?.abort();
    this.isOpen = false;
    const mine = (this.ending = new AbortController());
    let waitMs = 500;
    while (!mine.signal.aborted) {
      let isRefused = false,
        isWhole = false,
        isFirst = true; // what is there stays until there is something new to show
      try {
        const cutter = new LineCutter((text, dropped) => this.add(text, dropped));
        const path = `/jobs/${encodeURIComponent(this.name)}/logs?follow=true&tail=${TAIL}&stream=${this.which.value}`;
        await stream(
          path,
          piece => {
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
    this.pending.push([text, dropped]);
    if (this.pending.length > 2 * MOST_LINES) this.pending.splice(0, this.pending.length - MOST_LINES);
  }

  flush() {
    const lines = this.pending.slice(-MOST_LINES);
    this.pending = [];
    this.box.append(
      ...lines.map(([text, dropped]) =>
        h(
          "div",
          {class: "log-line"},
          text || "\u200b",
          dropped > 0 && h("em", {class: "cut"}, ` … ${count(dropped)} more characters`),
        ),
      ),
    );
    while (this.box.childElementCount > MOST_LINES) this.box.firstElementChild.remove();
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
