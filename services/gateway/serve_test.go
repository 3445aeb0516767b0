package gateway_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/gateway"
)

func open(t *testing.T, state string, pairs ...string) error {
	t.Helper()
	g, err := gateway.Open(t.Context(), settings(t, state, pairs...), "test", slog.New(slog.DiscardHandler))
	if err == nil {
		_ = g.Close()
	}
	return err
}

func TestSecondGatewayOnTheSameStateNamesTheHolder(t *testing.T) {
	r := start(t)
	err := open(t, r.state)
	if fleet.KindOf(err) != fleet.KindConflict || !strings.Contains(fleet.UserMessage(err), fmt.Sprint("process ", os.Getpid())) {
		t.Errorf("a second gateway: %v", err)
	}
	if got := r.get("/readyz"); got.code != http.StatusOK {
		t.Errorf("the first one is disturbed: %v", got)
	}
}

func TestBusyPortSaysWhatToDoAndReleasesTheDatabase(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(t.TempDir(), "state")
	err = open(t, state, "listen="+ln.Addr().String())
	if err == nil || !strings.Contains(fleet.UserMessage(err), ln.Addr().String()) || !strings.Contains(fleet.UserMessage(err), "--listen") {
		t.Errorf("busy port: %v", err)
	}
	_ = ln.Close()
	if err := open(t, state); err != nil {
		t.Errorf("the database is not free after it: %v", err)
	}
	if err := open(t, state); err != nil {
		t.Errorf("a gateway that never ran does not free its port or database: %v", err)
	}
}

// T-11: state that others can read is refused, with what to do.
func TestStateThatOthersCanReadIsRefused(t *testing.T) {
	for _, name := range []string{"carrel.db", "keys", "keys/seal.key", "keys/ssh-host-ca", "keys/tls-ca.pem"} {
		t.Run(name, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "state")
			if err := open(t, state); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(state, name)
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode().Perm()&0o077 != 0 {
				t.Errorf("made with mode %o", info.Mode().Perm())
			}
			if err := os.Chmod(path, info.Mode().Perm()|0o044); err != nil {
				t.Fatal(err)
			}
			if err := open(t, state); !fleet.IsKind(err, fleet.KindInvalid) || !strings.Contains(err.Error(), "chmod") {
				t.Errorf("wide %s: %v", name, err)
			}
		})
	}
}

// T-46: off loopback the port speaks TLS with the own CA, whose fingerprint stands in the sign-in link and in join tokens.
func TestOffLoopbackIsTLSWithThePinnedCA(t *testing.T) {
	r := start(t, "listen=0.0.0.0:0", "tls.names=carrel.test,192.0.2.7")
	if !strings.HasPrefix(r.url, "https://") {
		t.Fatalf("base URL %s", r.url)
	}
	served := r.get("/ca.pem")
	block, _ := pem.Decode([]byte(served.body))
	if served.code != http.StatusOK || block == nil || !bytes.Equal([]byte(served.body), r.g.CAPEM()) {
		t.Fatalf("/ca.pem: %d %s", served.code, served.body)
	}
	sum := sha256.Sum256(block.Bytes)
	want := base64.RawURLEncoding.EncodeToString(sum[:])
	if _, fingerprint := code(t, r.link); fingerprint != want {
		t.Errorf("the sign-in link pins %q, the CA is %q", fingerprint, want)
	}
	if strings.Contains(served.body, "PRIVATE") {
		t.Error("/ca.pem serves a private key")
	}
	port := r.url[strings.LastIndex(r.url, ":"):]
	for _, name := range []string{"localhost", "127.0.0.1", "carrel.test", "192.0.2.7"} {
		conn, err := tls.Dial("tcp", "127.0.0.1"+port, &tls.Config{RootCAs: roots(t, r.g.CAPEM()), ServerName: name, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}})
		if err != nil {
			t.Errorf("as %s: %v", name, err)
			continue
		}
		if conn.ConnectionState().NegotiatedProtocol != "h2" {
			t.Errorf("as %s: no HTTP/2", name)
		}
		_ = conn.Close()
	}
	if conn, err := tls.Dial("tcp", "127.0.0.1"+port, &tls.Config{RootCAs: roots(t, r.g.CAPEM()), ServerName: "evil.test", MinVersion: tls.VersionTLS12}); err == nil {
		_ = conn.Close()
		t.Error("the certificate is good for any name")
	}
	if conn, err := tls.Dial("tcp", "127.0.0.1"+port, &tls.Config{ServerName: "localhost", MinVersion: tls.VersionTLS12}); err == nil {
		_ = conn.Close()
		t.Error("the system's roots trust the own CA")
	}
	if conn, err := tls.Dial("tcp", "127.0.0.1"+port, &tls.Config{RootCAs: roots(t, r.g.CAPEM()), ServerName: "localhost", MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}); err == nil { //nolint:gosec // old on purpose
		_ = conn.Close()
		t.Error("TLS 1.1 is taken")
	}
	plain, err := http.Get("http://127.0.0.1" + port + "/healthz") //nolint:noctx // a test
	if err == nil {
		defer plain.Body.Close()
		if plain.StatusCode == http.StatusOK {
			t.Error("plain HTTP is served off loopback")
		}
	}
	first := r.g.CAPEM()
	if err := r.shut(); err != nil {
		t.Fatal(err)
	}
	if again := startIn(t, r.state, "listen=0.0.0.0:0"); !bytes.Equal(again.g.CAPEM(), first) {
		t.Error("a restart made another CA")
	}
}

func TestOnLoopbackThereIsNothingToPin(t *testing.T) {
	r := start(t)
	if _, fingerprint := code(t, r.link); fingerprint != "" || !strings.HasPrefix(r.link, "http://127.0.0.1:") {
		t.Errorf("sign-in link %s", strings.SplitN(r.link, "#", 2)[0])
	}
	if got := r.get("/ca.pem"); got.code != http.StatusNotFound {
		t.Errorf("/ca.pem: %d", got.code)
	}
}

func TestFiles(t *testing.T) {
	cli := t.TempDir()
	if err := os.WriteFile(filepath.Join(cli, "carrel-linux-amd64"), []byte("#!/bin/sh\necho carrel test\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(cli, "secret"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, "cli_dir="+cli)
	if got := r.get("/cli/carrel-linux-amd64"); got.code != http.StatusOK || !strings.Contains(got.body, "echo carrel test") {
		t.Errorf("binary: %d %s", got.code, got.body)
	}
	for _, name := range []string{"carrel-darwin-arm64", "secret", "../carrel.db", "%2e%2e%2fsecret", "carrel-linux-amd64%00", "carrel-linux-amd64/", "carrel-linux-amd64/../secret", ""} {
		got := r.get("/cli/" + name)
		if got.code < 300 || strings.TrimSpace(got.body) == "secret" {
			t.Errorf("/cli/%s: %d %s", name, got.code, got.body)
		}
		if (name == "secret" || name == "carrel-darwin-arm64") && (got.code != http.StatusNotFound || !strings.Contains(got.body, "it has carrel-linux-amd64") || strings.Contains(got.body, cli)) {
			t.Errorf("/cli/%s does not say what there is: %d %s", name, got.code, got.body)
		}
	}
	if got := r.get("/"); got.code != http.StatusOK || !strings.Contains(got.body, r.url+"/install.sh") {
		t.Errorf("/: %d %s", got.code, got.body)
	}
	if got := r.get("/healthz"); got.code != http.StatusOK {
		t.Errorf("/healthz: %d", got.code)
	}
	for _, path := range []string{"/metrics", "/debug/pprof/", "/debug/vars", "/admin", "/index.html"} {
		if got := r.get(path); got.code != http.StatusNotFound {
			t.Errorf("%s: %d", path, got.code)
		}
	}
}

// The install script is what a shell takes, and it installs.
func TestInstallScript(t *testing.T) {
	cli := t.TempDir()
	for _, arch := range []string{"amd64", "arm64"} {
		if err := os.WriteFile(filepath.Join(cli, "carrel-linux-"+arch), []byte("#!/bin/sh\necho carrel test\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := start(t, "cli_dir="+cli, "listen=0.0.0.0:0")
	dir := t.TempDir()
	script, ca, bin := filepath.Join(dir, "install.sh"), filepath.Join(dir, "ca.pem"), filepath.Join(dir, "my bin")
	if err := os.WriteFile(script, []byte(r.get("/install.sh").body), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ca, r.g.CAPEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "sh", "-n", script).CombinedOutput(); err != nil {
		t.Fatalf("sh -n: %v %s", err, out)
	}
	run := func(env ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "sh", script)
		cmd.Env = append(os.Environ(), append(env, "CARREL_BIN="+bin)...)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := run(); err == nil {
		t.Errorf("without the CA the script installed from a server that nobody vouches for: %s", out)
	}
	if out, err := run("CARREL_CA=" + ca); err != nil || !strings.Contains(out, "installed") {
		t.Fatalf("install: %v %s", err, out)
	}
	entries, err := os.ReadDir(bin)
	if err != nil || len(entries) != 1 || entries[0].Name() != "carrel" {
		t.Errorf("installed %v, %v", entries, err)
	}
}

// T-45: there is a metrics listener only where one is asked for.
func TestMetricsListener(t *testing.T) {
	before := listeners(t)
	r := start(t)
	var mine []string
	for _, address := range listeners(t) {
		if !slices.Contains(before, address) {
			mine = append(mine, address)
		}
	}
	if len(mine) != 1 {
		t.Errorf("a default gateway listens on %v, want its one port %s", mine, r.url)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := ln.Addr().String()
	_ = ln.Close()
	with := start(t, "metrics_listen="+address)
	until(t, "metrics are served", func() bool {
		res, err := http.Get("http://" + address + "/metrics") //nolint:noctx // a test
		if err != nil {
			return false
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		return err == nil && res.StatusCode == http.StatusOK && strings.Contains(string(body), "carrel_workspaces{state=\"running\"} 0") && strings.Contains(string(body), "carrel_hosts_connected 0")
	})
	if got := with.get("/metrics"); got.code != http.StatusNotFound {
		t.Errorf("metrics on the public port: %d", got.code)
	}
}

// T-35: the limits of the public port. Each refusal leaves the gateway well.
func TestLimits(t *testing.T) {
	r := start(t)
	long := strings.Repeat("x", 1<<20+100)
	_, err := r.users().Add(t.Context(), with(r.admin, &carrelv1.UserServiceAddRequest{Users: []*carrelv1.User{{Name: long}}}))
	if connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("a message above 1 MiB: %v", err)
	}
	_, err = connectClient(r, connect.WithSendGzip()).Add(t.Context(), with(r.admin, &carrelv1.UserServiceAddRequest{Users: []*carrelv1.User{{Name: strings.Repeat("x", 8<<20)}}}))
	if connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("8 MiB in 8 KiB of gzip: %v", err)
	}
	conn, err := net.Dial("tcp", r.address())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	go func() { // the gateway may stop reading half-way
		_, _ = fmt.Fprintf(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n", strings.Repeat("x", 128<<10))
	}()
	status := make([]byte, 12)
	if _, err := io.ReadFull(conn, status); err == nil && string(status) != "HTTP/1.1 431" {
		t.Errorf("128 KiB of headers: %q", status)
	}
	for _, contentType := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""} { // what a form or a simple fetch of another origin can send (T-6)
		got := r.do(http.MethodPost, "/carrel.v1.AuthService/ServerInfo", "{}", "Content-Type", contentType)
		if got.code != http.StatusUnsupportedMediaType {
			t.Errorf("content type %q: %d", contentType, got.code)
		}
	}
	if got := r.get("/carrel.v1.AuthService/WhoAmI?message=%7B%7D&encoding=json&connect=v1", "Authorization", "Bearer "+r.admin); got.code != http.StatusMethodNotAllowed {
		t.Errorf("a call by GET: %d", got.code)
	}
	if got := r.do(http.MethodOptions, "/carrel.v1.AuthService/WhoAmI", "", "Origin", "https://evil.test", "Access-Control-Request-Method", "POST"); got.header.Get("Access-Control-Allow-Origin") != "" {
		t.Error("another origin may call")
	}
	if got := r.get("/healthz"); got.code != http.StatusOK {
		t.Errorf("afterwards: %d", got.code)
	}
}

// A16: a secret that fails is as secret as one that works: no token, code or ticket stands in the log, whatever goes wrong with it; and a
// client never sees a cause.
func TestSecretsAndCausesStayWhereTheyBelong(t *testing.T) {
	r := start(t, "images.allow=any")
	h := r.join("h1")
	ana := r.user("ana")
	r.create(ana, "demo", false)
	ticket := r.mustTicket(ana, "demo")
	garbage, signIn, join := auth.NewToken().Text, auth.NewCode().Text, auth.NewCode().Text
	adminCode, _ := code(t, r.link)
	secrets := map[string]string{"garbage token": garbage, "ana's token": ana, "admin's token": r.admin, "sign-in": signIn, "used sign-in": adminCode, "join secret": join, "ticket": ticket, "stream token": h.token}

	for _, path := range []string{"/carrel.v1.AuthService/WhoAmI", "/carrel.v1.UserService/Add", "/carrel.v1.Nothing/Here", "/carrel/attach", "/carrel/link", "/carrel/stream", "/cli/x"} {
		for what, secret := range secrets {
			for _, header := range []string{"Bearer " + secret, secret, "Basic " + secret} {
				got := r.do(http.MethodPost, path, "{", "Content-Type", "application/json", "Authorization", header, "Carrel-Ticket", secret, "Carrel-Stream-Token", secret, "Carrel-Host", h.id, "Carrel-Proof", secret)
				if strings.Contains(got.body, secret) {
					t.Errorf("%s: %s comes back in %q", path, what, got.body)
				}
			}
		}
	}
	_, err := r.auth().SignIn(t.Context(), connect.NewRequest(&carrelv1.SignInRequest{Code: signIn}))
	_, again := r.auth().SignIn(t.Context(), connect.NewRequest(&carrelv1.SignInRequest{Code: adminCode}))
	for _, err := range []error{err, again} {
		if connect.CodeOf(err) != connect.CodeUnauthenticated || strings.Contains(err.Error(), signIn) || strings.Contains(err.Error(), adminCode) {
			t.Errorf("sign in: %v", err)
		}
	}
	conn, err := r.attach(ticket)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if err := r.shut(); err != nil {
		t.Fatal(err)
	}
	log := r.log.String()
	if !strings.Contains(log, "host connected") {
		t.Error("the log is not this gateway's")
	}
	for what, secret := range secrets {
		if strings.Contains(log, secret) {
			t.Errorf("%s stands in the log", what)
		}
	}
	for what, secret := range secrets { // T-11: and a stolen database opens nothing
		for _, name := range []string{"carrel.db", "carrel.db-wal"} {
			content, err := os.ReadFile(filepath.Join(r.state, name))
			if err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			if bytes.Contains(content, []byte(secret)) {
				t.Errorf("%s stands in %s", what, name)
			}
		}
	}
}

// REL-15, scaled down: the end of a gateway with everything open is clean, in time, and said to clients in words.
func TestShutdownWithStreamsOpen(t *testing.T) {
	const grace = 5 * time.Second
	r := start(t, "images.allow=any", "shutdown.grace="+grace.String())
	h := r.join("h1")
	ana := r.user("ana")
	r.create(ana, "demo", false)
	var conns []net.Conn
	for range 20 {
		conn, err := r.attach(r.mustTicket(ana, "demo"))
		if err != nil {
			t.Fatal(err)
		}
		echo(t, conn)
		conns = append(conns, conn)
		<-h.opened
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var watches []*connect.ServerStreamForClient[carrelv1.WatchResponse]
	for range 20 {
		watch, err := r.workspaces().Watch(ctx, with(ana, &carrelv1.WatchRequest{}))
		if err != nil || !watch.Receive() {
			t.Fatalf("watch: %v", err)
		}
		watches = append(watches, watch)
	}
	began := time.Now()
	if err := r.shut(); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	if took := time.Since(began); took > grace {
		t.Errorf("it took %s of a grace of %s", took, grace)
	}
	for _, conn := range conns {
		cut(t, "shutdown", conn)
		_ = conn.Close()
	}
	for _, watch := range watches {
		for watch.Receive() {
			continue
		}
		if connect.CodeOf(watch.Err()) != connect.CodeUnavailable || !strings.Contains(watch.Err().Error(), "stopping") {
			t.Errorf("a Watch stream ended with %v", watch.Err())
		}
	}
	if wal, err := os.Stat(filepath.Join(r.state, "carrel.db-wal")); err == nil && wal.Size() > 0 {
		t.Errorf("the database was not closed: %d bytes of log are left", wal.Size())
	}
	again := startIn(t, r.state, "images.allow=any")
	if again.run(ana, "demo") != 1 {
		t.Error("the workspace did not outlive the gateway")
	}
}
