package gateway_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/carrel-dev/carrel/services/auth"
)

var update = flag.Bool("update", false, "write testdata/policy.txt anew")

// procedures returns every method of the user API, by its path.
func procedures() map[string]protoreflect.MethodDescriptor {
	all := map[string]protoreflect.MethodDescriptor{}
	protoregistry.GlobalFiles.RangeFilesByPackage("carrel.v1", func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				method := service.Methods().Get(j)
				all[fmt.Sprintf("/%s/%s", service.FullName(), method.Name())] = method
			}
		}
		return true
	})
	return all
}

// T-9, first half: no procedure without a policy entry, no entry without a procedure, and nothing that a browser can call by a mere GET.
func TestEveryProcedureHasAPolicyEntry(t *testing.T) {
	all := procedures()
	if len(all) < 40 {
		t.Fatalf("only %d procedures found", len(all))
	}
	for path, method := range all {
		if auth.AccessOf(path) == auth.Nobody {
			t.Errorf("%s has no policy entry", path)
		}
		if method.IsStreamingClient() {
			t.Errorf("%s streams from the client: the policy's matrix does not cover that", path)
		}
		if options, ok := method.Options().(*descriptorpb.MethodOptions); ok && options.GetIdempotencyLevel() == descriptorpb.MethodOptions_NO_SIDE_EFFECTS {
			t.Errorf("%s can be called by GET, which a page of another origin can make a browser do (T-6)", path)
		}
	}
	for _, path := range auth.Procedures() {
		if all[path] == nil {
			t.Errorf("the policy has %s, which no service has", path)
		}
	}
}

// callers are the columns of the matrix.
var callers = []string{"anonymous", "garbage", "member", "admin", "disabled", "revoked"}

// T-9, second half (A10, A11): every procedure as every caller, through the real server, against testdata/policy.txt. A call that is
// denied changes no byte of the database.
func TestPolicyMatrix(t *testing.T) {
	r := start(t, "scheduler.tick=1h", "images.allow=any")
	tokens := map[string]string{"anonymous": "", "garbage": auth.NewToken().Text, "admin": r.again("root-admin"), "member": r.user("mem"), "disabled": r.user("dis"), "revoked": r.user("rev")}
	for _, caller := range []string{"admin", "member", "disabled", "revoked"} { // the first use of a token is noted in the database
		if _, err := call(t, r, "/carrel.v1.AuthService/WhoAmI", tokens[caller], false); err != nil {
			t.Fatalf("%s: %v", caller, err)
		}
	}
	r.disable("dis", true)
	r.revoke(tokens["revoked"])

	table := &bytes.Buffer{}
	fmt.Fprintf(table, "%-45s", "# an empty request as")
	for _, caller := range callers {
		fmt.Fprintf(table, " %-19s", caller)
	}
	fmt.Fprintln(table)
	all := procedures()
	paths := make([]string, 0, len(all))
	for path := range all {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	last := fingerprint(t, r.state)
	for _, path := range paths {
		fmt.Fprintf(table, "%-45s", path)
		for _, caller := range callers {
			token := tokens[caller]
			if strings.HasSuffix(path, "/SignOut") && (caller == "admin" || caller == "member") {
				token = r.again(map[string]string{"admin": "root-admin", "member": "mem"}[caller])
				last = fingerprint(t, r.state)
			}
			fmt.Fprintf(table, " %-19s", outcome(t, r, path, token, all[path].IsStreamingServer(), &last))
		}
		fmt.Fprintln(table)
	}
	compare(t, filepath.Join("testdata", "policy.txt"), trimLines(table.String()))
}

func trimLines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}

func compare(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	gotLines, wantLines := strings.Split(got, "\n"), strings.Split(string(want), "\n")
	for _, line := range wantLines {
		if !slices.Contains(gotLines, line) {
			t.Errorf("%s has, but the gateway does not do:\n%s", path, line)
		}
	}
	for _, line := range gotLines {
		if !slices.Contains(wantLines, line) {
			t.Errorf("the gateway does, but %s does not have:\n%s", path, line)
		}
	}
}

// outcome makes a call and returns its code; for one that is denied it holds the database against what it was.
func outcome(t *testing.T, r *rig, path, token string, streams bool, last *string) string {
	before := *last
	denied, err := call(t, r, path, token, streams)
	*last = fingerprint(t, r.state)
	if denied && *last != before {
		t.Errorf("%s was denied and changed the database", path)
	}
	if err == nil {
		return "ok"
	}
	return connect.CodeOf(err).String()
}

// call sends an empty request; of a stream only the first message is read.
func call(t *testing.T, r *rig, path, token string, streams bool) (denied bool, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client := connect.NewClient[emptypb.Empty, emptypb.Empty](r.http, r.url+path)
	if streams {
		var stream *connect.ServerStreamForClient[emptypb.Empty]
		if stream, err = client.CallServerStream(ctx, with(token, &emptypb.Empty{})); err == nil {
			stream.Receive()
			err = stream.Err()
			cancel()
			_ = stream.Close() // it was cut off by the line above
		}
	} else {
		_, err = client.CallUnary(ctx, with(token, &emptypb.Empty{}))
	}
	code := connect.CodeOf(err)
	return err != nil && (code == connect.CodeUnauthenticated || code == connect.CodePermissionDenied), err
}

// fingerprint is a hash over the database's bytes, its log included.
func fingerprint(t *testing.T, state string) string {
	t.Helper()
	sum := sha256.New()
	for _, name := range []string{"carrel.db", "carrel.db-wal"} {
		content, err := os.ReadFile(filepath.Join(state, name))
		if err != nil {
			t.Fatal(err)
		}
		sum.Write(content)
	}
	return fmt.Sprintf("%x", sum.Sum(nil))
}

// A18: what is not the very path of a procedure reaches none, whoever asks.
func TestOddPathsReachNoProcedure(t *testing.T) {
	r := start(t)
	mem := r.user("mem")
	for _, path := range []string{
		"carrel.v1.UserService/Add", "*", "/carrel.v1.UserService/add", "/carrel.v1.userservice/Add", "/CARREL.V1.UserService/Add", "/carrel.v1.UserService/Add/", "/carrel.v1.UserService/%41dd",
		"//carrel.v1.UserService/Add", "/x/../carrel.v1.UserService/Add", "/./carrel.v1.UserService/Add", "/carrel.v1.UserService//Add", "/carrel.v1.UserService/",
		"/carrel.v1.UserService/Add;x", "/carrel.v1.UserService/Add%00", "/carrel.v1.UserService%2FAdd", "/carrel.agent.v1.HostService/Apply", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
	} {
		for _, h2 := range []bool{false, true} {
			for _, token := range []string{mem, ""} {
				status := rawPost(t, r, path, token, h2)
				// %41 is `A`: the same path, so that the policy must answer.
				same := path == "/carrel.v1.UserService/%41dd"
				if same && status != http.StatusForbidden && status != http.StatusUnauthorized || !same && status < 300 {
					t.Errorf("HTTP/2 %t, signed in %t, %s: status %d", h2, token != "", path, status)
				}
			}
		}
	}
}
