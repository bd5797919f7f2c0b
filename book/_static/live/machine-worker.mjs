// Runs flashlib.machine in Pyodide for the figure `machine`: takes the arguments of bench.answer, posts what it says.
import { loadPyodide } from '../pyodide/pyodide.mjs';

const file = name => new URL(`../pyodide/${name}`, import.meta.url);
const started = (async () => {
  const library = fetch(file('flashlib.zip')).then(answer => answer.arrayBuffer());
  const python = await loadPyodide({ indexURL: file('').href });
  python.unpackArchive(await library, 'zip');
  return python.pyimport('bench').answer;
})();

addEventListener('message', async ({ data }) => {
  try {
    const answer = await started;
    postMessage(JSON.parse(answer(...data)));
  } catch (error) {
    postMessage({ failed: String(error.message || error).trim().split('\n').pop() });
  }
});
