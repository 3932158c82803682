// What the real Mermaid understands of diagrams: a JSON list of texts comes in, what each says goes out.
import { readFileSync } from "fs";
import { createRequire } from "module";
import { pathToFileURL } from "url";

const require = createRequire(pathToFileURL(process.argv[2] + "/"));
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const { JSDOM } = await load("jsdom");
globalThis.window = new JSDOM("").window;
globalThis.document = globalThis.window.document;
const mermaid = (await load("mermaid")).default;

const found = [];
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
  try {
    await mermaid.parse(text);
    const { type, db } = await mermaid.mermaidAPI.getDiagramFromText(text);
    const nodes = [...db.getVertices().values()].map((node) => [node.id, node.text]);
    found.push({ type, nodes, edges: db.getEdges().map((edge) => [edge.start, edge.end]) });
  } catch (error) {
    found.push({ error: String(error) });
  }
}
console.log(JSON.stringify(found));
