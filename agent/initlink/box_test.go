package initlink_test

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
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/agent/initlink"
	"github.com/carrel-dev/carrel/proto/stream"
)

const (
	testUID = 12345
	testGID = 12346
)

// box is a workspace container with its link and a real ssh client's configuration for it.
type box struct {
	t      testing.TB
	dir    string
	engine *engine
	id     string
	pid    int
	key    initlink.Key
	cfg    initlink.Config
	found  initlink.Found
	host   ssh.Signer
	user   ssh.Signer

	mu    sync.Mutex
	links *initlink.Links
}

type boxOption func(*boxSpec)

type boxSpec struct {
	image    string
	sudo     bool
	env      []string
	home     func(dir string)
	noConfig bool
}

func image(name string) boxOption { return func(s *boxSpec) { s.image = name } }
func withSudo(s *boxSpec)         { s.sudo = true }
func unconfigured(s *boxSpec)     { s.noConfig = true }

func newBox(t testing.TB, opts ...boxOption) *box {
	t.Helper()
	spec := boxSpec{image: "carrel/test:local"}
	for _, o := range opts {
		o(&spec)
	}
	b := &box{t: t, dir: t.TempDir(), engine: newEngine(t), key: initlink.Key{Workspace: strings.ToLower(rand.Text()), Epoch: 1}}
	b.host, b.user = b.newKey("host"), b.newKey("id")
	b.openLinks()
	t.Cleanup(func() { b.current().Close() })
	linkDir, err := b.current().Prepare(b.key)
	b.must(err)
	home := filepath.Join(b.dir, "home")
	b.must(os.Mkdir(home, 0o755))
	if spec.home != nil {
		spec.home(home)
	}
	binds := []string{binDir + ":/run/carrel-bin:ro", linkDir + ":/run/carrel-agent:ro", home + ":/home/ana"}
	b.id, b.pid = b.engine.start("initd-test-"+b.key.Workspace, spec.image, binds, spec.env, !spec.sudo)
	b.must(b.current().Attach(b.key, b.pid))
	b.cfg = b.config(spec.sudo)
	if !spec.noConfig {
		b.found, err = b.current().Configure(b.ctx(20*time.Second), b.key, b.cfg)
		b.must(err)
	}
	b.listen()
	return b
}

func (b *box) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) ctx(limit time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	b.t.Cleanup(cancel)
	return ctx
}

func (b *box) current() *initlink.Links {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.links
}

// openLinks stands for an agent's start.
func (b *box) openLinks() {
	b.t.Helper()
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	links, err := initlink.New(initlink.Options{Dir: filepath.Join(b.dir, "links"), Log: log})
	b.must(err)
	b.mu.Lock()
	b.links = links
	b.mu.Unlock()
}

func (b *box) newKey(name string) ssh.Signer {
	b.t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	b.must(err)
	block, err := ssh.MarshalPrivateKey(private, "")
	b.must(err)
	b.must(os.WriteFile(filepath.Join(b.dir, name), pem.EncodeToMemory(block), 0o600))
	signer, err := ssh.NewSignerFromKey(private)
	b.must(err)
	return signer
}

// config has a host certificate by a CA of its own, which the client trusts and which is all that it trusts.
func (b *box) config(sudo bool) initlink.Config {
	b.t.Helper()
	ca := b.newKey("ca")
	principal := "demo.carrel." + b.key.Workspace
	cert := &ssh.Certificate{
		Key: b.host.PublicKey(), CertType: ssh.HostCert, ValidPrincipals: []string{principal},
		ValidAfter: uint64(time.Now().Add(-time.Hour).Unix()), ValidBefore: uint64(time.Now().Add(time.Hour).Unix()),
	}
	b.must(cert.SignCert(rand.Reader, ca))
	hostPEM, err := os.ReadFile(filepath.Join(b.dir, "host"))
	b.must(err)
	exe, err := os.Executable()
	b.must(err)
	known := "@cert-authority *.carrel.* " + string(ssh.MarshalAuthorizedKey(ca.PublicKey()))
	b.must(os.WriteFile(filepath.Join(b.dir, "known"), []byte(known), 0o600))
	client := fmt.Sprintf(`Host demo.carrel
  User ana
  HostKeyAlias %[5]s
  IdentityFile %[1]s/id
  IdentitiesOnly yes
  UserKnownHostsFile %[1]s/known
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  CanonicalizeHostname no
  ProxyCommand env %[2]s=%[3]s %[4]s
  Ciphers aes128-gcm@openssh.com
`, b.dir, proxyEnv, filepath.Join(b.dir, "s"), exe, principal)
	b.must(os.WriteFile(filepath.Join(b.dir, "config"), []byte(client), 0o600))
	return initlink.Config{
		Login: "ana", UID: testUID, GID: testGID, Groups: []initlink.Group{{Name: "lab", GID: 20000}}, Home: "/home/ana", Sudo: sudo,
		HostKey: hostPEM, HostCertificate: string(ssh.MarshalAuthorizedKey(cert)),
		AuthorizedKeys: []string{string(ssh.MarshalAuthorizedKey(b.user.PublicKey()))},
		Env:            map[string]string{"CARREL_WORKSPACE": "demo", "NVIDIA_VISIBLE_DEVICES": "void"},
	}
}

// listen stands for the gateway: each connection becomes a stream.
func (b *box) listen() {
	b.t.Helper()
	l, err := net.Listen("unix", filepath.Join(b.dir, "s"))
	b.must(err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { b.carry(conn) })
		}
	})
	b.t.Cleanup(func() {
		l.Close()
		b.current().Close() // ends streams that still wait
		_ = b.engine.try("POST", "/containers/"+b.id+"/kill", nil, nil)
		wg.Wait()
	})
}

func (b *box) carry(conn net.Conn) {
	defer conn.Close()
	inside, err := b.open()
	if err != nil {
		return
	}
	_, _ = stream.Relay(context.Background(), conn, inside, stream.RelayOptions{})
}

func (b *box) open() (net.Conn, error) {
	return b.current().OpenStream(context.Background(), b.key, stream.Hello{Workspace: b.key.Workspace, Epoch: b.key.Epoch, Kind: "ssh"})
}

type result struct {
	stdout, stderr string
	status         int
	took           time.Duration
}

func (b *box) run(stdin io.Reader, name string, args ...string) result {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, append([]string{"-F", filepath.Join(b.dir, "config")}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	begin := time.Now()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		b.t.Fatalf("%s %v: %v", name, args, err)
	}
	if ctx.Err() != nil {
		b.t.Fatalf("%s %v: not done in time; stderr %q", name, args, errs.String())
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode(), time.Since(begin)}
}

func (b *box) ssh(args ...string) result {
	b.t.Helper()
	return b.run(nil, "ssh", append([]string{"demo.carrel"}, args...)...)
}

func (b *box) want(got result, stdout string, status int) {
	b.t.Helper()
	if got.stdout != stdout || got.status != status {
		b.t.Errorf("got stdout %.300q, stderr %.300q, status %d; want %q, %d", got.stdout, got.stderr, got.status, stdout, status)
	}
}

// client connects an x/crypto client.
func (b *box) client() *ssh.Client {
	b.t.Helper()
	conn, err := b.open()
	b.must(err)
	c, chans, reqs, err := ssh.NewClientConn(conn, "demo", &ssh.ClientConfig{
		User: "ana", Auth: []ssh.AuthMethod{ssh.PublicKeys(b.user)}, HostKeyAlgorithms: []string{ssh.KeyAlgoED25519},
		HostKeyCallback: ssh.FixedHostKey(b.host.PublicKey()), Timeout: 20 * time.Second,
	})
	b.must(err)
	client := ssh.NewClient(c, chans, reqs)
	b.t.Cleanup(func() { client.Close() })
	return client
}

// output runs a command on an x/crypto client.
func output(c *ssh.Client, cmd string) (string, error) {
	s, err := c.NewSession()
	if err != nil {
		return "", err
	}
	defer s.Close()
	out, err := s.CombinedOutput(cmd)
	return string(out), err
}

// servePID is serve's process id on the host, 0 while it does not run. Any thread of process 1 may have forked it.
func (b *box) servePID() int {
	b.t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", b.pid))
	b.must(err)
	for _, list := range lists {
		out, _ := os.ReadFile(list)
		for _, word := range strings.Fields(string(out)) {
			line, _ := os.ReadFile("/proc/" + word + "/cmdline")
			if pid, err := strconv.Atoi(word); err == nil && bytes.HasPrefix(line, []byte("carrel-init\x00serve\x00")) {
				return pid
			}
		}
	}
	return 0
}

// killServe waits until serve runs and kills it.
func (b *box) killServe() {
	b.t.Helper()
	pid := 0
	eventually(b.t, 5*time.Second, "serve runs", func() bool { pid = b.servePID(); return pid > 1 })
	b.must(syscall.Kill(pid, syscall.SIGKILL))
}
