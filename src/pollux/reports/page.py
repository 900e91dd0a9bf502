"""The HTML and JavaScript around a report's figures; :mod:`pollux.reports.simulation_page` fills in the braces."""

from __future__ import annotations

FIGURE = """<figure class="card{wide}"><figcaption>{title}</figcaption>
<div id="{id}" class="plot" role="img" aria-label="{title}" style="height:{height}px"></div></figure>"""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="pollux {version}">
<title>{title}</title>
<style>{style}</style></head>
<body><main>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<noscript><p class="card">The plots need JavaScript; the tables do not.</p></noscript>
{first}
{sections}
{words}
<section><h2>Repeat it</h2><p>{made_with}</p>{repeat}</section>
</main>
{plotly}
<script type="application/json" id="figures">{figures}</script>
<script>{script}</script>
</body></html>
"""

# The policies' buttons show and hide lines of their section; all else is the look's.
SCRIPT = """
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
