// The three calls that every protocol's test makes: a unary one, a list and a server stream.
import { Code, ConnectError, createClient, type Interceptor, type Transport } from "@connectrpc/connect";
import { AuthService } from "../../../gen/ts/carrel/v1/auth_service_pb.js";
import { WorkspaceService } from "../../../gen/ts/carrel/v1/workspace_service_pb.js";

/** What the gateway answered. */
export interface Answers {
  user: string;
  workspaces: string[];
  /** Workspaces of the stream's first picture. */
  watched: string[];
  /** Code of a call without a token, in words. */
  anonymous: string;
}

/** Puts the token into each call's header. */
export function bearer(token: string): Interceptor {
  return (next) => (req) => {
    if (token !== "") {
      req.header.set("Authorization", `Bearer ${token}`);
    }
    return next(req);
  };
}

/** Makes the calls; anonymous is a transport without a token. */
export async function callAll(signedIn: Transport, anonymous: Transport): Promise<Answers> {
  const { user } = await createClient(AuthService, signedIn).whoAmI({});
  const workspaces = createClient(WorkspaceService, signedIn);
  const listed = await workspaces.list({});
  return {
    user: user?.name ?? "",
    workspaces: listed.workspaces.map((w) => w.name),
    watched: await firstPicture(workspaces.watch({})),
    anonymous: await codeOf(createClient(AuthService, anonymous).whoAmI({})),
  };
}

/** Reads a Watch stream up to the message without a workspace, which ends the first picture. */
async function firstPicture(stream: AsyncIterable<{ workspace?: { name: string } | undefined }>): Promise<string[]> {
  const names: string[] = [];
  for await (const message of stream) {
    if (message.workspace === undefined) {
      break;
    }
    names.push(message.workspace.name);
  }
  return names;
}

async function codeOf(call: Promise<unknown>): Promise<string> {
  try {
    await call;
    return "ok";
  } catch (err) {
    return Code[ConnectError.from(err).code] ?? "unknown";
  }
}
