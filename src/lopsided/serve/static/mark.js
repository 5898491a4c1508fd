// Mark images by keyboard. Each mark is on the disk of the server before the next image comes.
(function () {
  "use strict";

  const { $, element, name, grouped, counted, post, ask, percent, onKeys, data } = lopsided;
  const { model, orders } = data;
  const AHEAD = 6; // Images that are fetched before they are needed.
  const MOST_KEYS = 9;
  let queue = [], here = null, isBusy = false, isOn = false, asked = 0, answered = 0, timer = null;

  const keep = (key, value) => { try { localStorage.setItem(key, value); } catch (refused) { /* No storage. */ } };
  const kept = (key) => { try { return localStorage.getItem(key) || ""; } catch (refused) { return ""; } };
  const session = (() => {
    const made = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    try {
      if (!sessionStorage.getItem("lopsided-session")) sessionStorage.setItem("lopsided-session", made);
      return sessionStorage.getItem("lopsided-session");
    } catch (refused) { return made; }
  })();
  const who = () => $("who").value.trim();
  const wanted = () => $("mark-class").value;
  const question = (item) => (item.task === "labels" ? item.label : wanted());

  function complain(error) {
    $("mark-error").hidden = !error;
    $("mark-error").textContent = error ? error.message : "";
  }

  function tell({ pool, left, counts }) {
    const reading = pool.done < pool.total ? `${grouped(pool.done)} of ${grouped(pool.total)} images of the pool are read. ` : "";
    const people = Object.entries(counts.by_person).map(([each, number]) => `${each} ${grouped(number)}`).join(", ");
    const by = people ? ` (${people})` : "";
    $("pool-status").textContent = `${reading}${counted(counts.marks, "mark")} so far${by}; ${counted(left.pool, "image")} of the pool and ${counted(left.labels, "label")} of the run are left.`;
    lopsided.counts = counts;
    const order = orders.find((each) => each.name === $("order").value);
    const none = order.task === "pool" && !pool.total;
    const words = !who() ? "Type your name and press Enter: the first image comes." : none ? "There is no pool. Start the server with one: lopsided serve RUN POOL." : pool.done < pool.total && order.task === "pool" ? "The pool is being read …" : "Nothing is left to mark here.";
    $("nothing").textContent = words;
    if (!here && pool.done < pool.total && isOn) { clearTimeout(timer); timer = setTimeout(fill, 700); }
  }

  function show() {
    here = queue.length ? queue[0] : null;
    $("looker").hidden = !here;
    $("nothing").hidden = Boolean(here);
    if (!here) { $("question").textContent = "Mark images"; return; }
    const label = question(here);
    $("question").replaceChildren("Is this ", name(label), "?");
    $("mark-picture").src = `/images/${here.id}`;
    $("mark-picture").alt = here.name;
    const facts = { File: name(here.name) };
    facts[`Probability of ${label}`] = percent(here.probabilities[label]);
    if (here.task === "labels") { facts["Labelled as"] = name(here.label); facts["Looks like"] = name(here.suggested); } else facts["The model says"] = name(here.predicted);
    if (here.typicality !== undefined) facts.Typicality = percent(here.typicality);
    $("mark-facts").replaceChildren(...Object.entries(facts).flatMap(([key, value]) => [element("dt", "", key), element("dd", "", value)]));
    const other = here.task === "labels" ? here.suggested : model.classes.length === 2 ? model.classes.find((each) => each !== label) : "";
    $("mark-no").replaceChildren(other ? `No, ${other} ` : "No ", element("kbd", "", "n"));
    $("others").hidden = model.classes.length < 3;
    for (const button of $("other-classes").children) button.hidden = button.dataset.label === label;
    for (const next of queue.slice(1, 4)) new Image().src = `/images/${next.id}`;
  }

  async function fill() {
    const own = ++asked;
    if (!who() || !isOn) { answered = own; show(); return; }
    try {
      const found = await post("/v1/queue", { who: who(), session, order: $("order").value, label: wanted(), number: AHEAD });
      if (own !== asked) return;
      answered = own;
      const first = here && queue.length && found.images.some((each) => each.id === here.id) ? here.id : null;
      queue = found.images;
      if (first) queue.sort((a, b) => (b.id === first) - (a.id === first)); // The image that somebody looks at stays.
      complain(null);
      show();
      tell(found);
    } catch (error) { if (own === asked) { answered = own; complain(error); } }
  }

  const leave = (item) => { queue = queue.filter((each) => each.id !== item.id); };

  function settle(found) {
    show();
    tell(found);
    if (queue.length < 3 || asked !== answered) fill(); // A queue that was asked for before this mark is out of date.
  }

  async function give(mark, label = "") {
    if (!here || isBusy) return;
    isBusy = true;
    const item = here;
    try {
      const found = await post("/v1/marks", { who: who(), session, id: item.id, task: item.task, mark, asked: question(item), label });
      complain(null);
      leave(item);
      const said = { yes: `yes, ${question(item)}`, no: label ? label : "no", skip: "skipped" }[mark];
      $("mark-said").textContent = `Saved: ${said}.`;
      settle(found);
    } catch (error) {
      complain(error);
      if (error.status === 409 || error.status === 404) { leave(item); show(); fill(); }
    } finally { isBusy = false; }
  }

  async function undo() {
    if (isBusy || !who()) return;
    isBusy = true;
    try {
      const found = await post("/v1/undo", { who: who(), session });
      complain(null);
      if (found.image) queue = [found.image, ...queue.filter((each) => each.id !== found.image.id)];
      $("mark-said").textContent = "The last mark is undone.";
      settle(found);
    } catch (error) { complain(error); } finally { isBusy = false; }
  }

  function setUp() {
    for (const each of orders) $("order").append(new Option(each.words, each.name));
    for (const each of model.classes) $("mark-class").append(new Option(each, each));
    $("mark-class").value = model.rarest;
    if (orders.some((each) => each.name === kept("lopsided-order"))) $("order").value = kept("lopsided-order");
    else if (!data.pool) $("order").value = "doubtful";
    $("who").value = kept("lopsided-who");
    $("who").addEventListener("change", () => { keep("lopsided-who", who()); fill(); });
    $("order").addEventListener("change", () => { keep("lopsided-order", $("order").value); here = null; fill(); });
    $("mark-class").addEventListener("change", () => { here = null; fill(); });
    // After a name or a click on a menu, keys mark again; with Tab one stays where one is.
    $("who").addEventListener("keydown", (event) => { if (event.key === "Enter") $("who").blur(); });
    for (const id of ["order", "mark-class"]) $(id).addEventListener("change", () => { if (!$(id).matches(":focus-visible")) $(id).blur(); });
    const KEYS = { y: () => give("yes"), n: () => give("no"), s: () => give("skip"), u: undo };
    model.classes.forEach((label, place) => {
      const button = element("button", "", name(label));
      button.type = "button";
      button.dataset.label = label;
      const choose = () => { if (here) give(question(here) === label ? "yes" : "no", question(here) === label ? "" : label); };
      if (place < MOST_KEYS) { button.append(element("kbd", "", String(place + 1))); KEYS[String(place + 1)] = choose; }
      button.addEventListener("click", choose);
      $("other-classes").append(button);
    });
    $("mark-yes").addEventListener("click", KEYS.y);
    $("mark-no").addEventListener("click", KEYS.n);
    $("mark-skip").addEventListener("click", KEYS.s);
    $("mark-undo").addEventListener("click", undo);
    onKeys(KEYS, () => isOn);
    document.addEventListener("lopsided-tab", (event) => {
      isOn = event.detail === "mark";
      if (!isOn) return;
      if (who()) fill(); else { $("who").focus(); ask("/v1/marks").then(tell, complain); show(); }
    });
  }

  setUp();
})();
