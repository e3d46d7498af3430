// A table that is wider than the page is scrolled with the keyboard, too. The theme creates these elements.
addEventListener("load", () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
});
