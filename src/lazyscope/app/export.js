// Saves the scene that a player shows, with its settings and numbers written in, as SVG, PNG or GIF.
"use strict";
const Export = (() => {
  const GAP = 12, LINE = 17, SHARPNESS = 2, FRAMES = 60;

  // Returns the whole scene as one SVG element. `facts` holds the title, the settings in words, and the version.
  function compose(player, facts) {
    const panels = player.pictures(), look = player.standard(), { make, FONT } = Drawing, W = look.wide, H = look.tall;
    const columns = panels.length === 4 ? 2 : Math.min(3, panels.length), wide = columns * (W + GAP) + GAP;
    const most = Math.floor((wide - 2 * GAP) / 6.6);
    const told = (numbers) => [player.now().moment, ...numbers.map(([name, value]) => `${name}: ${value}`)].join("; ");
    const settings = Drawing.lines(facts.caption.join("; "), most), numbers = Drawing.lines(told(player.numbers()), most);
    const rows = [...settings.map((text) => [text, look.soft]), ...numbers.map((text) => [text, look.ink])];
    // There is room for the longest numbers of all frames, so that the panels of a film stand still.
    const room = settings.length + Math.max(numbers.length, Drawing.lines(told(player.numbers(true)), most).length);
    const head = 34 + LINE * room, tall = head + Math.ceil(panels.length / columns) * (H + GAP) + 22;
    const svg = make("svg", { xmlns: "http://www.w3.org/2000/svg", width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}` });
    make("rect", { width: wide, height: tall, fill: look.page }, svg);
    const write = (x, y, text, more) => make("text", { x, y, "font-family": FONT, "font-size": 12, ...more }, svg, text);
    write(GAP, 24, facts.title, { fill: look.ink, "font-size": 18, "font-weight": 700 });
    rows.forEach(([text, fill], i) => write(GAP, 42 + LINE * i, text, { fill }));
    panels.forEach((panel, i) => {
      const place = { x: GAP + (i % columns) * (W + GAP), y: head + Math.floor(i / columns) * (H + GAP), width: W, height: H };
      for (const [name, value] of Object.entries(place)) panel.setAttribute(name, value);
      svg.appendChild(panel);
    });
    write(wide - GAP, tall - 8, `lazyscope ${facts.version}`, { fill: look.soft, "text-anchor": "end" });
    return svg;
  }

  const text = (svg) => new XMLSerializer().serializeToString(svg);

  async function painted(svg, sharpness) {
    const image = new Image(), width = Number(svg.getAttribute("width")), height = Number(svg.getAttribute("height"));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text(svg))}`;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: width * sharpness, height: height * sharpness });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return canvas;
  }

  const MAKE = {
    svg: async (player, facts) => new Blob([text(compose(player, facts))], { type: "image/svg+xml" }),
    async png(player, facts) {
      const canvas = await painted(compose(player, facts), SHARPNESS);
      return new Promise((done) => { canvas.toBlob(done, "image/png"); });
    },
    // Goes through all frames, or every second or third one if there are many, and rests at the last one.
    async gif(player, facts, tell) {
      const { frame: before, pause } = player.now(), last = player.last(), stride = Math.max(1, Math.ceil(last / FRAMES));
      const seen = [...Array(last + 1).keys()].filter((frame) => frame % stride === 0 || frame === last);
      let film = null;
      player.stop();
      for (const frame of seen) {
        tell(`Drawing ${seen.indexOf(frame) + 1} of ${seen.length} pictures …`);
        player.show(frame);
        const canvas = await painted(compose(player, facts), 1);
        film = film || Gif.start(canvas.width, canvas.height);
        film.add(canvas.getContext("2d").getImageData(0, 0, film.width, film.height).data, frame === last ? 1500 : Math.max(20, pause * stride));
      }
      player.show(before);
      return Gif.finish(film);
    },
  };

  async function save(kind, player, facts, tell) {
    tell(kind === "gif" ? "Drawing the pictures …" : "");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await MAKE[kind](player, facts, tell));
    link.download = `${facts.file}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    tell(`Saved ${link.download}.`);
  }

  // Adds the buttons for all kinds to an element. `facts` returns the facts at the time of the click.
  function buttons(parent, player, facts, tell) {
    for (const kind of ["png", "svg", "gif"]) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: kind.toUpperCase() });
      button.addEventListener("click", async () => {
        button.disabled = true;
        try { await save(kind, player, facts(), tell); }
        finally { button.disabled = false; button.focus(); }
      });
      parent.appendChild(button);
    }
  }

  return { buttons, MAKE };
})();
