/* Of the documentation's site: landmarks have names of their own, and what scrolls can be reached by keyboard.
   The theme makes both after the page has loaded. */
function nameParts() {
  document.querySelectorAll("nav.md-code__nav").forEach((nav, at) => {
    nav.setAttribute("aria-label", `Code block ${at + 1}`);
  });
  document.querySelectorAll("nav.md-nav[aria-labelledby]").forEach(nav => {
    const label = document.getElementById(nav.getAttribute("aria-labelledby"));
    nav.setAttribute("aria-label", `${label ? label.textContent.trim() : "Pages"}, level ${nav.dataset.mdLevel ?? 0}`);
    nav.removeAttribute("aria-labelledby");
  });
  document.querySelectorAll(".md-typeset__scrollwrap").forEach(box => {
    box.tabIndex = 0;
  });
}
addEventListener("load", () => setTimeout(nameParts, 0));
new MutationObserver(nameParts).observe(document.documentElement, {childList: true, subtree: true});
