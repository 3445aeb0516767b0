package session

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// proxyEnv makes the test binary an ssh ProxyCommand to the unix socket that it names.
const proxyEnv = "CARREL_TEST_PROXY"

func TestMain(m *testing.M) {
	if path := os.Getenv(proxyEnv); path != "" {
		os.Exit(proxy(path))
	}
	os.Exit(m.Run())
}

func proxy(path string) int {
	conn, err := net.Dial("unix", path)
	if err != nil {
		fmt.Fprintln(os.Stderr, "proxy:", err)
		return 1
	}
	go func() {
		_, _ = io.Copy(conn, os.Stdin)
		_ = conn.(*net.UnixConn).CloseWrite()
	}()
	_, _ = io.Copy(os.Stdout, conn)
	return 0
}

// rig is a workspace's SSH server on a unix socket, with a real client's configuration for it.
type rig struct {
	t      testing.TB
	dir    string
	home   string
	socket string
	passwd string
	key    ssh.Signer
	host   ssh.Signer
	env    []string

	mu      sync.Mutex
	servers map[*Server]struct{}
	logins  []string
	wg      sync.WaitGroup
}

type rigOption func(*Config)

func newRig(t testing.TB, opts ...rigOption) *rig {
	t.Helper()
	r := &rig{t: t, dir: t.TempDir(), servers: make(map[*Server]struct{})}
	r.home = filepath.Join(r.dir, "home")
	r.must(os.Mkdir(r.home, 0o755))
	r.passwd = filepath.Join(r.dir, "passwd")
	r.setShell("/bin/bash")
	r.key, r.host = r.newKey("id"), r.newKey("host")
	r.socket = filepath.Join(r.dir, "s")
	l, err := net.Listen("unix", r.socket)
	r.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	r.wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			r.wg.Go(func() { r.serve(ctx, conn, opts) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		cancel()
		r.wg.Wait()
	})
	r.writeClientConfig()
	return r
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) setShell(shell string) {
	r.t.Helper()
	line := fmt.Sprintf("dev:x:%d:%d::%s:%s\n", os.Getuid(), os.Getgid(), r.home, shell)
	r.must(os.WriteFile(r.passwd, []byte(line), 0o644))
}

func (r *rig) newKey(name string) ssh.Signer {
	r.t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	r.must(err)
	block, err := ssh.MarshalPrivateKey(private, "")
	r.must(err)
	r.must(os.WriteFile(filepath.Join(r.dir, name), pem.EncodeToMemory(block), 0o600))
	signer, err := ssh.NewSignerFromKey(private)
	r.must(err)
	r.must(os.WriteFile(filepath.Join(r.dir, name+".pub"), ssh.MarshalAuthorizedKey(signer.PublicKey()), 0o600))
	return signer
}

func (r *rig) config(opts []rigOption) Config {
	cfg := Config{
		Signer: r.host, Keys: []ssh.PublicKey{r.key.PublicKey()}, PasswdFile: r.passwd,
		Account: Account{Login: "dev", UID: os.Getuid(), GID: os.Getgid(), Home: r.home},
		Env:     []string{"PATH=" + os.Getenv("PATH"), "IMAGE_VAR=from image", "CARREL_WORKSPACE=w1"},
		Log:     slog.New(slog.DiscardHandler),
	}
	for _, o := range opts {
		o(&cfg)
	}
	return cfg
}

func (r *rig) serve(ctx context.Context, conn net.Conn, opts []rigOption) {
	cfg := r.config(opts)
	onLogin := cfg.OnLogin
	cfg.OnLogin = func(fp string) {
		r.mu.Lock()
		r.logins = append(r.logins, fp)
		r.mu.Unlock()
		if onLogin != nil {
			onLogin(fp)
		}
	}
	s := New(cfg)
	r.mu.Lock()
	r.servers[s] = struct{}{}
	r.mu.Unlock()
	_ = s.Serve(ctx, conn) // how it ends is the tests' matter
	r.mu.Lock()
	delete(r.servers, s)
	r.mu.Unlock()
}

// each calls fn for every live connection's server.
func (r *rig) each(fn func(*Server)) {
	r.mu.Lock()
	var all []*Server
	for s := range r.servers {
		all = append(all, s)
	}
	r.mu.Unlock()
	for _, s := range all {
		fn(s)
	}
}

func (r *rig) writeClientConfig() {
	r.t.Helper()
	exe, err := os.Executable()
	r.must(err)
	known := fmt.Sprintf("w1 %s", ssh.MarshalAuthorizedKey(r.host.PublicKey()))
	r.must(os.WriteFile(filepath.Join(r.dir, "known"), []byte(known), 0o600))
	cfg := fmt.Sprintf(`Host w1
  User dev
  HostKeyAlias w1
  IdentityFile %[1]s/id
  IdentitiesOnly yes
  UserKnownHostsFile %[1]s/known
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  ProxyCommand env %[2]s=%[3]s %[4]s
  Ciphers aes128-gcm@openssh.com
  LogLevel ERROR
`, r.dir, proxyEnv, r.socket, exe)
	r.must(os.WriteFile(filepath.Join(r.dir, "config"), []byte(cfg), 0o600))
}

type result struct {
	stdout, stderr string
	status         int
	took           time.Duration
}

// run executes a client program (ssh, scp, sftp, rsync) with the rig's configuration and at most 60 s.
func (r *rig) run(stdin io.Reader, name string, args ...string) result {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := r.command(ctx, name, args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	begin := time.Now()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		r.t.Fatalf("%s %v: %v", name, args, err)
	}
	if ctx.Err() != nil {
		r.t.Fatalf("%s %v: not done after a minute; stderr %q", name, args, errs.String())
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode(), time.Since(begin)}
}

func (r *rig) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	config := filepath.Join(r.dir, "config")
	if name == "rsync" {
		args = append([]string{"-e", "ssh -F " + config}, args...)
	} else {
		args = append([]string{"-F", config}, args...)
	}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), r.env...)
	return cmd
}

func (r *rig) ssh(args ...string) result {
	r.t.Helper()
	return r.run(nil, "ssh", append([]string{"w1"}, args...)...)
}

func (r *rig) want(got result, stdout string, status int) {
	r.t.Helper()
	if got.stdout != stdout || got.status != status {
		r.t.Errorf("got stdout %.200q, stderr %.300q, status %d; want %q, %d", got.stdout, got.stderr, got.status, stdout, status)
	}
}

// eventually polls until ok, for at most limit.
func eventually(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !ok(); time.Sleep(10 * time.Millisecond) { //nolint:forbidigo // a poll with a deadline
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// dial connects an x/crypto client, for what the ssh program cannot say.
func (r *rig) dial(user string, auth ...ssh.AuthMethod) (*ssh.Client, error) {
	conn, err := net.Dial("unix", r.socket)
	if err != nil {
		return nil, err
	}
	c, chans, reqs, err := ssh.NewClientConn(conn, "w1", &ssh.ClientConfig{
		User: user, Auth: auth, HostKeyCallback: ssh.FixedHostKey(r.host.PublicKey()), Timeout: 10 * time.Second,
	})
	if err != nil {
		conn.Close()
		return nil, err
	}
	return ssh.NewClient(c, chans, reqs), nil
}

func (r *rig) client() *ssh.Client {
	r.t.Helper()
	c, err := r.dial("dev", ssh.PublicKeys(r.key))
	r.must(err)
	r.t.Cleanup(func() { c.Close() })
	return c
}

// freePort is a port that nobody listens on just now.
func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}
