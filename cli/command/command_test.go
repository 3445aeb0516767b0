package command_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/cli/command"
	"github.com/carrel-dev/carrel/cli/command/fakegateway"
)

// machine is a laptop: directories of its own, an environment, and what ran on it.
type machine struct {
	t   *testing.T
	dir string
	env map[string]string
	sys command.System
	ran [][]string
}

// result is what a command line did.
type result struct {
	code        int
	out, errOut string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{t: t, dir: t.TempDir(), env: map[string]string{}}
	m.env["CARREL_CONFIG_DIR"] = filepath.Join(m.dir, "carrel config")
	m.sys = command.System{
		In: strings.NewReader(""), Width: func() int { return 100 }, Getenv: func(k string) string { return m.env[k] }, Now: time.Now, Version: "v1.3.0",
		SSHDir:     func() (string, error) { return filepath.Join(m.dir, ".ssh"), nil },
		Executable: func() (string, error) { return "/opt/carrel/bin/carrel", nil },
		Run: func(_ context.Context, argv []string) (int, error) {
			m.ran = append(m.ran, argv)
			return 0, nil
		},
		Output: func(ctx context.Context, argv []string) (string, error) {
			b, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
			return string(b), err
		},
		Stdio: func() (io.Reader, io.Writer) { return strings.NewReader(""), io.Discard },
	}
	return m
}

func (m *machine) run(args ...string) result {
	m.t.Helper()
	return m.runCtx(m.t.Context(), args...)
}

func (m *machine) runCtx(ctx context.Context, args ...string) result {
	m.t.Helper()
	var out, errOut lockedBuffer
	sys := m.sys
	sys.Out, sys.Err = &out, &errOut
	code := command.Main(ctx, args, sys)
	return result{code, out.String(), errOut.String()}
}

// ok runs a command that must succeed and returns its output.
func (m *machine) ok(args ...string) string {
	m.t.Helper()
	r := m.run(args...)
	if r.code != 0 {
		m.t.Fatalf("carrel %q: exit code %d\nstdout: %s\nstderr: %s", args, r.code, r.out, r.errOut)
	}
	return r.out
}

// fails runs a command that must end with code and say want on stderr.
func (m *machine) fails(code int, want string, args ...string) result {
	m.t.Helper()
	r := m.run(args...)
	if r.code != code {
		m.t.Errorf("carrel %q: exit code %d, want %d; stderr: %s", args, r.code, code, r.errOut)
	}
	if !strings.Contains(r.errOut, want) {
		m.t.Errorf("carrel %q: stderr %q does not say %q", args, r.errOut, want)
	}
	return r
}

// signedIn is a machine on which a user is signed in.
func signedIn(t *testing.T, g *fakegateway.Gateway, user string) *machine {
	t.Helper()
	m := newMachine(t)
	m.ok("login", g.AddUser(user))
	return m
}

func (m *machine) file(parts ...string) string {
	m.t.Helper()
	b, err := os.ReadFile(filepath.Join(append([]string{m.dir}, parts...)...))
	if err != nil {
		m.t.Fatal(err)
	}
	return string(b)
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// waitFor polls until cond holds.
func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("not in 10 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond) //nolint:forbidigo // a poll with a deadline
	}
}
