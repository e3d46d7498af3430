// Shows the scene of a file. SCENE is the scene, and FACTS its title and settings.
"use strict";
{
  const player = Player(document.getElementById("scene")), said = document.getElementById("said");
  const facts = () => ({ ...FACTS, file: document.title.replace(/\W+/g, "-").toLowerCase() });
  Export.buttons(document.getElementById("save"), player, facts, (text) => { said.textContent = text; });
  player.open(SCENE);
  document.getElementById("finding").textContent = player.finding();
}
