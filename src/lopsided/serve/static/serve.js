// The frame of the page: tabs, and requests to the server of the page. Nobody else is asked.
(function () {
  "use strict";

  const { root, $, element } = lopsided;
  const data = JSON.parse($("data").textContent) || {};

  /** Ask the server. The error of an answer that is none has the words of the server. */
  lopsided.ask = async function (path, options = {}) {
    let answer;
    try {
      answer = await fetch(path, { credentials: "same-origin", ...options });
    } catch (refused) {
      throw new Error("The server does not answer. Is it still running?");
    }
    const content = await answer.json().catch(() => ({}));
    if (answer.ok) return content;
    const error = new Error((content.error && content.error.message) || `The server answered ${answer.status}.`);
    error.status = answer.status;
    throw error;
  };
  lopsided.post = (path, content) =>
    lopsided.ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });
  lopsided.data = data;
  /** Write a share in per cent. */
  lopsided.percent = (value) => {
    const digits = value === 0 || value === 1 || (value >= 0.0995 && value <= 0.9) ? 0 : value > 0.999 || value < 0.001 ? 3 : 1;
    return `${(100 * value).toFixed(digits)} %`;
  };

  function setUpTabs() {
    const tabs = [...document.querySelectorAll(".tab")];
    const links = [...document.querySelectorAll(".bar nav a")];
    if (!tabs.length) return;
    const show = () => {
      const wanted = tabs.find((tab) => `#${tab.id}` === location.hash) || tabs[0];
      for (const tab of tabs) tab.hidden = tab !== wanted;
      for (const link of links) {
        if (link.hash === `#${wanted.id}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
      }
      document.dispatchEvent(new CustomEvent("lopsided-tab", { detail: wanted.id }));
      scrollTo(0, 0);
    };
    addEventListener("hashchange", show);
    show();
  }

  function setUpFacts() {
    if (!data.model || !$("model-facts")) return;
    $("address").textContent = location.origin;
    const facts = { Run: data.model.run, Encoder: data.model.encoder, Classes: data.model.classes.join(", "), Rule: data.model.decide_words, "SHA-256": data.model.sha256 };
    for (const [key, value] of Object.entries(facts)) $("model-facts").append(element("dt", "", key), element("dd", "", value));
  }

  lopsided.setUpTheme();
  lopsided.setUpCopying();
  setUpFacts();
  addEventListener("DOMContentLoaded", () => { setUpTabs(); root.dataset.ready = "true"; });
})();
