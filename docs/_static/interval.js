// Wilson's interval of 95 %, as lopsided.evaluation.intervals.share_interval computes it.
(() => {
  const z2 = 1.959963984540054 ** 2;
  const [rare, found, output] = ["rare", "found", "interval"].map((id) => document.getElementById(id));
  const show = () => {
    const n = Math.floor(Number(rare.value)), k = Math.floor(Number(found.value));
    if (!(n >= 1) || !(k >= 0) || k > n) {
      output.textContent = "The number found must lie between 0 and the number of images.";
      return;
    }
    const share = k / n, centre = (share + z2 / (2 * n)) / (1 + z2 / n);
    const half = Math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n);
    const percent = (x) => (100 * Math.min(Math.max(x, 0), 1)).toFixed(1);
    const low = Math.min(centre - half, share), high = Math.max(centre + half, share);
    output.textContent = `recall ${percent(share)} %, 95 % interval ${percent(low)} to ${percent(high)} %`;
  };
  rare.addEventListener("input", show);
  found.addEventListener("input", show);
  show();
})();
