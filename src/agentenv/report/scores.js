// Scores and axes, as every part of the page draws them.
const parsed = (id) => JSON.parse(byId(id).textContent);

const [LOWEST, HIGHEST] = parsed("data-axis");

const scoreKind = (score) => (score === null ? "unscored" : score >= HIGHEST ? "full" : score <= LOWEST ? "none" : "part");
const onAxis = (score) => (score - LOWEST) / (HIGHEST - LOWEST || 1);
const scoreText = (score) => (score === null ? "–" : Number.isInteger(score) ? String(score) : score.toFixed(2));

// Multiples of 1, 2 or 5 times a power of ten: at most six of them, from 0 to the end.
function ticks(end) {
  const least = end / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least * (1 - 1e-9));
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => index * step);
}
