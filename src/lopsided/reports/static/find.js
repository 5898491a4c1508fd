// Marking the candidates of a search. Marks stay in the browser's storage. Names are inserted as text nodes only.
(function () {
  "use strict";

  const { $ } = lopsided;
  const data = JSON.parse($("data").textContent);
  if (data.kind !== "find") return;
  const CHUNK = 100; // Number of pictures added to the gallery at once.
  const KEY = `lopsided-find-${data.id}`;
  const SAID = { yes: "yes", no: "no", skip: "skipped" };
  const items = data.items;
  let marks = {}; // Place of an image to its mark.
  let past = []; // Marks that can be undone: place and former mark.
  let here = 0;
  const tiles = [];

  function read() {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY) || "{}");
      const isPlace = (place) => Number.isInteger(Number(place)) && place >= 0 && place < items.length;
      for (const [place, mark] of Object.entries(kept.marks || {})) if (isPlace(place) && SAID[mark]) marks[place] = mark;
      if (Array.isArray(kept.past)) past = kept.past.filter((each) => Array.isArray(each) && isPlace(each[0]));
      if (isPlace(kept.here)) here = kept.here;
    } catch (refused) { $("kept").textContent = "This browser does not keep the marks. Save them before you close the page."; }
  }

  function keep() {
    try { localStorage.setItem(KEY, JSON.stringify({ marks, past, here })); } catch (refused) {
      $("kept").textContent = "This browser does not keep the marks. Save them before you close the page.";
    }
  }

  const source = (item) => `data:image/webp;base64,${item.picture}`;

  function show() {
    const item = items[here];
    const mark = marks[here] || "";
    const picture = $("picture");
    picture.hidden = !item.picture;
    $("no-picture").hidden = Boolean(item.picture);
    if (item.picture) picture.src = source(item);
    picture.className = item.small ? "small" : "";
    picture.alt = `Image ${item.rank}`;
    picture.parentElement.dataset.mark = mark;
    $("place").textContent = String(here + 1);
    $("p").textContent = item.p;
    $("near").textContent = item.near;
    $("path").textContent = item.path;
    $("mark").textContent = SAID[mark] || "none yet";
    for (const name of Object.keys(SAID)) $(name).setAttribute("aria-pressed", String(mark === name));
    tiles.forEach((tile, place) => {
      tile.dataset.mark = marks[place] || "";
      if (place === here) tile.setAttribute("aria-current", "true"); else tile.removeAttribute("aria-current");
    });
    const count = { yes: 0, no: 0, skip: 0 };
    for (const each of Object.values(marks)) count[each] += 1;
    const done = count.yes + count.no + count.skip;
    $("done").value = done;
    const all = done === items.length ? " All images are marked: save the marks." : "";
    $("status").textContent = `${done} of ${items.length} marked: ${count.yes} yes, ${count.no} no, ${count.skip} skipped.${all}`;
    $("undo").disabled = past.length === 0;
    $("save").disabled = done === 0;
  }

  function go(place) {
    here = Math.min(Math.max(place, 0), items.length - 1);
    keep();
    show();
  }

  function give(mark) {
    past.push([here, marks[here] || ""]);
    marks[here] = mark;
    let next = here + 1;
    while (next < items.length && marks[next]) next += 1;
    go(next < items.length ? next : here);
  }

  function undo() {
    const last = past.pop();
    if (!last) return;
    if (SAID[last[1]]) marks[last[0]] = last[1]; else delete marks[last[0]];
    go(last[0]);
  }

  const cell = (text) => (/[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  function save() {
    const lines = ["path,label,mark"];
    items.forEach((item, place) => {
      const mark = marks[place];
      const label = { yes: data.label, no: data.other, skip: "" }[mark];
      if (mark) lines.push([item.full, label, mark].map(cell).join(","));
    });
    if (lines.length === 1) return;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
    link.download = "marks.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    $("kept").textContent = `${lines.length - 1} marks were saved as marks.csv.`;
  }

  function addTiles() {
    const end = Math.min(tiles.length + CHUNK, items.length);
    for (let place = tiles.length; place < end; place++) {
      const tile = document.createElement("button");
      tile.type = "button";
      tile.className = "candidate";
      tile.setAttribute("aria-label", `Image ${items[place].rank}`);
      if (items[place].picture) {
        const image = document.createElement("img");
        image.alt = "";
        image.className = items[place].small ? "small" : "";
        image.src = source(items[place]);
        tile.append(image);
      }
      tile.addEventListener("click", () => { go(place); $("looker").scrollIntoView(); });
      const row = document.createElement("li");
      const text = document.createElement("p");
      text.className = "soft";
      text.textContent = `${items[place].rank}: ${items[place].p}`;
      row.append(tile, text);
      $("found-gallery").append(row);
      tiles.push(tile);
    }
    $("more-found").hidden = tiles.length === items.length;
  }

  const KEYS = {
    y: () => give("yes"), n: () => give("no"), s: () => give("skip"), u: undo, d: save,
    ArrowLeft: () => go(here - 1), ArrowRight: () => go(here + 1), Home: () => go(0), End: () => go(items.length - 1),
  };

  $("total").textContent = String(items.length);
  $("done").max = Math.max(items.length, 1);
  for (const each of document.querySelectorAll(".near")) each.hidden = !items.some((item) => item.near);
  if (!items.length) { $("looker").hidden = true; $("more-found").hidden = true; return; }
  for (const name of Object.keys(SAID)) $(name).addEventListener("click", () => give(name));
  $("back").addEventListener("click", KEYS.ArrowLeft);
  $("next").addEventListener("click", KEYS.ArrowRight);
  $("undo").addEventListener("click", undo);
  $("save").addEventListener("click", save);
  $("more-found").addEventListener("click", () => { addTiles(); show(); });
  lopsided.onKeys(KEYS);
  read();
  addTiles();
  show();
})();
