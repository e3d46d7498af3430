"""The web explorer: a page on this machine where a visitor turns a network lazy. `lazyscope explore` opens it."""
