// What the pages of reports and of the server have in common. Names from the data are inserted as text nodes only.
const lopsided = (function () {
  "use strict";

  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  root.classList.add("js");

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children);
    return made;
  }

  /** Return a name that may be broken after punctuation, as the names that Python wrote. */
  const name = (text) => {
    const parts = text.split(/(?<=[_/.-])(?=[^_/.\s-])/);
    return element("bdi", "", ...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
  };
  /** Write three digits. Ties round to even, as in the rest of the page, which Python wrote. */
  const shown = (value) => {
    if (value === null) return "–";
    const isBetween = (value * 16) % 1 === 0 && (value * 1000) % 1 === 0.5; // Only multiples of 1/16 can be ties.
    return (isBetween ? (2 * Math.round((value * 1000) / 2)) / 1000 : value).toFixed(3);
  };
  /** Write a threshold, with more digits near 0 and 1. */
  const probability = (value) => {
    const rest = Math.min(value, 1 - value);
    if (rest >= 0.0095 || Number(value.toFixed(3)) === value) return shown(value);
    const digits = 1 - Math.floor(Math.log10(rest));
    return digits > 9 && value < 0.5 ? value.toExponential(1) : value.toFixed(Math.min(Math.max(digits, 3), 9));
  };
  const { format: grouped } = new Intl.NumberFormat("en-US");
  const counted = (n, thing) => `${grouped(n)} ${thing}${n === 1 ? "" : "s"}`;

  function setUpTheme() {
    const button = $("theme");
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
    try {
      const kept = localStorage.getItem("lopsided-theme");
      if (kept === "dark" || kept === "light") root.dataset.theme = kept;
    } catch (refused) { /* A page opened from a file may have no storage. */ }
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try { localStorage.setItem("lopsided-theme", root.dataset.theme); } catch (refused) { /* No storage. */ }
      label();
    });
    system.addEventListener("change", label);
    label();
  }

  function copyBySelection(source) {
    const range = document.createRange();
    range.selectNodeContents(source);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    return document.execCommand("copy");
  }

  function setUpCopying() {
    for (const button of document.querySelectorAll("button[data-copy]")) {
      const source = $(button.dataset.copy);
      const tell = (done) => {
        button.textContent = done ? "Copied" : "Press Ctrl+C to copy";
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      };
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(source.textContent);
          tell(true);
        } catch (refused) {
          tell(copyBySelection(source));
        }
      });
    }
  }

  /** Call the functions of keys, unless somebody types a text. Marks are not repeated while a key is held down. */
  function onKeys(keys, isOn = () => true) {
    document.addEventListener("keydown", (event) => {
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      const isText = event.target.closest && event.target.closest("input:not([type=radio]):not([type=checkbox]), select, textarea");
      if (event.ctrlKey || event.metaKey || event.altKey || isText || (event.repeat && key.length === 1) || !keys[key] || !isOn()) return;
      event.preventDefault();
      keys[key]();
    });
  }

  return { root, $, element, name, shown, probability, grouped, counted, setUpTheme, setUpCopying, onKeys };
})();
