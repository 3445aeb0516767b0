// Package e2e runs whole journeys with the real programs: gateway, agent, Docker engine, OpenSSH's client. GPUs alone are simulated.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// testImage is the small image that `make test` puts into the engine; it has bash, rsync, python3, sudo and curl.
const testImage = "carrel/test:local"

// limits of a test: how long one command may take, and how long a state may take to come about. The machine that runs the tests may
// be busy, so they are generous; what must be fast is measured by `make bench`.
const (
	commandLimit = 2 * time.Minute
	stateLimit   = 90 * time.Second
)

// bin returns a program of this checkout.
func bin(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("CARREL_TEST_BIN")
	if dir == "" {
		dir = filepath.Join("..", "..", "bin")
	}
	path, err := filepath.Abs(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v; run `make build`, or all of it with `make test`", err)
	}
	return path
}

// lab is a deployment of its own: state directory, gateway, agents, people.
type lab struct {
	t     *testing.T
	state string
	url   string
	env   []string // of the programs that it starts, beside the test's own
	procs map[string]*process
	admin *person
}

// process is a program that the lab started.
type process struct {
	cmd  *exec.Cmd
	log  string
	done chan struct{}
}

// newLab starts a gateway and one agent with four simulated GPUs, and signs the admin in. With together they share a process, as in
// `carreld dev`.
func newLab(t *testing.T, together bool, gatewayFlags ...string) *lab {
	t.Helper()
	l := prepareLab(t)
	if together {
		l.start("dev", append([]string{"dev", "--state", l.state, "--listen", "127.0.0.1:0", "--gpus", "simulated:4x4090", "--images-default", testImage, "--scheduler-tick", "1s"}, gatewayFlags...)...)
	} else {
		l.startGateway("127.0.0.1:0", gatewayFlags...)
	}
	l.waitReady()
	l.admin = l.newPerson("admin", l.firstSignIn())
	if !together {
		l.startAgent(strings.TrimSpace(l.admin.ok("host", "token")))
		l.eventually("the host is ready", func() bool {
			return strings.Contains(l.admin.ok("host", "ls", "-o", "json"), `"ready"`)
		})
	}
	return l
}

// newBareLab starts a gateway and no agent, and signs the admin in.
func newBareLab(t *testing.T, gatewayFlags ...string) *lab {
	t.Helper()
	l := prepareLab(t)
	l.startGateway("127.0.0.1:0", gatewayFlags...)
	l.waitReady()
	l.admin = l.newPerson("admin", l.firstSignIn())
	return l
}

func prepareLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t, state: t.TempDir(), procs: map[string]*process{}}
	if err := os.Chmod(l.state, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	return l
}

func (l *lab) startGateway(listen string, flags ...string) {
	l.t.Helper()
	args := []string{"gateway", "--state", l.state, "--listen", listen, "--images-allow", "any", "--images-default", testImage, "--scheduler-tick", "1s"}
	l.start("gateway", append(args, flags...)...)
}

// startAgent starts an agent with four simulated GPUs, unless flags say otherwise; with a token it joins first.
func (l *lab) startAgent(token string, flags ...string) {
	l.t.Helper()
	args := []string{"agent", "--data", filepath.Join(l.state, "agent"), "--name", "h1", "--gpus", "simulated:4x4090", "--link-backoff", "1s", "--times-list", "2s", "--times-heartbeat", "1s"}
	if token != "" {
		args = append(args, "--join", token)
	}
	l.start("agent", append(args, flags...)...)
}

// start runs carreld in a session of its own; its output goes to a file that a failing test prints.
func (l *lab) start(name string, args ...string) {
	l.t.Helper()
	path := filepath.Join(l.state, name+".log")
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		l.t.Fatal(err)
	}
	cmd := exec.Command(bin(l.t, "carreld"), args...) //nolint:noctx // ends with the lab
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), l.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		l.t.Fatal(err)
	}
	p := &process{cmd: cmd, log: path, done: make(chan struct{})}
	l.procs[name] = p
	go func() {
		_ = cmd.Wait() // how it ended stands in ProcessState
		_ = log.Close()
		close(p.done)
	}()
}

// kill ends a program and waits for its end.
func (l *lab) kill(name string, sig syscall.Signal) {
	l.t.Helper()
	p := l.procs[name]
	if p == nil {
		l.t.Fatalf("no program %s", name)
	}
	_ = p.cmd.Process.Signal(sig) // it may have ended
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		l.t.Fatalf("%s did not end after %s", name, sig)
	}
	delete(l.procs, name)
}

func (l *lab) waitReady() {
	l.t.Helper()
	l.eventually("the gateway is ready", func() bool {
		url, err := os.ReadFile(filepath.Join(l.state, "url"))
		if err != nil {
			return false
		}
		l.url = strings.TrimSpace(string(url))
		res, err := http.Get(l.url + "/readyz") //nolint:noctx // bounded by eventually
		if err != nil {
			return false
		}
		defer func() { _ = res.Body.Close() }()
		return res.StatusCode == http.StatusOK
	})
}

// listen returns the address that the gateway was given, so that it can be started again at the same one.
func (l *lab) listen() string {
	return strings.TrimPrefix(strings.TrimPrefix(l.url, "http://"), "https://")
}

func (l *lab) firstSignIn() string {
	l.t.Helper()
	for _, name := range []string{"dev", "gateway"} {
		log, err := os.ReadFile(filepath.Join(l.state, name+".log"))
		if err != nil {
			continue
		}
		if _, rest, ok := strings.Cut(string(log), "carrel login '"); ok {
			link, _, _ := strings.Cut(rest, "'")
			return link
		}
	}
	l.t.Fatal("no sign-in in the gateway's output")
	return ""
}

func (l *lab) close() {
	if l.admin != nil {
		var all []struct{ Name, Owner string }
		out, _, code := l.admin.run(nil, "ls", "--all", "-o", "json")
		if code == 0 && json.Unmarshal([]byte(out), &all) == nil {
			for _, w := range all {
				if out, stderr, code := l.admin.run(nil, "rm", "--yes", w.Owner+"/"+w.Name); code != 0 {
					l.t.Errorf("rm %s/%s: exit %d\n%s%s", w.Owner, w.Name, code, out, stderr)
				}
			}
		}
		l.waitGone()
	}
	for name := range l.procs {
		l.kill(name, syscall.SIGTERM)
	}
	newEngine(l.t).forget(l.state)
	if l.t.Failed() {
		logs, _ := filepath.Glob(filepath.Join(l.state, "*.log"))
		for _, path := range logs {
			text, _ := os.ReadFile(path)
			l.t.Logf("---- %s\n%s", filepath.Base(path), tail(string(text), 60))
		}
	}
}

// waitGone waits until the engine has no container of the lab any more.
func (l *lab) waitGone() {
	deadline := time.Now().Add(stateLimit)
	for time.Now().Before(deadline) {
		out, _, code := l.admin.run(nil, "ls", "--all", "-q")
		if code != 0 || strings.TrimSpace(out) == "" {
			return
		}
		time.Sleep(200 * time.Millisecond) //nolint:forbidigo // polls a real program
	}
	l.t.Error("workspaces are still there after rm")
}

// eventually polls a condition.
func (l *lab) eventually(what string, ok func() bool) {
	l.t.Helper()
	l.within(stateLimit, what, ok)
}

func (l *lab) within(limit time.Duration, what string, ok func() bool) {
	l.t.Helper()
	deadline := time.Now().Add(limit)
	for !ok() {
		if time.Now().After(deadline) {
			l.t.Fatalf("not within %s: %s", limit, what)
		}
		time.Sleep(50 * time.Millisecond) //nolint:forbidigo // polls real programs
	}
}

func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}

// freePort returns a port that nobody listened on a moment ago.
func freePort(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // closed at once
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	_, port, err := net.SplitHostPort(ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// person is somebody with a laptop: a configuration directory and an ssh configuration of their own.
type person struct {
	l      *lab
	name   string
	home   string
	config string // for ssh -F
}

// newPerson signs somebody in with a link.
func (l *lab) newPerson(name, link string) *person {
	l.t.Helper()
	p := &person{l: l, name: name, home: l.t.TempDir()}
	p.config = filepath.Join(p.home, "ssh_config")
	p.ok("login", link)
	return p
}

// addUser makes an account and signs it in.
func (l *lab) addUser(name string, flags ...string) *person {
	l.t.Helper()
	out := l.admin.ok(append([]string{"user", "add", name, "-o", "json"}, flags...)...)
	i := strings.Index(out, "http")
	if i < 0 {
		l.t.Fatalf("no sign-in in %s", out)
	}
	link, _, _ := strings.Cut(out[i:], `"`)
	return l.newPerson(name, link)
}

func (p *person) env() []string {
	return append(os.Environ(), "HOME="+p.home, "CARREL_CONFIG_DIR="+filepath.Join(p.home, "settings"), "CARREL_SSH_CONFIG="+p.config, "NO_COLOR=1")
}

// run runs carrel and returns what it wrote and its exit code.
func (p *person) run(stdin io.Reader, args ...string) (stdout, stderr string, code int) {
	p.l.t.Helper()
	return p.program(stdin, bin(p.l.t, "carrel"), args...)
}

// ok runs carrel, which must succeed, and returns what it wrote.
func (p *person) ok(args ...string) string {
	p.l.t.Helper()
	out, stderr, code := p.run(nil, args...)
	if code != 0 {
		p.l.t.Fatalf("carrel %s: exit %d\n%s%s", strings.Join(args, " "), code, out, stderr)
	}
	return out
}

// fails runs carrel, which must fail with a code other than 0 and with all texts on stderr.
func (p *person) fails(want []string, args ...string) {
	p.l.t.Helper()
	out, stderr, code := p.run(nil, args...)
	if code == 0 {
		p.l.t.Errorf("carrel %s: exit 0, want a failure\n%s", strings.Join(args, " "), out)
	}
	for _, text := range want {
		if !strings.Contains(stderr, text) {
			p.l.t.Errorf("carrel %s: %q is not in:\n%s", strings.Join(args, " "), text, stderr)
		}
	}
}

// ssh runs the real ssh client.
func (p *person) ssh(stdin io.Reader, args ...string) (stdout, stderr string, code int) {
	p.l.t.Helper()
	return p.program(stdin, "ssh", append([]string{"-F", p.config}, args...)...)
}

// sshOK runs ssh, which must succeed.
func (p *person) sshOK(args ...string) string {
	p.l.t.Helper()
	out, stderr, code := p.ssh(nil, args...)
	if code != 0 {
		p.l.t.Fatalf("ssh %s: exit %d\n%s%s", strings.Join(args, " "), code, out, stderr)
	}
	return out
}

func (p *person) program(stdin io.Reader, name string, args ...string) (stdout, stderr string, code int) {
	p.l.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.Stdin = p.env(), stdin
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit):
		code = exit.ExitCode()
	default:
		p.l.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, errs.String())
	}
	if ctx.Err() != nil {
		p.l.t.Fatalf("%s %s: did not end within %s\n%s%s", name, strings.Join(args, " "), commandLimit, out.String(), errs.String())
	}
	return out.String(), errs.String(), code
}

// shown is what `show -o json` says of a workspace, as far as tests look at it.
type shown struct {
	ID     string `json:"id"`
	State  string `json:"state"`
	Reason struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	} `json:"reason"`
	Queue struct {
		Place int    `json:"place"`
		Why   string `json:"why"`
	} `json:"queue"`
	Run struct {
		Epoch     int       `json:"epoch"`
		Host      string    `json:"host"`
		StartedAt time.Time `json:"started_at"`
		EndedAt   time.Time `json:"ended_at"`
	} `json:"run"`
	Leases  []lease `json:"leases"`
	Devices []struct {
		ID string `json:"id"`
	} `json:"devices"`
	Mounts []struct {
		VolumeID string `json:"volume_id"`
		Name     string `json:"name"`
		Target   string `json:"target"`
		ReadOnly bool   `json:"read_only"`
		Home     bool   `json:"home"`
	} `json:"mounts"`
	UnreachableSince time.Time `json:"host_unreachable_since"`
}

// lease is what `show -o json` says of a lease.
type lease struct {
	ID          string    `json:"id"`
	DeviceID    string    `json:"device_id"`
	Epoch       int       `json:"epoch"`
	StartedAt   time.Time `json:"started_at"`
	EndedAt     time.Time `json:"ended_at"`
	ReleasedAt  time.Time `json:"released_at"`
	Provisional bool      `json:"provisional"`
}

// show returns a workspace as its owner sees it.
func (p *person) show(name string) shown {
	p.l.t.Helper()
	var w shown
	out := p.ok("show", name, "-o", "json")
	if err := json.Unmarshal([]byte(out), &w); err != nil {
		p.l.t.Fatalf("show %s: %v\n%s", name, err, out)
	}
	return w
}

// waitState waits until a workspace is in a state.
func (p *person) waitState(name, state string) shown {
	p.l.t.Helper()
	var w shown
	defer func() {
		if w.State != state {
			p.l.t.Logf("%s is %+v", name, w)
		}
	}()
	p.l.eventually(fmt.Sprintf("%s is %s", name, state), func() bool {
		w = p.show(name)
		return w.State == state
	})
	return w
}
