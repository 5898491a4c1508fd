// Try images: send them to the server, show what it says, and decide again when a slider moves.
(function () {
  "use strict";

  const { $, element, name, grouped, counted, ask, post, percent, data } = lopsided;
  const AT_ONCE = 4; // Requests at a time.
  const MOST = 500; // Images on the page.
  const ASK = "ask";
  const model = data.model;
  const items = []; // { title, answer, first, row }
  const waiting = [];
  let running = 0, asked = 0, baseline = null;

  const bars = (probabilities) => {
    const list = element("dl", "bars");
    for (const [label, p] of Object.entries(probabilities).sort((a, b) => b[1] - a[1]).slice(0, 6)) {
      const meter = element("meter");
      meter.max = 1;
      meter.value = p;
      meter.setAttribute("aria-label", label);
      list.append(element("dt", "", name(label)), element("dd", "", meter, ` ${percent(p)}`));
    }
    return list;
  };

  function verdict(answer) {
    if (answer.set) return answer.set.length ? answer.set.join(" or ") : "no class fits";
    return answer.predicted === ASK ? "ask a person" : answer.predicted;
  }

  function nearest(answer) {
    const part = element("div", "near-images");
    if (!answer.nearest || !answer.nearest.length) return part;
    part.append(element("p", "aside", "Nearest known images"));
    const list = element("ul", "");
    for (const each of answer.nearest) {
      const image = element("img", "");
      image.src = `/images/${each.id}`;
      image.alt = `Known image of ${each.label}`;
      image.loading = "lazy";
      list.append(element("li", "", image, element("span", "", name(each.label))));
    }
    part.append(list);
    return part;
  }

  function draw(item) {
    const { answer } = item;
    const body = element("div", "answer-body");
    if (answer === null) {
      body.append(element("p", "soft", "Waiting …"));
    } else if (answer.error || answer.unreadable) {
      body.append(element("p", "said wrong", answer.error ? "No answer" : "Unreadable"), element("p", "", answer.error || answer.unreadable));
    } else {
      const head = element("p", "said", verdict(answer));
      body.append(head);
      if (item.first !== null && item.first !== verdict(answer)) body.append(element("p", "aside", `By the rule of the model: ${item.first}`));
      const most = Object.entries(answer.probabilities).reduce((best, each) => (each[1] > best[1] ? each : best))[0];
      if (verdict(answer) === answer.predicted && most !== answer.predicted) body.append(element("p", "aside", "By the rule, although ", name(most), " is more probable."));
      if (answer.unfamiliar) body.append(element("p", "flag", "Unlike the training images: do not rely on the answer."));
      body.append(bars(answer.probabilities));
      if (answer.typicality !== undefined) {
        const words = `Typicality ${percent(answer.typicality)}: the share of training images that are less typical.`;
        body.append(element("p", "aside", words));
      }
      body.append(nearest(answer));
    }
    const stage = element("div", "answer-picture");
    if (answer && answer.picture) {
      const image = element("img", "");
      image.src = answer.picture;
      image.alt = item.title;
      stage.append(image);
      if (answer.map) {
        const heat = element("img", "over-picture");
        heat.src = answer.map;
        heat.alt = "";
        stage.append(heat);
      }
    }
    item.row.replaceChildren(stage, element("div", "", element("h3", "", name(item.title)), body));
    item.row.dataset.state = answer === null ? "waiting" : answer.error ? "error" : answer.unreadable ? "unreadable" : answer.unfamiliar ? "unfamiliar" : "answered";
  }

  function tell() {
    const done = items.filter((item) => item.answer !== null).length;
    $("try-status").textContent = items.length ? `${grouped(done)} of ${counted(items.length, "image")} answered.` : "";
  }

  async function send(item, file) {
    const form = new FormData();
    form.append("image", file, "image");
    for (const [key, value] of Object.entries({ map: model.maps, nearest: 5, picture: true })) form.append(key, String(value));
    const own = ++item.asked;
    if (model.columns.length) form.append("columns", JSON.stringify(columns()));
    try {
      const [answer] = (await ask("/v1/predict", { method: "POST", body: form })).images;
      if (own !== item.asked) return; // The columns have changed meanwhile.
      item.plain = answer.probabilities ? model.classes.map((each) => answer.probabilities[each]) : null;
      item.answer = answer;
      item.first = null;
    } catch (error) {
      if (own !== item.asked) return;
      item.plain = null;
      item.answer = { error: error.message };
    }
    draw(item);
    tell();
  }

  function next() {
    while (running < AT_ONCE && waiting.length) {
      const item = waiting.shift();
      running += 1;
      send(item, item.file).finally(() => { running -= 1; next(); if (!running && rule()) decide(); });
    }
  }

  function add(files) {
    for (const file of files) {
      if (items.length >= MOST) { $("try-status").textContent = `The page shows at most ${MOST} images.`; break; }
      const item = { title: file.webkitRelativePath || file.name || "pasted image", file, asked: 0, answer: null, first: null, plain: null, row: element("li", "answer") };
      items.push(item);
      $("answers").prepend(item.row);
      draw(item);
      waiting.push(item);
    }
    tell();
    next();
  }

  // ------------------------------------------------------------------------------------- columns of a table beside images

  const columns = () => Object.fromEntries(model.columns.map((column, place) => [column.name, $(`column-${place}`).value || null]));

  function setUpColumns() {
    $("beside").hidden = !model.columns.length;
    model.columns.forEach((column, place) => {
      const input = element(column.kind === "number" ? "input" : "select", "");
      input.id = `column-${place}`;
      if (column.kind === "number") { input.type = "number"; input.step = "any"; } else input.append(new Option("not known", ""), ...column.values.map((each) => new Option(each, each)));
      input.addEventListener("change", () => {
        for (const item of items) { item.asked += 1; item.answer = item.first = item.plain = null; draw(item); }
        waiting.splice(0, waiting.length, ...items);
        tell();
        next();
      });
      $("columns").append(element("label", "", name(column.name), " ", input));
    });
  }

  // ------------------------------------------------------------------------------------------------- files of all kinds

  async function filesBelow(entry) {
    if (entry.isFile) return [await new Promise((good, bad) => entry.file(good, bad))];
    const reader = entry.createReader();
    const found = [];
    for (;;) {
      const part = await new Promise((good, bad) => reader.readEntries(good, bad));
      if (!part.length) return found;
      for (const each of part) if (!each.name.startsWith(".")) found.push(...await filesBelow(each));
    }
  }

  function setUpDrop() {
    const drop = $("drop");
    addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
    addEventListener("dragleave", () => drop.classList.remove("over"));
    addEventListener("drop", async (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry && item.webkitGetAsEntry()).filter(Boolean);
      const files = [...event.dataTransfer.files];
      add(entries.some((entry) => entry.isDirectory) ? (await Promise.all(entries.map(filesBelow))).flat() : files);
    });
    addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (files.length) { event.preventDefault(); add(files); }
    });
    for (const id of ["pick-files", "pick-folder", "pick-camera"]) {
      const input = $(id);
      input.addEventListener("change", () => { add([...input.files].filter((file) => !file.name.startsWith("."))); input.value = ""; });
      input.parentElement.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); input.click(); } });
    }
  }

  // ------------------------------------------------------------------------------------------------------------ deciding

  const logit = (value) => { const x = (value - 50) / 8; return 1 / (1 + Math.exp(-x)); };
  const RULES = {
    threshold: {
      name: "Call it this class from a probability of", start: 50, value: logit, shown: percent,
      text: (label, value) => `threshold:${label}=${Number(value.toPrecision(4))}`,
    },
    cost: {
      name: "A missed image of this class costs as much as this many false alarms:", start: 50,
      value: (at) => 10 ** ((at - 50) / 20), shown: (value) => Number(value.toPrecision(2)).toString(),
      text: (label, value) => `cost:${JSON.stringify(Object.fromEntries(model.classes.map((each) => [each, each === label ? Number(value.toPrecision(4)) : 1])))}`,
    },
    abstain: {
      name: "Ask a person if the expected error is above", start: 40, value: (at) => 0.5 * 10 ** ((at - 100) / 40), shown: percent,
      text: (label, value) => `abstain:${Number(value.toPrecision(3))}`,
    },
    sets: {
      name: "The set holds the right class in this share of images of each class:", start: 50, value: (at) => 0.8 + (0.195 * at) / 100, shown: percent,
      text: (label, value) => `sets:${Number(value.toPrecision(3))}`,
    },
  };

  const current = () => RULES[$("rule").value];
  const label = () => $("rule-class").value;
  const ruleValue = () => current().value(Number($("rule-value").value));
  const shareValue = () => logit(Number($("share-value").value));
  const rule = () => $("rule").value || $("shares").checked;

  function prevalence() {
    if (!$("shares").checked) return null;
    const share = Number(shareValue().toPrecision(4));
    const rest = Object.entries(model.prior).filter(([each]) => each !== label());
    const total = rest.reduce((sum, [, p]) => sum + p, 0) || 1;
    return JSON.stringify(Object.fromEntries([[label(), share], ...rest.map(([each, p]) => [each, ((1 - share) * p) / total])]));
  }

  function table(counts) {
    $("counts").hidden = counts === null;
    $("no-counts").hidden = counts !== null;
    if (counts === null) return;
    $("counts").caption.textContent = `On the ${counted(counts.images, `${counts.kind} image`)} of the run. An arrow shows what changes.`;
    const rows = counts.per_class.map((row, place) => {
      const before = baseline.per_class[place];
      const cell = (key) => {
        const made = element("td", "number", before[key] === row[key] ? grouped(row[key]) : `${grouped(before[key])} → ${grouped(row[key])}`);
        made.classList.toggle("changed", before[key] !== row[key]);
        return made;
      };
      const head = element("th", "", name(row.label));
      head.scope = "row";
      return element("tr", "", head, element("td", "number", grouped(row.images)), cell("found"), cell("false_alarms"), cell("asked"));
    });
    $("counts").tBodies[0].replaceChildren(...rows);
  }

  async function decide() {
    const own = ++asked;
    const ready = items.filter((item) => item.plain);
    const chosen = current();
    const content = { probabilities: ready.map((item) => item.plain) };
    if (chosen) content.decide = chosen.text(label(), ruleValue());
    const shares = prevalence();
    if (shares) content.prevalence = shares;
    let found;
    try {
      found = await post("/v1/decide", content);
    } catch (error) {
      if (own === asked) $("changes").textContent = error.message;
      return;
    }
    if (own !== asked) return; // The slider has moved on.
    if (!rule() && baseline === null) baseline = found.counts;
    table(found.counts);
    let changed = 0;
    found.images.forEach((answer, place) => {
      const item = ready[place];
      const before = item.first === null ? verdict(item.answer) : item.first;
      const { set, ...others } = item.answer;
      item.answer = { ...others, ...answer };
      item.first = before;
      if (verdict(item.answer) !== before) changed += 1;
      draw(item);
    });
    $("changes").textContent = ready.length ? `${grouped(changed)} of ${counted(ready.length, "image")} here ${changed === 1 ? "is" : "are"} decided otherwise than by the rule of the model.` : "";
  }

  let timer = null;
  const soon = () => { clearTimeout(timer); timer = setTimeout(decide, 60); };

  function showControls() {
    const chosen = current();
    $("rule-slider").hidden = !chosen;
    $("share-slider").hidden = !$("shares").checked;
    if (chosen) {
      $("rule-name").textContent = chosen.name;
      $("rule-shown").textContent = chosen.shown(ruleValue());
      $("rule-value").setAttribute("aria-valuetext", chosen.shown(ruleValue()));
    }
    $("share-shown").textContent = percent(shareValue());
    $("share-value").setAttribute("aria-valuetext", percent(shareValue()));
  }

  function setUpDeciding() {
    for (const each of model.classes) $("rule-class").append(new Option(each, each));
    $("rule-class").value = model.rarest;
    const at = (p) => 50 + 8 * Math.log(Math.max(p, 1e-3) / (1 - Math.min(p, 0.999)));
    const start = () => { if (current()) $("rule-value").value = current().start; };
    $("share-value").value = at(model.prior[model.rarest]);
    $("rule").addEventListener("change", () => { start(); showControls(); soon(); });
    $("rule-class").addEventListener("change", () => { $("share-value").value = at(model.prior[label()]); showControls(); soon(); });
    for (const id of ["rule-value", "share-value", "shares"]) $(id).addEventListener("input", () => { showControls(); soon(); });
    showControls();
    decide();
  }

  $("try-lead").textContent = [model.decide_words, ...model.headlines.map((line) => `${line}.`)].join(" ");
  $("no-maps").hidden = model.maps;
  $("no-maps").textContent = "The encoder of this model has no positions, so there are no maps of where it looked.";
  $("with-map").addEventListener("change", () => $("answers").classList.toggle("plain", !$("with-map").checked));
  $("clear").addEventListener("click", () => { items.length = 0; waiting.length = 0; $("answers").replaceChildren(); $("changes").textContent = ""; tell(); });
  setUpColumns();
  setUpDrop();
  setUpDeciding();
})();
