"""The HTML page of a report: heading, body, figures, and how to repeat it. All reports and benchmarks' pages use it.

It imports no simulator. Colours of figures are names ("@0", "@muted") until :mod:`pollux.reports.look` draws them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pollux.reports import look
from pollux.reports.versions import made_with
from pollux.version import __version__

Figure = dict[str, Any]  # plotly's data, or a part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What a page says about itself."""

    title: str
    command: str  # that makes the page again
    subtitle: str | None = None  # None: the policies and workloads that are compared
    slot: str = "GPU"  # what a replica sits on
    packages: tuple[str, ...] = ()  # whose versions matter beside the usual ones


def placed(figures: dict[str, Figure], id_: str, made: Figure, label: str, *, is_wide: bool = False) -> str:
    """Add a figure to ``figures``; the HTML of the place where the page draws it."""
    figures[id_] = made
    wide = " wide" if is_wide else ""
    return _FIGURE.format(id=id_, title=html.escape(label), height=made.pop("height"), wide=wide)


def make_page(
    heading: Heading, body: str, figures: Mapping[str, Figure], *, more: str = "", plotly_url: str | None = None
) -> str:
    """One HTML file. ``body`` is HTML, with the places of ``figures``; ``more`` follows the command that repeats it.

    A server's page takes plotly from ``plotly_url``; with None it is inside the page, which then needs nothing else.

    Raises:
        PolluxError: plotly is needed and not installed.
    """
    source = f' src="{html.escape(plotly_url)}">' if plotly_url is not None else f">{look.plotly_js()}"
    return _PAGE.format(
        title=html.escape(heading.title),
        subtitle=html.escape(heading.subtitle or ""),
        style=look.style(),
        body=body,
        repeat=f"<pre><code>{html.escape(heading.command)}</code></pre>{more}",
        version=html.escape(__version__),
        made_with=html.escape(made_with(*heading.packages)),
        plotly=f"<script{source}</script>",
        figures=json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=look.script() + _SCRIPT,
    )


_FIGURE = """<figure class="card{wide}"><figcaption>{title}<span class="takes">
<button type="button" class="take" data-take="svg" data-of="{id}" aria-label="{title} as SVG">SVG</button>
<button type="button" class="take" data-take="pdf" data-of="{id}" aria-label="{title} as PDF">PDF</button>
<button type="button" class="take" data-take="csv" data-of="{id}" aria-label="{title} as CSV">CSV</button>
</span></figcaption>
<div id="{id}" class="plot" role="img" aria-label="{title}" style="height:{height}px"></div></figure>"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="pollux {version}">
<title>{title}</title>
<style>{style}</style></head>
<body><main>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<noscript><p class="card">The plots need JavaScript; the tables do not.</p></noscript>
{body}
<section><h2>Repeat it</h2><p>{made_with}</p>{repeat}</section>
</main>
{plotly}
<script type="application/json" id="figures">{figures}</script>
<script>{script}</script>
</body></html>
"""

# Buttons of policies show and hide lines of their section; pollux.reports.look draws.
_SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const hidden = {};
document.querySelectorAll("section").forEach((section, number) =>
  section.querySelectorAll('.chip[aria-pressed="false"]').forEach(chip => {
    hidden["w" + number + "/" + chip.dataset.policy] = true;
  }));
function draw(id) {
  const section = id.split("-")[0], figure = figures[id];
  const data = figure.data.map(trace => ({...trace, visible: !(hidden[section + "/" + trace.meta])}));
  Look.drawFigure(id, {...figure, data});
}
/* Figures to take along: for a paper, or for figures of one's own. */
function csvOf(id) {
  const quoted = value => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const rows = [["curve", "x", "y", "error below", "error above"]];
  for (const trace of figures[id].data)
    (trace.y ?? []).forEach((y, at) =>
      rows.push([trace.name, trace.x?.[at], y, trace.error_y?.arrayminus?.[at], trace.error_y?.array?.[at]]));
  return rows.map(row => row.map(quoted).join(",")).join("\\r\\n") + "\\r\\n";
}
/* A page of the figure's own size, which the browser prints into a file: lines and letters stay what they are. */
async function printed(id) {
  const {width, height} = document.getElementById(id).getBoundingClientRect();
  const page = window.open("", "_blank"); // at once, while the click counts
  if (!page) return;
  const image = page.document.createElement("img"), style = page.document.createElement("style");
  style.textContent =
    `@page {size: ${width}px ${height}px; margin: 0} body {margin: 0} img {display: block; width: 100%}`;
  page.document.title = id;
  page.document.head.append(style);
  page.document.body.append(image);
  image.alt = id;
  image.addEventListener("load", () => page.print());
  image.src = await Plotly.toImage(id, {format: "svg", width, height});
}
function take(button) {
  const id = button.dataset.of;
  if (button.dataset.take === "pdf") {
    printed(id);
    return;
  }
  if (button.dataset.take === "svg") {
    const {width, height} = document.getElementById(id).getBoundingClientRect();
    Plotly.downloadImage(id, {format: "svg", filename: id, width, height});
    return;
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csvOf(id)], {type: "text/csv"}));
  link.download = `${id}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
document.querySelectorAll("[data-take]").forEach(button => button.addEventListener("click", () => take(button)));
const drawAll = () => Object.keys(figures).forEach(draw);
drawAll();
Look.whenThemeChanges(drawAll);
document.querySelectorAll("section").forEach((section, number) =>
  section.querySelectorAll(".chip").forEach(chip => chip.addEventListener("click", () => {
    const isShown = chip.getAttribute("aria-pressed") !== "true";
    chip.setAttribute("aria-pressed", isShown);
    hidden["w" + number + "/" + chip.dataset.policy] = !isShown;
    Object.keys(figures).filter(id => id.startsWith("w" + number + "-")).forEach(draw);
  })));
"""
