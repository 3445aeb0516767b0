//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/cli/command/fakegateway"
)

// beCarrel makes this test binary the program.
const beCarrel = "CARREL_TEST_BE_CARREL"

func TestMain(m *testing.M) {
	if os.Getenv(beCarrel) != "" {
		os.Exit(run())
	}
	os.Exit(m.Run())
}

// laptop is a machine with directories of its own on which the real program and the real ssh run.
type laptop struct {
	t   *testing.T
	dir string
	env []string
}

func newLaptop(t *testing.T) *laptop {
	t.Helper()
	dir := filepath.Join(t.TempDir(), `ana b'c`) // CLI-07 wherever the program runs
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	l := &laptop{t: t, dir: dir}
	l.env = []string{
		beCarrel + "=1", "PATH=" + os.Getenv("PATH"), "HOME=" + dir, "CARREL_CONFIG_DIR=" + filepath.Join(dir, `state #"`),
		"CARREL_SSH_CONFIG=" + l.sshConfig(), "SHELL=/bin/sh",
	}
	return l
}

func (l *laptop) sshConfig() string { return filepath.Join(l.dir, "ssh", "config") }

func (l *laptop) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	if name == "carrel" {
		self, err := os.Executable()
		if err != nil {
			l.t.Fatal(err)
		}
		name = self
	}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = l.env
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

type result struct {
	code        int
	out, errOut string
	took        time.Duration
}

func (l *laptop) runWith(stdin io.Reader, name string, args ...string) result {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), 30*time.Second)
	defer cancel()
	cmd := l.command(ctx, name, args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	begin := time.Now()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		l.t.Fatalf("%s %q: %v", name, args, err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errOut.String(), time.Since(begin)}
}

func (l *laptop) run(name string, args ...string) result {
	l.t.Helper()
	return l.runWith(nil, name, args...)
}

func (l *laptop) ok(name string, args ...string) string {
	l.t.Helper()
	r := l.run(name, args...)
	if r.code != 0 {
		l.t.Fatalf("%s %q: %+v", name, args, r)
	}
	return r.out
}

func signedIn(t *testing.T, g *fakegateway.Gateway) *laptop {
	t.Helper()
	l := newLaptop(t)
	l.ok("carrel", "login", g.AddUser("ana"))
	return l
}

// SSH-01 through plain ssh, `carrel ssh` and `carrel exec`, over plain http and over TLS.
func TestExitStatusAndBytesPassThrough(t *testing.T) {
	for name, g := range map[string]*fakegateway.Gateway{"http": fakegateway.New(t), "tls": fakegateway.NewTLS(t)} {
		t.Run(name, func(t *testing.T) {
			l := signedIn(t, g)
			l.ok("carrel", "up", "w1")
			for n, want := range map[int]int{0: 0, 1: 1, 2: 2, 77: 77, 255: 255, 256: 0} {
				line := fmt.Sprintf("exit %d", n)
				if r := l.run("ssh", "-F", l.sshConfig(), "w1.carrel", line); r.code != want {
					t.Errorf("ssh %q: %+v", line, r)
				}
				if r := l.run("carrel", "ssh", "w1", "--", line); r.code != want {
					t.Errorf("carrel ssh %q: %+v", line, r)
				}
				if r := l.run("carrel", "exec", "w1", "--", "sh", "-c", line); r.code != want {
					t.Errorf("carrel exec %q: %+v", line, r)
				}
			}
			if r := l.run("carrel", "exec", "w1", "--", "no-such-cmd"); r.code != 127 {
				t.Errorf("no-such-cmd: %+v", r)
			}
			args := []string{"", "a  b", "it's", `"q"`, "$HOME", "`id`", "*", "-n", "a\nb", `\`}
			got := l.ok("carrel", append([]string{"exec", "w1", "--", "printf", `%s|`}, args...)...)
			if got != strings.Join(args, "|")+"|" {
				t.Errorf("arguments arrive as %q", got)
			}
			r := l.runWith(strings.NewReader("hello\n"), "ssh", "-F", l.sshConfig(), "w1.carrel", "cat; exit 7")
			if r.out != "hello\n" || r.code != 7 {
				t.Errorf("stdin: %+v", r)
			}
			big := make([]byte, 8<<20)
			_, _ = rand.NewChaCha8([32]byte{1}).Read(big)
			if r := l.runWith(bytes.NewReader(big), "ssh", "-F", l.sshConfig(), "w1.carrel", "cat"); r.out != string(big) {
				t.Errorf("8 MiB there and back: %d bytes, %q", len(r.out), r.errOut)
			}
		})
	}
}

func TestOurOwnFailuresInSSHAre255(t *testing.T) {
	g := fakegateway.New(t)
	l := signedIn(t, g)
	l.ok("carrel", "up", "w1")
	l.ok("carrel", "stop", "w1")
	for _, args := range [][]string{{"ssh", "nope"}, {"exec", "nope", "--", "true"}, {"exec", "w1"}, {"ssh"}, {"proxy"}, {"proxy", "--workspace", "nope"}} {
		if r := l.run("carrel", args...); r.code != 255 || r.out != "" || strings.Count(r.errOut, "\n") != 1 {
			t.Errorf("%q: %+v", args, r)
		}
	}
	r := l.run("ssh", "-F", l.sshConfig(), "w1.carrel", "true")
	if r.code != 255 || !strings.Contains(r.errOut, "carrel start w1") {
		t.Errorf("stopped workspace: %+v", r)
	}
}

// SSH-23: stdout of the helper is the SSH stream and nothing else.
func TestProxyWritesOnlyTheStream(t *testing.T) {
	g := fakegateway.New(t)
	l := signedIn(t, g)
	l.ok("carrel", "up", "w1")
	r := l.run("carrel", "proxy", "--workspace", "w1")
	if !strings.HasPrefix(r.out, "SSH-2.0-") || r.code != 0 {
		t.Errorf("%+v", r)
	}
	self, _ := os.Executable()
	r = l.run("sh", "-c", "'"+self+"' proxy --workspace w1 </dev/null | head -c 8")
	if r.out != "SSH-2.0-" {
		t.Errorf("head -c 8: %+v", r)
	}
}

// SSH-24: an ended session is one line with the real address and the command, 255, at once.
func TestEndedSessionIsOneLine(t *testing.T) {
	g := fakegateway.New(t)
	l := signedIn(t, g)
	l.ok("carrel", "up", "w1")
	g.RevokeTokens("ana")
	r := l.run("ssh", "-F", l.sshConfig(), "-T", "w1.carrel", "bash")
	ours := 0
	for line := range strings.Lines(r.errOut) {
		if strings.HasPrefix(line, "carrel: ") {
			ours++
			if !strings.Contains(line, "carrel login "+g.Server.URL) {
				t.Errorf("line %q", line)
			}
		}
	}
	if r.code != 255 || ours != 1 || r.took > 5*time.Second || strings.Contains(r.errOut, "goroutine") {
		t.Errorf("%+v", r)
	}
	if r := l.run("carrel", "ls"); r.code != 3 || r.out != "" {
		t.Errorf("ls: %+v", r)
	}
}

// T-26: a server that is not the workspace is refused.
func TestWrongWorkspaceIsRefused(t *testing.T) {
	g := fakegateway.New(t)
	l := signedIn(t, g)
	l.ok("carrel", "up", "w1")
	l.ok("carrel", "up", "w2")
	managed := filepath.Join(l.dir, "ssh", "carrel", "config")
	b, err := os.ReadFile(managed)
	if err != nil {
		t.Fatal(err)
	}
	w1, w2 := g.Workspace("ana", "w1").GetId(), g.Workspace("ana", "w2").GetId()
	swapped := strings.ReplaceAll(string(b), "--workspace "+w1, "--workspace "+w2) // a misrouted stream
	if err := os.WriteFile(managed, []byte(swapped), 0o600); err != nil {
		t.Fatal(err)
	}
	r := l.run("ssh", "-F", l.sshConfig(), "w1.carrel", "true")
	if r.code != 255 || !strings.Contains(r.errOut, "verification failed") {
		t.Errorf("%+v", r)
	}
}

// SSH-25: calls and streams go through the proxy that the environment names, or the error names it.
func TestEverythingGoesThroughTheProxy(t *testing.T) {
	g := fakegateway.NewTLS(t)
	l := newLaptop(t)
	real := g.Server.Listener.Addr().String()
	var passed atomic.Int32
	refuse := atomic.Bool{}
	proxy := connectProxy(t, func(string) (string, bool) {
		passed.Add(1)
		return real, !refuse.Load()
	})
	l.env = append(l.env, "HTTPS_PROXY=http://"+proxy)
	link := strings.Replace(g.AddUser("ana"), real, "example.com:443", 1) // a name that only the proxy leads to
	l.ok("carrel", "login", link)
	l.ok("carrel", "up", "w1")
	l.ok("carrel", "usage")
	before := passed.Load()
	if out := l.ok("ssh", "-F", l.sshConfig(), "w1.carrel", "echo hi"); out != "hi\n" {
		t.Errorf("%q", out)
	}
	if n := passed.Load() - before; n != 2 {
		t.Errorf("ssh made %d connections through the proxy, want 2 (ticket, stream)", n)
	}
	refuse.Store(true)
	for _, args := range [][]string{{"carrel", "ls"}, {"ssh", "-F", l.sshConfig(), "w1.carrel", "true"}} {
		r := l.run(args[0], args[1:]...)
		if r.code == 0 || r.took > 12*time.Second || !strings.Contains(strings.ToLower(r.errOut), "proxy") && !strings.Contains(r.errOut, "Forbidden") {
			t.Errorf("%q: %+v", args, r)
		}
	}
}

func connectProxy(t *testing.T, to func(target string) (string, bool)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		address, ok := to(r.Host)
		if r.Method != http.MethodConnect || !ok {
			http.Error(w, "this proxy says no", http.StatusForbidden)
			return
		}
		far, err := net.Dial("tcp", address)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		near, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		_, _ = io.WriteString(near, "HTTP/1.1 200 OK\r\n\r\n")
		done := make(chan struct{}, 2)
		for _, pair := range [][2]net.Conn{{near, far}, {far, near}} {
			go func() {
				_, _ = io.Copy(pair[0], pair[1])
				_ = pair[0].(*net.TCPConn).CloseWrite()
				done <- struct{}{}
			}()
		}
		<-done
		<-done
		_ = near.Close()
		_ = far.Close()
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return l.Addr().String()
}

// CLI-05: killed at any point, the files are old or new, whole.
func TestKilledWhileWriting(t *testing.T) {
	g := fakegateway.New(t)
	l := signedIn(t, g)
	l.ok("carrel", "up", "w1")
	user := "Host a\n  User x\n" + strings.Repeat("# line\n", 2000)
	managed := filepath.Join(l.dir, "ssh", "carrel", "config")
	one := string(must(os.ReadFile(managed)))
	g.AddWorkspace("ana", "w2")
	l.ok("carrel", "ls")
	two := string(must(os.ReadFile(managed)))
	if one == two {
		t.Fatal("the managed file does not change")
	}
	whole := l.run("carrel", "ssh-config").took // a point is chosen within the time that it takes here
	for i := range 100 {
		if err := errors.Join(os.WriteFile(l.sshConfig(), []byte(user), 0o600), os.WriteFile(managed, []byte(one), 0o600)); err != nil {
			t.Fatal(err)
		}
		cmd := l.command(t.Context(), "carrel", "ssh-config")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(rand.N(whole + whole/5)) //nolint:forbidigo // a random point; every outcome is checked
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait()
		if got := string(must(os.ReadFile(managed))); got != one && got != two {
			t.Fatalf("try %d: managed file of %d bytes is neither the old nor the new one", i, len(got))
		}
		if got := string(must(os.ReadFile(l.sshConfig()))); got != user && (!strings.HasPrefix(got, "Include ") || !strings.HasSuffix(got, "\n"+user)) {
			t.Fatalf("try %d: the person's file is neither old nor new", i)
		}
	}
	l.ok("carrel", "ssh-config") // nothing of the dead ones stands in the way
	if out := l.ok("ssh", "-F", l.sshConfig(), "w1.carrel", "echo ok"); out != "ok\n" {
		t.Errorf("%q", out)
	}
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// CLI-01: output that cannot be written.
func TestOutputThatCannotBeWritten(t *testing.T) {
	g := fakegateway.New(t)
	l := signedIn(t, g)
	l.ok("carrel", "up", "w1")
	g.SetLogText("a line")
	self, _ := os.Executable()
	for _, args := range []string{"ls", "ls -o json", "ls -o csv", "ls -q", "show w1", "logs w1", "gpus -o csv", "usage", "whoami", "version", "help", "up --help", "completion bash", "start w1", "ssh-config", "stop w1"} {
		r := l.run("sh", "-c", "'"+self+"' "+args+" >/dev/full")
		if r.code != 1 || !strings.Contains(r.errOut, "no space left") {
			t.Errorf("%s >/dev/full: %+v", args, r)
		}
		r = l.run("sh", "-c", "'"+self+"' "+args+" | head -0")
		if strings.Contains(r.errOut, "carrel:") || strings.Contains(r.errOut, "panic") {
			t.Errorf("%s | head -0: %+v", args, r)
		}
	}
}

// CLI-02: never a question without a terminal.
func TestNeverAsksWithoutATerminal(t *testing.T) {
	g := fakegateway.New(t)
	l := signedIn(t, g)
	silent, feeder, err := os.Pipe() // stays open, says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = silent.Close(), feeder.Close() }()
	for _, args := range [][]string{
		{"up", "w1"}, {"stop", "w1"}, {"start", "w1"}, {"restart", "w1"}, {"update", "w1", "--memory", "1G"}, {"ssh-config"}, {"rm", "w1"}, {"up", "w2"},
	} {
		if r := l.runWith(silent, "carrel", args...); r.code != 0 || r.took > 5*time.Second {
			t.Errorf("%q: %+v", args, r)
		}
	}
	for _, args := range [][]string{{"rm", "w2", "--volume"}, {"up", "w2", "--memory", "2G", "--recreate"}, {"volume", "rm", "x"}, {"host", "fence", "x"}} {
		if r := l.runWith(silent, "carrel", args...); r.code != 2 || r.took > 5*time.Second || !strings.Contains(r.errOut, "-y") {
			t.Errorf("%q: %+v", args, r)
		}
	}
	if r := l.runWith(silent, "carrel", "rm", "w2", "--volume", "--yes"); r.code != 0 {
		t.Errorf("--yes: %+v", r)
	}
}
