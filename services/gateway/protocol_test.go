package gateway_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

// TestOnePortServesAllProtocols makes the same three calls (a unary one, a list, a server stream) with a real client of each protocol.
func TestOnePortServesAllProtocols(t *testing.T) {
	t.Run("plain", func(t *testing.T) { allProtocols(t, start(t, "images.allow=any")) })
	t.Run("own CA", func(t *testing.T) { allProtocols(t, start(t, "images.allow=any", "listen=0.0.0.0:0")) })
}

func allProtocols(t *testing.T, r *rig) {
	r.join("h1")
	r.create(r.admin, "demo", true)
	t.Run("Connect", func(t *testing.T) { connectCalls(t, r) })
	t.Run("Connect client speaking gRPC-web", func(t *testing.T) { connectCalls(t, r, connect.WithGRPCWeb()) })
	t.Run("gRPC", func(t *testing.T) { grpcCalls(t, r) })
	t.Run("gRPC-web in Node", func(t *testing.T) { nodeCalls(t, r) })
}

func connectCalls(t *testing.T, r *rig, opts ...connect.ClientOption) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	me, err := carrelv1connect.NewAuthServiceClient(r.http, r.url, opts...).WhoAmI(ctx, with(r.admin, &carrelv1.WhoAmIRequest{}))
	if err != nil || me.Msg.GetUser().GetName() != "root-admin" {
		t.Fatalf("WhoAmI = %v, %v", me, err)
	}
	workspaces := carrelv1connect.NewWorkspaceServiceClient(r.http, r.url, opts...)
	list, err := workspaces.List(ctx, with(r.admin, &carrelv1.ListRequest{}))
	if err != nil || len(list.Msg.GetWorkspaces()) != 1 {
		t.Fatalf("List = %v, %v", list, err)
	}
	watch, err := workspaces.Watch(ctx, with(r.admin, &carrelv1.WatchRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	if !watch.Receive() || watch.Msg().GetWorkspace().GetName() != "demo" {
		t.Fatalf("Watch began with %v, %v", watch.Msg(), watch.Err())
	}
	_, err = carrelv1connect.NewAuthServiceClient(r.http, r.url, opts...).WhoAmI(ctx, with("", &carrelv1.WhoAmIRequest{}))
	if connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("without a token: %v", err)
	}
}

func grpcCalls(t *testing.T, r *rig) {
	transport := insecure.NewCredentials()
	if pem := r.g.CAPEM(); pem != nil {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(pem)
		transport = credentials.NewTLS(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})
	}
	_, address, _ := strings.Cut(r.url, "://")
	conn, err := grpc.NewClient("dns:///"+address, grpc.WithTransportCredentials(transport))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	anonymous, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ctx := metadata.AppendToOutgoingContext(anonymous, "authorization", "Bearer "+r.admin)

	var me carrelv1.WhoAmIResponse
	if err := conn.Invoke(ctx, "/carrel.v1.AuthService/WhoAmI", &carrelv1.WhoAmIRequest{}, &me); err != nil || me.GetUser().GetName() != "root-admin" {
		t.Fatalf("WhoAmI = %v, %v", &me, err)
	}
	var list carrelv1.ListResponse
	if err := conn.Invoke(ctx, "/carrel.v1.WorkspaceService/List", &carrelv1.ListRequest{}, &list); err != nil || len(list.GetWorkspaces()) != 1 {
		t.Fatalf("List = %v, %v", &list, err)
	}
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/carrel.v1.WorkspaceService/Watch")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(&carrelv1.WatchRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var first carrelv1.WatchResponse
	if err := stream.RecvMsg(&first); err != nil || first.GetWorkspace().GetName() != "demo" {
		t.Fatalf("Watch began with %v, %v", &first, err)
	}
	err = conn.Invoke(anonymous, "/carrel.v1.AuthService/WhoAmI", &carrelv1.WhoAmIRequest{}, &me)
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("without a token: %v", err)
	}
}

// nodeCalls runs connect-web's gRPC-web transport in Node against the same gateway.
func nodeCalls(t *testing.T, r *rig) {
	bundle := nodeBundle(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience) // a loaded machine takes seconds to start Node
	defer cancel()
	cmd := exec.CommandContext(ctx, "node", filepath.Join(bundle, "call.mjs"), r.url)
	cmd.Env = append(os.Environ(), "CARREL_TOKEN="+r.admin, "NODE_OPTIONS=")
	if pem := r.g.CAPEM(); pem != nil {
		ca := filepath.Join(t.TempDir(), "ca.pem")
		if err := os.WriteFile(ca, pem, 0o600); err != nil {
			t.Fatal(err)
		}
		cmd.Env = append(cmd.Env, "NODE_EXTRA_CA_CERTS="+ca)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("gRPC-web client in Node: %v\n%s", err, stderr.String())
	}
	const want = `{"user":"root-admin","workspaces":["demo"],"watched":["demo"],"anonymous":"Unauthenticated"}`
	if got := strings.TrimSpace(string(out)); got != want {
		t.Errorf("Node got %s, want %s", got, want)
	}
	if !json.Valid(out) {
		t.Error("Node printed no JSON")
	}
}

// nodeBundle installs what services/web pins, bundles the client into a directory of the test and returns that.
func nodeBundle(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("node"); err != nil {
		t.Fatal("this test runs connect-web in Node, and there is no node on PATH: install Node 20 or later (`apt-get install nodejs npm`)")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, args := range [][]string{
		{filepath.Join(root, "deploy/scripts/npm.sh"), "services/web"},
		{"node", filepath.Join(root, "services/web/build.mjs"), dir},
	} {
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	return dir
}
