package gateway_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/config"
	"github.com/carrel-dev/carrel/services/gateway"
)

// patience is how long a test waits for what should happen at once; a loaded machine with -race may be slow.
const patience = 20 * time.Second

// journal is a log that is written by many and read at the end.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// rig is a running gateway with its admin signed in.
type rig struct {
	t       *testing.T
	g       *gateway.Gateway
	url     string
	state   string
	link    string // the first sign-in
	log     *journal
	http    *http.Client
	admin   string // token
	stop    context.CancelFunc
	ended   chan error
	stopped bool
}

// settings loads a configuration from KEY=VALUE pairs, keys as in the settings file. The port is any free one of loopback.
func settings(t *testing.T, state string, pairs ...string) config.Config {
	t.Helper()
	environ := []string{config.EnvPrefix + "LISTEN=127.0.0.1:0", config.EnvPrefix + "STATE=" + state}
	for _, pair := range pairs {
		key, value, _ := strings.Cut(pair, "=")
		environ = append(environ, config.EnvPrefix+strings.ToUpper(strings.ReplaceAll(key, ".", "_"))+"="+value)
	}
	cfg, err := config.Load("", environ, nil)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func start(t *testing.T, pairs ...string) *rig {
	t.Helper()
	return startIn(t, filepath.Join(t.TempDir(), "state"), pairs...)
}

func startIn(t *testing.T, state string, pairs ...string) *rig {
	t.Helper()
	r := &rig{t: t, state: state, log: &journal{}, ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	logger := slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	g, err := gateway.Open(ctx, settings(t, state, pairs...), "test", logger)
	if err != nil {
		cancel()
		t.Fatalf("open gateway: %v", err)
	}
	r.g, r.url = g, g.BaseURL()
	if r.link, err = g.FirstAdmin(ctx, "root-admin"); err != nil {
		t.Fatal(err)
	}
	go func() { r.ended <- g.Run(ctx) }()
	t.Cleanup(func() {
		if err := r.shut(); err != nil {
			t.Errorf("gateway ended with %v", err)
		}
	})
	r.http = client(t, g.CAPEM())
	r.waitReady()
	if r.link != "" {
		r.admin = r.signIn(r.link)
	}
	return r
}

// shut stops the gateway and returns what Run and Close said. Only the first call does something.
func (r *rig) shut() error {
	if r.stopped {
		return nil
	}
	r.stopped = true
	r.stop()
	err := <-r.ended
	if cerr := r.g.Close(); err == nil {
		err = cerr
	}
	return err
}

// client trusts one CA, or none where the gateway speaks plain HTTP.
func client(t *testing.T, caPEM []byte) *http.Client {
	transport := &http.Transport{ForceAttemptHTTP2: true}
	if caPEM != nil {
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(caPEM) {
			t.Fatal("the gateway's CA is no certificate")
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func (r *rig) waitReady() {
	r.t.Helper()
	until(r.t, "the gateway is ready", func() bool { return r.get("/readyz").code == http.StatusOK })
}

// until polls a condition that nothing tells of.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		if ok() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s: %s", patience, what)
		}
	}
}

type answer struct {
	code   int
	body   string
	header http.Header
}

func (r *rig) get(path string, headers ...string) answer {
	r.t.Helper()
	return r.do(http.MethodGet, path, "", headers...)
}

func (r *rig) do(method, path, body string, headers ...string) answer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	res, err := r.http.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	content, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return answer{code: res.StatusCode, body: string(content), header: res.Header}
}

// code is the one-time code of a sign-in link.
func code(t *testing.T, link string) (code, fingerprint string) {
	t.Helper()
	_, fragment, ok := strings.Cut(link, "/#sign-in=")
	if !ok {
		t.Fatalf("sign-in link %q has no code", link)
	}
	code, fingerprint, _ = strings.Cut(fragment, ".")
	return code, fingerprint
}

// signIn uses a link and returns the token.
func (r *rig) signIn(link string) string {
	r.t.Helper()
	text, _ := code(r.t, link)
	res, err := carrelv1connect.NewAuthServiceClient(r.http, r.url).SignIn(r.t.Context(), connect.NewRequest(&carrelv1.SignInRequest{Code: text, Label: "test"}))
	if err != nil {
		r.t.Fatalf("sign in: %v", err)
	}
	return res.Msg.GetToken()
}

// with makes a request that carries a token.
func with[T any](token string, message *T) *connect.Request[T] {
	req := connect.NewRequest(message)
	if token != "" {
		req.Header().Set("Authorization", "Bearer "+token)
	}
	return req
}

// user makes an account and signs it in.
func (r *rig) user(name string) (token string) {
	r.t.Helper()
	res, err := r.users().Add(r.t.Context(), with(r.admin, &carrelv1.UserServiceAddRequest{Users: []*carrelv1.User{{Name: name}}}))
	if err != nil {
		r.t.Fatalf("add %s: %v", name, err)
	}
	added := res.Msg.GetUsers()[0]
	if added.GetError() != "" {
		r.t.Fatalf("add %s: %s", name, added.GetError())
	}
	return r.signIn(added.GetSignIn())
}

// again makes another token of a user.
func (r *rig) again(name string) (token string) {
	r.t.Helper()
	res, err := r.users().CreateSignIn(r.t.Context(), with(r.admin, &carrelv1.CreateSignInRequest{User: name}))
	if err != nil {
		r.t.Fatalf("sign-in of %s: %v", name, err)
	}
	return r.signIn(res.Msg.GetSignIn())
}

func (r *rig) disable(name string, disabled bool) {
	r.t.Helper()
	_, err := r.users().Update(r.t.Context(), with(r.admin, &carrelv1.UserServiceUpdateRequest{
		User: &carrelv1.User{Name: name, Disabled: disabled}, Fields: []string{"disabled"},
	}))
	if err != nil {
		r.t.Fatalf("disable %s: %v", name, err)
	}
}

// revoke ends a token by means of itself.
func (r *rig) revoke(token string) {
	r.t.Helper()
	if _, err := r.auth().SignOut(r.t.Context(), with(token, &carrelv1.SignOutRequest{})); err != nil {
		r.t.Fatalf("sign out: %v", err)
	}
}

func (r *rig) users() carrelv1connect.UserServiceClient {
	return carrelv1connect.NewUserServiceClient(r.http, r.url)
}

func (r *rig) auth() carrelv1connect.AuthServiceClient {
	return carrelv1connect.NewAuthServiceClient(r.http, r.url)
}

func (r *rig) workspaces() carrelv1connect.WorkspaceServiceClient {
	return carrelv1connect.NewWorkspaceServiceClient(r.http, r.url)
}
