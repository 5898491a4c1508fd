// Train again with the marks, compare old and new on the same images, and choose which run answers.
(function () {
  "use strict";

  const { $, element, name, grouped, counted, ask, post, shown } = lopsided;
  const EVERY = 1000;
  let isOn = false, timer = null, compared = "";

  function complain(error) {
    $("refit-error").hidden = !error;
    $("refit-error").textContent = error ? error.message : "";
  }

  const figure = ({ value, low, high }) => (value === null ? "–" : low === null ? shown(value) : `${value.toFixed(2)} [${low.toFixed(2)}, ${high.toFixed(2)}]`);
  const change = (pair, write) => (pair[0] === pair[1] ? write(pair[0]) : `${write(pair[0])} → ${write(pair[1])}`);

  async function compare(status) {
    const finished = status.runs.filter((run) => run.finished);
    if (finished.length < 2) return;
    const now = finished.find((run) => run.current) || finished[0];
    const last = finished[finished.length - 1];
    const [older, newer] = now.id === last.id ? [finished[finished.length - 2], last] : [now, last].sort((a, b) => a.id - b.id);
    const both = `${older.id}-${newer.id}`;
    if (both === compared) return;
    const found = await post("/v1/compare", { old: older.id, new: newer.id });
    compared = both;
    $("compared").hidden = false;
    $("compared-words").textContent = `${found.words.replaceAll("->", "→")}.`;
    const corrected = found.corrected ? ` ${counted(found.corrected, "label")} of them ${found.corrected === 1 ? "is" : "are"} corrected; the new labels count for both.` : "";
    $("compared-table").caption.textContent = `${older.name} → ${newer.name}, on the same ${counted(found.images, "image")}, each tested by models that were not trained on it.${corrected}`;
    $("compared-note").textContent = `Balanced accuracy ${found.balanced_accuracy.map(figure).join(" → ")}. If the two columns in the middle differ by few images, the difference may be chance.`;
    const rows = found.per_class.map((row) => {
      const head = element("th", "", name(row.label));
      head.scope = "row";
      const cells = [change(row.trained, grouped), grouped(row.images), change(row.found, grouped), row.recall.map(figure).join(" → "), grouped(row.gained), grouped(row.lost), change(row.false_alarms, grouped)];
      return element("tr", "", head, ...cells.map((text) => element("td", "number", text)));
    });
    $("compared-table").tBodies[0].replaceChildren(...rows);
  }

  function list(status) {
    $("runs").replaceChildren(...status.runs.map((run) => {
      const row = element("li", "", element("b", "", name(run.name)), run.current ? " answers now. " : " ", ...run.headlines.map((line) => element("span", "aside", `${line}. `)));
      if (!run.finished) row.append(element("span", "aside", "Not finished. "));
      if (run.finished && !run.current) {
        const button = element("button", "quiet", "Use this run");
        button.type = "button";
        button.setAttribute("aria-label", `Use this run: ${run.name}`);
        button.addEventListener("click", () => use(run.id, button));
        row.append(button);
      }
      return row;
    }));
  }

  async function show(status) {
    const isRunning = status.state === "running";
    $("refit-start").disabled = isRunning;
    $("refit-start").textContent = status.state === "stopped" ? "Continue the training" : "Train with the marks";
    $("refit-progress").hidden = !["running", "stopped", "failed"].includes(status.state);
    $("refit-bar").hidden = !isRunning;
    if (isRunning) {
      $("refit-state").textContent = `Training: ${grouped(status.done)} of ${counted(status.total, "model")} finished.`;
      $("refit-bar").max = status.total;
      $("refit-bar").value = status.done;
    } else {
      $("refit-state").textContent = status.state === "failed" ? "The training failed." : "The training stopped before its end.";
    }
    $("refit-words").textContent = status.words || "";
    list(status);
    await compare(status);
    clearTimeout(timer);
    if (isOn && isRunning) timer = setTimeout(look, EVERY);
  }

  async function look() {
    try { await show(await ask("/v1/runs")); } catch (error) { complain(error); }
  }

  async function start() {
    complain(null);
    $("refit-start").disabled = true;
    try { await show(await post("/v1/refit", {})); } catch (error) { complain(error); $("refit-start").disabled = false; }
  }

  async function use(id, button) {
    complain(null);
    button.disabled = true;
    button.textContent = "Opening …";
    try {
      await post("/v1/use", { run: id });
      location.reload(); // The other tabs show the model, too.
    } catch (error) { complain(error); button.disabled = false; }
  }

  $("refit-start").addEventListener("click", start);
  document.addEventListener("lopsided-tab", (event) => {
    isOn = event.detail === "refit";
    clearTimeout(timer);
    if (isOn) look();
  });
})();
