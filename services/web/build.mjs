// Bundles what Node runs in tests: dist/call.mjs (the gRPC-web client) and dist/call.test.mjs.
import { build } from "esbuild";
import { dirname } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));

// gen/ts has no node_modules of its own on a clean clone: its one import is always ours, so that there is one copy.
const oneProtobuf = {
  name: "one-protobuf",
  setup(b) {
    b.onResolve({ filter: /^@bufbuild\/protobuf/ }, (args) =>
      args.pluginData?.resolved ? undefined : b.resolve(args.path, { resolveDir: here, kind: args.kind, pluginData: { resolved: true } }),
    );
  },
};

await build({
  absWorkingDir: here,
  entryPoints: { call: "call/main.ts", "call.test": "call/call.test.ts" },
  outdir: process.argv[2] ?? "dist",
  outExtension: { ".js": ".mjs" },
  bundle: true,
  platform: "node",
  format: "esm",
  target: "node20",
  plugins: [oneProtobuf],
  logLevel: "warning",
});
