// The calls against a server in memory: the generated code and the pinned runtime fit each other.
import assert from "node:assert/strict";
import test from "node:test";
import { Code, ConnectError, createRouterTransport } from "@connectrpc/connect";
import { AuthService } from "../../../gen/ts/carrel/v1/auth_service_pb.js";
import { WorkspaceService } from "../../../gen/ts/carrel/v1/workspace_service_pb.js";
import { bearer, callAll } from "./call.js";

const router = (token: string) =>
  createRouterTransport(
    ({ service }) => {
      service(AuthService, {
        whoAmI(_, context) {
          if (context.requestHeader.get("Authorization") !== "Bearer carrel_x") {
            throw new ConnectError("sign in first", Code.Unauthenticated);
          }
          return { user: { name: "ana" } };
        },
      });
      service(WorkspaceService, {
        list: () => ({ workspaces: [{ name: "demo" }] }),
        async *watch() {
          yield { workspace: { name: "demo" } };
          yield {};
          throw new Error("read beyond the first picture");
        },
      });
    },
    { transport: { interceptors: [bearer(token)] } },
  );

test("calls carry the token, lists and first pictures are read, codes are words", async () => {
  assert.deepEqual(await callAll(router("carrel_x"), router("")), {
    user: "ana",
    workspaces: ["demo"],
    watched: ["demo"],
    anonymous: "Unauthenticated",
  });
});
