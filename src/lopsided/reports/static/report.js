// The interactive parts of a report page. Nothing is fetched. Names from the data are inserted as text nodes only.
(function () {
  "use strict";

  const { root, $, element, name, shown, probability, grouped, counted, setUpTheme, setUpCopying } = lopsided;
  const data = JSON.parse($("data").textContent);
  const CHUNK = 60; // Number of pictures added to a gallery at once.

  function unpack(text, Type) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Type(bytes.buffer);
  }

  // ------------------------------------------------------------------------------------------------------------ sorting

  function setUpSorting() {
    for (const table of document.querySelectorAll("table.sortable")) {
      const heads = [...table.tHead.rows[0].cells];
      heads.forEach((head, column) => {
        if (head.tagName !== "TH") return;
        const isText = head.dataset.kind === "text";
        const button = element("button", "", ...head.childNodes);
        button.type = "button";
        head.append(button);
        button.addEventListener("click", () => {
          const first = isText ? "ascending" : "descending";
          const other = isText ? "descending" : "ascending";
          const order = head.getAttribute("aria-sort") === first ? other : first;
          heads.forEach((each) => each.removeAttribute("aria-sort"));
          head.setAttribute("aria-sort", order);
          const sign = order === "ascending" ? 1 : -1;
          const value = (row) => row.cells[column].dataset.value || "";
          const rows = [...table.tBodies[0].rows];
          rows.sort((a, b) => {
            const x = value(a), y = value(b);
            if (isText) return sign * x.localeCompare(y);
            if (x === "" || y === "") return (x === "") - (y === ""); // Undefined values come last in both orders.
            return sign * (Number(x) - Number(y));
          });
          table.tBodies[0].append(...rows);
        });
      });
    }
  }

  // ---------------------------------------------------------------------------------------------------- images of a run

  let label, predicted, sure, truth, missing;

  function picture(i) {
    if (!data.pictures || missing.has(i)) return null;
    const { columns, rows } = data.pictures;
    const place = i % (columns * rows);
    const made = element("span", `thumb s${Math.floor(i / (columns * rows))} x${place % columns} y${Math.floor(place / columns)}`);
    made.setAttribute("aria-hidden", "true");
    if (data.heat && data.heat[i]) {
      const heat = element("img", "heat");
      heat.alt = "";
      heat.src = data.heat[i];
      made.append(heat);
    }
    return made;
  }

  /** The end of a long path, which names the image, as Python writes it. */
  const endOfPath = (path) => (path.split("/").length > 3 ? `…/${path.split("/").slice(-2).join("/")}` : path);

  function words(i) {
    const lines = [element("p", "says", element("b", "", shown(sure[i])), " ", name(data.classes[predicted[i]]))];
    if (label[i] !== predicted[i]) {
      lines.push(element("p", "is", "true: ", name(data.classes[label[i]]), ` (${shown(truth[i])})`));
    }
    lines.push(element("p", "name", name(endOfPath(data.names[i]))));
    if (data.groups && data.groups[i]) lines.push(element("p", "group", "group ", name(data.groups[i])));
    return lines;
  }

  function tile(i) {
    const made = element("li", "tile");
    const seen = picture(i);
    if (seen) made.append(seen);
    made.append(...words(i));
    made.title = data.names[i];
    made.dataset.image = i;
    if (seen && data.heat && data.heat[i]) made.tabIndex = 0; // A tap or the Tab key shows the map as the pointer does.
    return made;
  }

  /** Fill a list with images in chunks. The button adds the next chunk. */
  function gallery(list, more, images) {
    let done = 0;
    const next = () => {
      const part = images.slice(done, done + CHUNK);
      list.append(...part.map(tile));
      done += part.length;
      more.hidden = done >= images.length;
      more.textContent = `Show more (${grouped(images.length - done)} left)`;
    };
    list.replaceChildren();
    if (root.dataset.ready) list.scrollTop = 0; // Not during loading: this would force a layout of the whole page.
    more.onclick = next;
    next();
  }

  function setUpMatrix() {
    const matrix = $("matrix");
    const list = $("cell-gallery"), more = $("cell-more"), title = $("cell-title"), note = $("cell-note");
    let pressed = null;

    const press = (button) => {
      if (pressed) pressed.setAttribute("aria-pressed", "false");
      pressed = button;
      if (button) button.setAttribute("aria-pressed", "true");
    };
    const show = (t, p, count) => {
      const found = [];
      for (let i = 0; i < data.listed; i++) if (label[i] === t && predicted[i] === p) found.push(i);
      const right = t === p;
      title.replaceChildren(name(data.classes[t]), right ? ", predicted correctly" : " predicted as ", ...(right ? [] : [name(data.classes[p])]));
      const part = found.length < count ? `${grouped(found.length)} of ` : "";
      note.textContent = `${part}${counted(count, "image")}, ${right ? "the least confident" : "the most confident"} first. The number is the probability of the predicted class.`;
      gallery(list, more, found);
    };

    const buttons = [];
    for (const cell of matrix.querySelectorAll("td[data-true]")) {
      const t = Number(cell.dataset.true), p = Number(cell.dataset.predicted);
      const count = Number(cell.textContent.replaceAll(",", ""));
      const button = element("button", "", cell.textContent.trim());
      button.type = "button";
      button.tabIndex = buttons.length ? -1 : 0;
      button.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-label", `${data.classes[t]} ${t === p ? "predicted correctly" : `predicted as ${data.classes[p]}`}: ${counted(count, "image")}`);
      button.addEventListener("click", () => { press(button); show(t, p, count); });
      cell.replaceChildren(button);
      buttons.push(button);
    }

    // The Tab key stops once at the matrix; arrow keys move inside it and skip cells without images.
    matrix.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const cell = event.target.closest("td");
      if (!step || !cell) return;
      event.preventDefault();
      let row = cell.parentNode.sectionRowIndex, column = cell.cellIndex;
      for (;;) {
        row += step[0];
        column += step[1];
        const next = matrix.tBodies[0].rows[row] && matrix.tBodies[0].rows[row].cells[column];
        if (!next || next.tagName !== "TD") return;
        const button = next.querySelector("button");
        if (button) {
          buttons.forEach((each) => { each.tabIndex = -1; });
          button.tabIndex = 0;
          button.focus();
          return;
        }
      }
    });

    const all = $("all-mistakes");
    if (!all) return;
    const allMistakes = () => {
      press(null);
      const found = [];
      for (let i = 0; i < data.listed; i++) if (label[i] !== predicted[i]) found.push(i);
      title.textContent = "Most confident mistakes";
      note.textContent = `${counted(found.length, "mistake")}. The number is the probability of the predicted class.`;
      gallery(list, more, found);
    };
    all.addEventListener("click", allMistakes);
    allMistakes();
  }

  // ---------------------------------------------------------------------------------------------------------- threshold

  function setUpThreshold() {
    const facts = data.threshold;
    const all = unpack(facts.p, Float32Array);
    const range = $("t-range"), select = $("t-class"), mark = $("t-mark"), chosenButton = $("t-chosen"), startButton = $("t-start"), shareRange = $("t-share");
    let FAR = 17; // Beyond this logit, a float32 probability equals 0 or 1.
    let p, positive, chosen, start, isLogit, threshold = 0.5;

    // For a confident model the slider uses logits, which give a finer scale near 0 and 1.
    const fromSlider = () => {
      const value = Number(range.value);
      if (!isLogit) return value;
      return value <= -FAR ? 0 : value >= FAR ? 1 : 1 / (1 + Math.exp(-value));
    };
    const toSlider = (value) => (isLogit ? Math.max(-FAR, Math.min(FAR, Math.log(value / (1 - value)))) : value);

    const boxes = new Map(["roc", "pr"].map((each) => [$(each), $(each).dataset.box.split(" ").map(Number)]));
    const place = (plot, x, y) => {
      const [left, right, top, bottom] = boxes.get(plot);
      return [left + (right - left) * x, bottom - (bottom - top) * y];
    };
    const write = (plot, points) => {
      let last = "", path = "";
      for (const [x, y] of points) {
        const at = place(plot, x, y).map((value) => Math.round(10 * value) / 10).join(" ");
        if (at !== last) path += (path ? "L" : "M") + at;
        last = at;
      }
      return path;
    };

    function countAt(threshold) {
      const least = Math.fround(threshold);
      let tp = 0, fp = 0, positives = 0;
      for (let i = 0; i < p.length; i++) {
        const called = p[i] >= least;
        if (positive[i]) { positives++; if (called) tp++; } else if (called) fp++;
      }
      const fn = positives - tp, tn = p.length - positives - fp;
      const share = (part, rest) => (part + rest ? part / (part + rest) : null);
      const recall = share(tp, fn), specificity = share(tn, fp);
      const uwa = recall === null || specificity === null ? recall : (recall + specificity) / 2;
      return { tp, fn, fp, tn, recall, specificity, precision: positives ? share(tp, fp) : null, uwa };
    }

    /** Say how many alarms there are at another share of the class, and how many of them are real. */
    function inUse(at) {
      const share = 10 ** Number(shareRange.value);
      const every = 1 / share < 10 ? Math.round(10 / share) / 10 : Number((1 / share).toPrecision(2));
      $("t-share-value").textContent = `1 in ${grouped(every)}`;
      if (at.recall === null || at.specificity === null) { $("t-use").textContent = ""; return; }
      // Wilson's intervals of recall and false alarms, combined by their squares.
      const parts = [[at.tp, at.fn, 1 / every], [at.fp, at.tn, 1 - 1 / every]].map(([yes, no, weight]) => {
        const n = yes + no, z = 1.959964, middle = (yes + (z * z) / 2) / (n + z * z);
        const half = (z / (n + z * z)) * Math.sqrt((yes * no) / n + (z * z) / 4);
        return { value: weight * (yes / n), below: weight * (yes / n - middle + half), above: weight * (middle + half - yes / n) };
      });
      const alarms = parts[0].value + parts[1].value;
      const far = (side) => Math.hypot(parts[0][side], parts[1][side]);
      const per = (value) => { const n = 1000 * Math.max(value, 0); return grouped(n < 10 ? Math.round(10 * n) / 10 : Math.round(n)); };
      const real = alarms ? parts[0].value / alarms : null;
      const words = real === null ? "" : real > 0.5 ? `, ${Math.round(100 * real)} % of them real` : `, 1 real in ${grouped(Number((1 / real).toPrecision(2)))}`;
      $("t-use").textContent = `At 1 in ${grouped(every)}: ${per(alarms)} alarms per 1,000 images (${per(alarms - far("below"))} to ${per(alarms + far("above"))})${words}`;
      shareRange.setAttribute("aria-valuetext", $("t-use").textContent);
    }

    const folds = facts.folds ? unpack(facts.folds, Uint16Array) : null;
    const GRID = 401; // As in thresholds.py.

    /** The curves of all images, or the means of those of the folds, whose scores do not rank together. */
    function curves() {
      const every = Array.from(p.keys());
      if (!folds) return curvesOf(every);
      const parts = new Map();
      for (const i of every) {
        if (!parts.has(folds[i])) parts.set(folds[i], []);
        parts.get(folds[i]).push(i);
      }
      const known = Array.from(parts.values()).map((rows) => ({ rows, curves: curvesOf(rows) })).filter((part) => part.curves[0].length);
      if (!known.length) return curvesOf(every);
      const weigh = (part) => part.rows.reduce((sum, i) => sum + positive[i], 0);
      const first = [[0, 0]], second = [];
      let pairs = 0, images = 0;
      for (const part of known) {
        part.images = weigh(part);
        part.pairs = part.images * (part.rows.length - part.images);
        pairs += part.pairs;
        images += part.images;
      }
      for (let k = 0; k < GRID; k++) {
        const x = k / (GRID - 1);
        let recall = 0, precision = 0;
        for (const { curves: [roc, pr], pairs: weight, images: number } of known) {
          recall += weight * roc.findLast((point) => point[0] <= x + 1e-12)[1];
          precision += number * (pr.find((point) => point[0] >= x - 1e-12) || pr[pr.length - 1])[1];
        }
        first.push([x, recall / pairs]);
        second.push([x, precision / images]);
      }
      return [first, second];
    }

    function curvesOf(rows) {
      const order = rows.sort((a, b) => p[b] - p[a]);
      const positives = rows.reduce((sum, i) => sum + positive[i], 0), others = rows.length - positives;
      const roc = [[0, 0]], pr = [];
      if (!positives || !others) return [[], []];
      let tp = 0, fp = 0;
      order.forEach((i, k) => {
        if (positive[i]) tp++; else fp++;
        if (k + 1 < order.length && p[order[k + 1]] === p[i]) return;
        roc.push([fp / others, tp / positives]);
        pr.push([tp / positives, tp / (tp + fp)]);
      });
      return [roc, pr];
    }

    function put(identity, plot, x, y) {
      const point = $(identity);
      point.classList.toggle("away", x === null || y === null);
      if (x === null || y === null) return;
      const [left, top] = place(plot, x, y);
      if (point.tagName === "circle") {
        point.setAttribute("cx", left);
        point.setAttribute("cy", top);
      } else {
        point.setAttribute("transform", `translate(${left} ${top})`);
      }
    }

    function putBoth(kind, at) {
      put(`roc-${kind}`, $("roc"), at.specificity === null || at.recall === null ? null : 1 - at.specificity, at.recall);
      put(`pr-${kind}`, $("pr"), at.recall, at.precision);
    }

    function set(value) {
      threshold = value;
      range.value = toSlider(value);
      move();
    }

    function move() {
      const at = countAt(threshold);
      $("t-value").textContent = probability(threshold);
      const name = data.classes[facts.classes[facts.classes.indexOf(Number(select.value))]];
      $("t-decide").textContent = `--decide 'threshold:${name}=${Number(threshold.toPrecision(6))}'`;
      range.dataset.threshold = threshold;
      for (const key of ["recall", "precision", "specificity", "uwa"]) $(`t-${key}`).textContent = shown(at[key]);
      for (const key of ["tp", "fn", "fp", "tn"]) $(`t-${key}`).textContent = grouped(at[key]);
      $("t-found-bar").setAttribute("width", 100 * (at.recall || 0));
      $("t-alone-bar").setAttribute("width", 100 * (at.specificity || 0));
      putBoth("now", at);
      inUse(at);
      range.setAttribute("aria-valuetext", `${probability(threshold)}: recall ${shown(at.recall)}, precision ${shown(at.precision)}, specificity ${shown(at.specificity)}`);
    }

    function choose() {
      const index = facts.classes.indexOf(Number(select.value));
      p = all.subarray(index * data.images, (index + 1) * data.images);
      positive = label.map((each) => (each === facts.classes[index] ? 1 : 0));
      chosen = facts.chosen[index];
      start = facts.start[index];
      startButton.hidden = start === null || start === 0.5;
      if (start !== null) threshold = start;
      isLogit = facts.logit[index];
      // The scale ends where the probabilities do, so that no part of it is empty.
      const known = Array.from(p).filter((each) => each > 0 && each < 1).map((each) => Math.abs(Math.log(each / (1 - each))));
      FAR = Math.min(17, Math.ceil(known.reduce((a, b) => Math.max(a, b), 1)) + 1);
      $("t-ends").hidden = !isLogit;
      [range.min, range.max, range.step] = isLogit ? [-FAR, FAR, 0.02] : [0, 1, 0.001];
      mark.hidden = chosenButton.hidden = chosen === null;
      $("t-no-choice").hidden = chosen !== null || !$("t-no-choice").textContent;
      $("t-auroc").textContent = shown(facts.auroc[index]);
      $("t-average").textContent = shown(facts.average_precision[index]);
      const [roc, pr] = curves();
      const positives = positive.reduce((a, b) => a + b, 0), hasBoth = positives > 0 && positives < p.length;
      $("t-found-box").hidden = !positives;
      $("t-curves").hidden = $("t-share-box").hidden = !hasBoth; // Images of one kind have no curves.
      $("roc-line").setAttribute("d", write($("roc"), roc));
      $("pr-line").setAttribute("d", write($("pr"), pr));
      const share = positives / p.length;
      $("pr-reference").setAttribute("d", write($("pr"), [[0, share], [1, share]]));
      $("roc").setAttribute("aria-label", `ROC curve of ${data.classes[facts.classes[index]]}`);
      $("pr").setAttribute("aria-label", `Precision-recall curve of ${data.classes[facts.classes[index]]}`);
      if (chosen === null) {
        for (const plot of ["roc", "pr"]) put(`${plot}-chosen`, $(plot), null, null);
      } else {
        // The middle of the thumb stays half a thumb width away from both ends of the slider.
        mark.style.left = `calc(${(toSlider(chosen) - range.min) / (range.max - range.min)} * (100% - 16px) + 8px)`;
        chosenButton.textContent = `◇ ${probability(chosen)} (validation threshold)`;
        putBoth("chosen", countAt(chosen));
      }
      shareRange.value = Math.log10(Math.max(share, 1e-4));
      set(threshold);
    }

    shareRange.addEventListener("input", move);
    select.addEventListener("change", choose);
    range.addEventListener("input", () => { threshold = fromSlider(); move(); });
    $("t-half").addEventListener("click", () => set(0.5));
    startButton.addEventListener("click", () => set(start));
    chosenButton.addEventListener("click", () => set(chosen));
    choose();
  }

  // ---------------------------------------------------------------------------------------------------- map of features

  function setUpMap() {
    const map = $("map"), tip = $("map-tip"), near = $("map-near"), brush = $("map-brush"), boxElement = $("map-box");
    const { width, height } = map.viewBox.baseVal;
    const kinds = {};
    for (const kind of Object.keys(data.map.places)) kinds[kind] = unpack(data.map.places[kind], Uint16Array);
    let places = Object.values(kinds)[0], picked = [], cursor = null, from = null, isSelecting = false;
    const NONE = 65535;
    const x = (i) => (places[2 * i] / 10000) * width;
    const y = (i) => (places[2 * i + 1] / 10000) * height;
    const onMap = (i) => places[2 * i] !== NONE;
    const at = (event) => {
      const rect = map.getBoundingClientRect();
      return [((event.clientX - rect.left) / rect.width) * width, ((event.clientY - rect.top) / rect.height) * height];
    };
    const round = (value) => Math.round(10 * value) / 10;

    function nearest([px, py], most) {
      let best = null, least = most * most;
      for (let i = 0; i < data.listed; i++) {
        if (!onMap(i)) continue;
        const distance = (x(i) - px) ** 2 + (y(i) - py) ** 2;
        if (distance < least) { least = distance; best = i; }
      }
      return best;
    }

    function showTip(i) {
      tip.hidden = i === null;
      near.classList.toggle("away", i === null);
      if (i === null) return;
      near.setAttribute("cx", x(i));
      near.setAttribute("cy", y(i));
      const seen = picture(i);
      tip.replaceChildren(...(seen ? [seen] : []), element("div", "", ...words(i)));
      tip.dataset.image = i;
      const scale = map.getBoundingClientRect().width / width;
      const left = x(i) * scale, top = y(i) * scale;
      tip.style.left = `${Math.max(0, Math.min(left + 16, boxElement.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${top + 16 + tip.offsetHeight > boxElement.clientHeight ? Math.max(0, top - tip.offsetHeight - 16) : top + 16}px`;
    }

    function draw() {
      const dots = {};
      for (let i = 0; i < data.listed; i++) {
        if (!onMap(i)) continue;
        const mark = data.map.colours[label[i]], isRight = label[i] === predicted[i];
        const key = `.k${mark}.${isRight ? "good" : "bad"}`;
        (dots[key] = dots[key] || []).push(`M${round(x(i))} ${round(y(i))}${data.map.shapes[mark][isRight ? 0 : 1]}`);
      }
      for (const path of map.querySelectorAll(".point")) path.setAttribute("d", "");
      for (const key of Object.keys(dots)) map.querySelector(key).setAttribute("d", dots[key].join(""));
    }

    function list(images, heading) {
      picked = images;
      $("map-picked").setAttribute("d", images.map((i) => `M${round(x(i) - 5)} ${round(y(i))}a5 5 0 1 0 10 0a5 5 0 1 0-10 0`).join(""));
      $("map-panel").hidden = !images.length;
      if (!images.length) return;
      const wrong = images.filter((i) => label[i] !== predicted[i]).length;
      $("map-title").textContent = heading;
      const tally = new Map();
      for (const i of images) tally.set(label[i], (tally.get(label[i]) || 0) + 1);
      const parts = [...tally].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([c, n]) => `${grouped(n)} “${data.classes[c]}”`);
      $("map-count").textContent = `${counted(images.length, "image")} (${parts.join(", ")}${tally.size > 4 ? " and others" : ""}), ${counted(wrong, "mistake")}.`;
      gallery($("map-gallery"), $("map-more"), images);
    }

    const clear = () => { list([], ""); showTip(null); cursor = null; };

    map.addEventListener("pointermove", (event) => {
      const here = at(event);
      if (!from) { showTip(nearest(here, 14)); return; }
      const [left, right] = [from[0], here[0]].sort((a, b) => a - b), [top, bottom] = [from[1], here[1]].sort((a, b) => a - b);
      brush.classList.remove("away");
      for (const [key, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top })) brush.setAttribute(key, value);
    });
    map.addEventListener("pointerleave", () => { if (!from) showTip(null); });
    map.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || (event.pointerType === "touch" && !isSelecting)) return; // A touch scrolls the page; a tap becomes a click.
      from = at(event);
      map.setPointerCapture(event.pointerId);
      showTip(null);
      event.preventDefault();
      map.focus({ preventScroll: true });
    });
    map.addEventListener("pointerup", (event) => {
      if (!from) return;
      const [a, b] = from, [c, d] = at(event);
      from = null;
      brush.classList.add("away");
      if (Math.hypot(a - c, b - d) < 4) { one([c, d]); return; }
      const found = [];
      for (let i = 0; i < data.listed; i++) {
        if (onMap(i) && (x(i) - a) * (x(i) - c) <= 0 && (y(i) - b) * (y(i) - d) <= 0) found.push(i);
      }
      list(found, "Images in the frame");
    });
    map.addEventListener("pointercancel", () => { from = null; brush.classList.add("away"); });
    map.addEventListener("click", (event) => { if (event.pointerType === "touch" && !isSelecting) one(at(event)); });
    const select = $("map-select");
    select.addEventListener("click", () => {
      isSelecting = !isSelecting;
      select.setAttribute("aria-pressed", isSelecting);
      map.classList.toggle("selecting", isSelecting);
    });

    function one(here) {
      const i = nearest(here, 20);
      if (i === null) { clear(); return; }
      list([i], "One image");
      showTip(i);
    }

    map.tabIndex = 0;
    map.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
      if (event.key === "Escape") { clear(); return; }
      if (step) {
        event.preventDefault();
        const far = event.shiftKey ? 60 : 15;
        const [px, py] = cursor || [width / 2 - step[0] * far, height / 2 - step[1] * far];
        cursor = [Math.min(width, Math.max(0, px + step[0] * far)), Math.min(height, Math.max(0, py + step[1] * far))];
        showTip(nearest(cursor, Infinity));
      } else if (event.key === "Enter" && cursor) {
        const distance = (i) => (x(i) - cursor[0]) ** 2 + (y(i) - cursor[1]) ** 2;
        const all = Array.from({ length: data.listed }, (_, i) => i).filter(onMap);
        list(all.sort((i, j) => distance(i) - distance(j)).slice(0, 24), "Nearest images");
      }
    });
    $("map-clear").addEventListener("click", clear);
    for (const radio of document.querySelectorAll("input[name=map-by]")) {
      radio.addEventListener("change", () => {
        map.dataset.by = radio.value;
        for (const by of ["class", "mistake"]) $(`legend-${by}`).hidden = by !== radio.value;
      });
    }
    for (const radio of document.querySelectorAll("input[name=map-kind]")) {
      radio.addEventListener("change", () => {
        places = kinds[radio.value];
        $("map-note").textContent = data.map.notes[radio.value];
        showTip(null);
        draw();
        list(picked.filter(onMap), $("map-title").textContent);
      });
    }
  }

  // ------------------------------------------------------------------------------------------------------------- sweeps

  function setUpChoices() {
    const blocks = [...document.querySelectorAll(".one-of")];
    const splits = new Set(blocks.map((block) => block.dataset.split).filter(Boolean));
    $("split-choice").hidden = splits.size < 2;
    const show = () => {
      const shown = new Set([...document.querySelectorAll("input[name^=show-]:checked")].map((input) => input.value));
      if (splits.size === 1) shown.add([...splits][0]);
      for (const block of blocks) block.hidden = !Object.values(block.dataset).every((value) => shown.has(value));
    };
    document.addEventListener("change", show);
    show();
  }

  setUpTheme();
  setUpCopying();
  setUpSorting();
  if (data.kind === "run" && data.names) {
    label = unpack(data.label, Uint16Array);
    predicted = unpack(data.predicted, Uint16Array);
    sure = unpack(data.sure, Float32Array);
    truth = unpack(data.truth, Float32Array);
    missing = new Set(data.pictures ? data.pictures.missing : []);
    setUpMatrix();
    setUpThreshold();
    if (data.map) setUpMap();
  }
  if (data.kind === "sweep" && $("choices")) setUpChoices();
  root.dataset.ready = "true";
})();
