"""The explorer: interactive pages in the browser, served by `lazyscope explore`."""
