package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// revoked is how soon what is open must be cut after its right was taken (DESIGN, promises).
const revoked = 5 * time.Second

// TestBadNames holds that a name that cannot be is refused with a sentence, by `up` and by all that take a name, and leaves nothing behind.
func TestBadNames(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	for _, name := range []string{"a.b", "a/b", "../a", "Demo", "a--b", strings.Repeat("a", 300), "a b", "", "1a", "a-", "ä", "a\nb", "a_b", "$(id)", "a\x1b[31m"} {
		out, stderr, code := ana.run(nil, "up", "--", name)
		if code != 2 && code != 3 || !strings.Contains(stderr, "name") || len(stderr) > 600 || strings.Contains(out+stderr, "\x1b") {
			t.Errorf("up %.40q: exit %d\n%.700q%.700q", name, code, out, stderr)
		}
	}
	ana.fails([]string{"-x"}, "up", "--", "-x")
	for _, args := range [][]string{{"user", "add"}, {"pool", "create"}, {"project", "create"}} {
		for _, name := range []string{"A.B", "-x", strings.Repeat("a", 300)} {
			ana.fails([]string{"name"}, append(args, "--", name)...)
		}
	}
	for _, verb := range []string{"show", "stop", "start", "restart", "rm", "logs"} {
		for _, name := range []string{"nosuch", "a.b", "Demo", strings.Repeat("a", 300), "-x"} {
			_, stderr, code := ana.run(nil, verb, "--", name)
			if code != 4 && code != 2 || stderr == "" || len(stderr) > 600 {
				t.Errorf("%s %.40q: exit %d\n%.700s", verb, name, code, stderr)
			}
		}
	}
	if left := ana.ok("ls", "-q") + ana.ok("volume", "ls", "-q"); left != "" {
		t.Errorf("refused names left behind: %s", left)
	}
}

// TestUnknownThings holds that what is not there is named, with what is.
func TestUnknownThings(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	ana.fails([]string{"nopool", "default"}, "up", "w", "--pool", "nopool")
	ana.fails([]string{"carrel/nosuch:local"}, "up", "w", "--image", "carrel/nosuch:local")
	ana.fails([]string{"127.0.0.1:1/a/b:c"}, "up", "w", "--image", "127.0.0.1:1/a/b:c")
	ana.fails([]string{"image"}, "up", "w", "--image", "not a reference!")
	ana.fails([]string{"noproject"}, "up", "w", "--project", "noproject")
	ana.fails([]string{"memory"}, "up", "w", "--memory", "9999T")
	ana.fails([]string{"memory"}, "up", "w", "--memory", "lots")
	ana.fails([]string{"uid", "1000"}, "user", "add", "kim", "--uid", "999")
	ana.fails([]string{"uid", "1000"}, "user", "add", "kim", "--uid", "0")
	ana.fails([]string{"uid"}, "user", "add", "kim", "--uid", "-5")
	ana.fails([]string{"nobodyhere"}, "user", "disable", "nobodyhere")
	ana.fails([]string{"nohost"}, "host", "drain", "nohost")
	if users := ana.ok("user", "ls", "-q"); strings.TrimSpace(users) != "admin" {
		t.Errorf("refused accounts left behind: %s", users)
	}
	if left := ana.ok("ls", "-q") + ana.ok("volume", "ls", "-q"); left != "" {
		t.Errorf("refused workspaces left behind: %s", left)
	}
}

// TestTokensThatDoNotCount holds what a wrong, a spent and a revoked sign-in get, and that a gateway that is not there is said to be so.
func TestTokensThatDoNotCount(t *testing.T) {
	t.Parallel()
	l := newLab(t, true, "--token-life", "20s")
	ana := l.admin
	stranger := &person{l: l, name: "stranger", home: t.TempDir()}
	stranger.config = filepath.Join(stranger.home, "ssh_config")
	stranger.refused(3, []string{"carrel login"}, "ls")
	stranger.refused(3, []string{"sign-in"}, "login", l.url+"/#sign-in=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
	stranger.refused(2, []string{"link"}, "login", "hello")
	out := ana.ok("user", "add", "bo", "-o", "json")
	var made struct {
		SignIn string `json:"sign_in"`
	}
	if err := json.Unmarshal([]byte(out), &made); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	bo := l.newPerson("bo", made.SignIn)
	stranger.refused(3, []string{"sign-in"}, "login", made.SignIn) // it was good once

	bo.ok("ls")
	tokens := list[struct {
		ID      string `json:"id"`
		Current bool   `json:"current"`
	}](bo, "token", "ls")
	if len(tokens) != 1 {
		t.Fatalf("bo has tokens %+v", tokens)
	}
	bo.ok("token", "revoke", tokens[0].ID)
	bo.refused(3, []string{"revoked", "carrel login"}, "ls")
	bo.refused(255, []string{"revoked"}, "exec", "demo", "--", "true")

	l.eventually("the admin's token has expired", func() bool { _, _, code := ana.run(nil, "ls"); return code != 0 })
	ana.refused(3, []string{"expired", "carrel login"}, "ls")

	l.kill("dev", syscall.SIGTERM)
	asked := time.Now()
	for _, args := range [][]string{{"ls"}, {"up", "x"}, {"show", "x"}, {"stop", "x"}, {"whoami"}} {
		ana.refused(6, []string{l.url, "not reached", "connection refused"}, args...)
	}
	ana.refused(255, []string{"not reached"}, "exec", "x", "--", "true")
	t.Logf("six commands without a gateway took %v", time.Since(asked).Round(time.Millisecond))
	l.admin = nil // nothing to clean up, and no token to do it with
}

// refused runs carrel, which must fail with a code and with all texts on stderr.
func (p *person) refused(code int, want []string, args ...string) {
	p.l.t.Helper()
	p.fails(want, args...)
	if _, _, got := p.run(nil, args...); got != code {
		p.l.t.Errorf("carrel %s: exit %d, want %d", strings.Join(args, " "), got, code)
	}
}

// TestDisabledPerson holds that a disabled account's open connections are cut at once and new ones refused, while the work goes on.
func TestDisabledPerson(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	bo := l.addUser("bo")
	bo.ok("up", "demo", "-q")
	open := bo.beginProgram("ssh", "-F", bo.config, "demo.carrel", "echo in; sleep 600")
	l.eventually("bo is in", func() bool { return strings.Contains(open.output(), "in\n") })
	watching := bo.begin("logs", "-f", "demo")
	disabled := time.Now()
	l.admin.ok("user", "disable", "bo")
	if _, code := open.wait(commandLimit); code == 0 {
		t.Error("the open ssh ended with 0")
	}
	cut := time.Since(disabled)
	t.Logf("the open ssh was cut %v after `user disable` began", cut.Round(time.Millisecond))
	if cut > revoked {
		t.Errorf("the open ssh was cut after %v, want at most %v", cut, revoked)
	}
	if out, code := watching.wait(commandLimit); code == 0 {
		t.Errorf("the open watch ended with 0\n%s", out)
	}
	bo.refused(3, []string{"disabled"}, "ls")
	if _, stderr, code := bo.ssh(nil, "demo.carrel", "true"); code != 255 || !strings.Contains(stderr, "disabled") {
		t.Errorf("ssh of a disabled account: exit %d\n%s", code, stderr)
	}
	if w := l.admin.show("bo/demo"); w.State != "running" {
		t.Errorf("the workspace of a disabled account is %s", w.State)
	}
	l.admin.ok("user", "enable", "bo")
	if got := bo.sshOK("demo.carrel", "echo in"); got != "in\n" {
		t.Errorf("after enable ssh says %q", got)
	}
}

// TestImageWithoutShell holds that an image without a shell runs, and that a shell request in it says so, while programs and SFTP work.
func TestImageWithoutShell(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	ana.ok("up", "bare", "--image", "carrel/scratch:local", "-q")
	for _, args := range [][]string{{"bare.carrel"}, {"-tt", "bare.carrel"}, {"bare.carrel", "echo $HOME | cat"}} {
		out, stderr, code := ana.ssh(strings.NewReader(""), args...)
		if code == 0 || !strings.Contains(out+stderr, "no shell") {
			t.Errorf("ssh %v: exit %d\n%s%s", args, code, out, stderr)
		}
	}
	if out, stderr, code := ana.ssh(nil, "bare.carrel", "/app 'two words' x"); code != 0 || out != "two words x\n" {
		t.Errorf("its program: exit %d\n%s%s", code, out, stderr)
	}
	file := filepath.Join(ana.home, "sent")
	if err := os.WriteFile(file, []byte("sent\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	batch := strings.NewReader(fmt.Sprintf("put %s sent\nget sent %s.back\n", file, file))
	if out, stderr, code := ana.program(batch, "sftp", "-F", ana.config, "-b", "-", "bare.carrel"); code != 0 {
		t.Fatalf("sftp: exit %d\n%s%s", code, out, stderr)
	}
	if got := readFile(file + ".back"); got != "sent" {
		t.Errorf("through sftp came %q", got)
	}
}

// TestBadSettings holds that all faults of a settings file are told at once, each with its place.
func TestBadSettings(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "gateway.yaml")
	text := "listen: 127.0.0.1:0\nlisten_port: 7070\nscheduler:\n  tick: often\nlimits:\n  gpus_per_user: many\nimages:\n  allow: everything\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	l := &lab{t: t, state: t.TempDir(), procs: map[string]*process{}}
	out, code := l.refusedStart("gateway", "--state", filepath.Join(l.state, "state"), "--config", file)
	if code != 2 {
		t.Errorf("exit %d, want 2", code)
	}
	for _, want := range []string{file + ":2", "listen_port", file + ":4", "scheduler.tick", file + ":6", "limits.gpus_per_user", "images.allow", "everything"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in:\n%s", want, out)
		}
	}
	if _, err := os.Stat(filepath.Join(l.state, "state")); err == nil {
		t.Error("a refused start left a state directory")
	}
	out, code = l.refusedStart("gateway", "--state", filepath.Join(l.state, "state"), "--listen", "0.0.0.0:0", "--tls-cert-file", "/nonexistent")
	if code != 2 || !strings.Contains(out, "tls.key_file") {
		t.Errorf("a certificate without a key: exit %d\n%s", code, out)
	}
	if out, code = l.refusedStart("gateway", "--no-such-flag"); code != 2 || !strings.Contains(out, "no-such-flag") {
		t.Errorf("an unknown flag: exit %d\n%s", code, out)
	}
	if out, code = l.refusedStart("gatewy"); code != 2 || !strings.Contains(out, "gatewy") {
		t.Errorf("an unknown command: exit %d\n%s", code, out)
	}
}

// refusedStart runs carreld, which must end by itself, and returns what it wrote and its exit code.
func (l *lab) refusedStart(args ...string) (output string, code int) {
	l.t.Helper()
	l.start("refused", args...)
	p := l.procs["refused"]
	delete(l.procs, "refused")
	select {
	case <-p.done:
	case <-time.After(stateLimit):
		_ = p.cmd.Process.Kill()
		l.t.Fatalf("carreld %s did not end\n%s", strings.Join(args, " "), readFile(p.log))
	}
	output = readFile(p.log)
	if err := os.Remove(p.log); err != nil {
		l.t.Fatal(err)
	}
	return output, p.cmd.ProcessState.ExitCode()
}

// TestSecondGateway holds that one database has one gateway, one data directory one agent, and one port one listener.
func TestSecondGateway(t *testing.T) {
	t.Parallel()
	l := newLab(t, false)
	holder := fmt.Sprint(l.procs["gateway"].cmd.Process.Pid)
	out, code := l.refusedStart("gateway", "--state", l.state, "--listen", "127.0.0.1:0")
	if code == 0 || !strings.Contains(out, holder) {
		t.Errorf("a second gateway: exit %d; the first's pid %s is not in:\n%s", code, holder, out)
	}
	if out, code = l.refusedStart("recover", "--state", l.state); code == 0 || !strings.Contains(out, holder) {
		t.Errorf("recover beside a gateway: exit %d\n%s", code, out)
	}
	other := t.TempDir()
	if out, code = l.refusedStart("gateway", "--state", filepath.Join(other, "state"), "--listen", l.listen()); code == 0 || !strings.Contains(out, "in use") {
		t.Errorf("a gateway on a taken port: exit %d\n%s", code, out)
	}
	if out, code = l.refusedStart("agent", "--data", filepath.Join(l.state, "agent"), "--gpus", "simulated:4x4090"); code == 0 || !strings.Contains(out, fmt.Sprint(l.procs["agent"].cmd.Process.Pid)) {
		t.Errorf("a second agent on one data directory: exit %d\n%s", code, out)
	}
	if out, code = l.refusedStart("agent", "--data", filepath.Join(other, "agent"), "--gpus", "simulated:4x4090"); code == 0 || !strings.Contains(out, "join") {
		t.Errorf("an agent that never joined: exit %d\n%s", code, out)
	}
	if out, code = l.refusedStart("agent", "--data", filepath.Join(other, "agent"), "--gpus", "four", "--join", "carrel-join.x"); code == 0 || !strings.Contains(out, "gpus") {
		t.Errorf("an agent with unknown GPUs: exit %d\n%s", code, out)
	}
	l.admin.ok("ls")
}

// TestEngineDown holds that a host without an engine says so, and that what needs it waits or fails with that reason instead of hanging.
func TestEngineDown(t *testing.T) {
	t.Parallel()
	l := &lab{t: t, state: t.TempDir(), procs: map[string]*process{}}
	if err := os.Chmod(l.state, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	l.startGateway("127.0.0.1:0")
	l.waitReady()
	l.admin = l.newPerson("admin", l.firstSignIn())
	ana := l.admin
	l.start("agent", "agent", "--data", filepath.Join(l.state, "agent"), "--name", "h1", "--gpus", "simulated:4x4090", "--link-backoff", "1s",
		"--engine-host", "unix://"+filepath.Join(l.state, "no.sock"), "--engine-call-timeout", "2s", "--times-facts", "1s", "--join", strings.TrimSpace(ana.ok("host", "token")))
	l.eventually("the host says what is wrong", func() bool {
		out := ana.ok("host", "ls", "-o", "json")
		return strings.Contains(out, "engine") && strings.Contains(out, "no.sock")
	})
	asked := time.Now()
	out, stderr, code := ana.run(nil, "up", "w", "-d", "-q")
	t.Logf("up without an engine: exit %d after %v\n%s%s", code, time.Since(asked).Round(time.Millisecond), out, stderr)
	if code == 0 {
		l.eventually("w says why it waits", func() bool { w := ana.show("w"); return w.Queue.Why != "" || w.Reason.Message != "" })
		ana.ok("stop", "w")
	} else if !strings.Contains(stderr, "no.sock") {
		t.Errorf("up without an engine: exit %d\n%s", code, stderr)
	}
	if left := ana.ok("ls", "-q"); code != 0 && left != "" {
		t.Errorf("a refused workspace left behind: %s", left)
	}
}
