// call.mjs URL: makes the calls over gRPC-web with the token of $CARREL_TOKEN and prints the answers as JSON.
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { bearer, callAll } from "./call.js";

const baseUrl = process.argv[2];
if (baseUrl === undefined) {
  console.error("usage: CARREL_TOKEN=... node call.mjs URL");
  process.exit(2);
}
const transport = (token: string) => createGrpcWebTransport({ baseUrl, defaultTimeoutMs: 30_000, interceptors: [bearer(token)] });
console.log(JSON.stringify(await callAll(transport(process.env["CARREL_TOKEN"] ?? ""), transport(""))));
process.exit(0); // fetch keeps idle connections for seconds
